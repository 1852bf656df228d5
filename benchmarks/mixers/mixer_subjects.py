"""Sparse Mixer Base and the BERT Base of the same family, with random weights, compiled once under ``.cache/bench``.

Both without a head: what is compared is the encoder. Fast Sparse Mixer Base is Sparse Mixer Base at half the capacity,
and so an engine of the same bundle.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ...bucket import Bucket
from ...compiler.compile import compile_bundle
from ...exporters.checkpoints.own_folder import save_model
from ...exporters.families.sparse_mixer.architecture.presets import PRESETS
from ...exporters.families.sparse_mixer.model.encoder import SparseMixer
from ..kept import CACHE
from ..subjects import elsewhere

ONE, EIGHT = Bucket(1, 512), Bucket(8, 512)


def mixer_folder() -> Path:
    return _folder("sparse-mixer-base")


def mixer_bundle() -> Path:
    """Four capacities of Sparse Mixer Base at batch 1 and 8 (some minutes, once)."""
    return _bundle("sparse-mixer-base")


def peer_bundle() -> Path:
    """BERT Base at the same buckets."""
    return _bundle("bert-base")


def _folder(preset: str) -> Path:
    folder = CACHE / f"{preset}-mixer-checkpoint"
    if not folder.exists():
        config = replace(PRESETS[preset], head="none", num_labels=None)
        torch.manual_seed(0)
        save_model(SparseMixer(config).eval(), config, folder, {})
    return folder


def _bundle(preset: str) -> Path:
    path = CACHE / f"{preset}-mixer.bundle"
    if not path.exists():
        compile_bundle(_folder(preset), elsewhere(), path, buckets=[ONE, EIGHT])
    return path
