"""Sparse mixers against BERT, and what capacities weigh."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from ..bucket import Bucket
from ..bundle.entries.engine_entry import EngineEntry
from ..bundle.open_bundle import Bundle, open_bundle
from ..compiler.compile import compile_bundle
from ..exporters.checkpoints.own_folder import save_model
from ..exporters.families.sparse_mixer.config import PRESETS
from ..exporters.families.sparse_mixer.model import SparseMixer
from ..exporters.family import load_model
from .harness import CACHE, Row, benchmark, interleaved, speed_row
from .subjects import CORES, eager_call, elsewhere, packed

ONE, EIGHT = Bucket(1, 512), Bucket(8, 512)


def _folder(preset: str) -> Path:
    folder = CACHE / f"{preset}-mixer-checkpoint"
    if not folder.exists():
        config = replace(PRESETS[preset], head="none", num_labels=None)
        torch.manual_seed(0)
        save_model(SparseMixer(config).eval(), config, folder, {})
    return folder


def _bundle(preset: str) -> Path:
    """At batch 1 and 8; of Sparse Mixer Base four capacities (some minutes, once)."""
    path = CACHE / f"{preset}-mixer.bundle"
    if not path.exists():
        compile_bundle(_folder(preset), elsewhere(), path, buckets=[ONE, EIGHT])
    return path


# Capacity in percent to the model's name and the speed-up that the paper publishes.
_PUBLISHED = {100: ("Sparse Mixer Base", 1.61), 50: ("Fast Sparse Mixer Base", 1.98)}
_ROUNDS = {ONE: 12, EIGHT: 4}


@benchmark
def bench_mixer() -> list[Row]:
    """Sparse Mixer Base and Fast Sparse Mixer Base against BERT Base and eager, and the bytes of four capacities."""
    mixer, peer = _bundle("sparse-mixer-base"), _bundle("bert-base")
    return [*_against_bert(mixer, peer, ONE), *_against_bert(mixer, peer, EIGHT), _against_eager(mixer)]


def engine_of(bundle: Bundle, percent: int, bucket: Bucket) -> EngineEntry:
    """The engine with this capacity, and all of everything else."""
    label = f"moe.capacity_factor{percent}-"
    return next(e for e in bundle.manifest.engines if e.submodel.startswith(label) and e.bucket == bucket)


def _against_bert(mixer: Path, peer: Path, bucket: Bucket) -> list[Row]:
    opened = open_bundle(mixer)
    bert = next(e for e in open_bundle(peer).manifest.engines if e.bucket == bucket)
    with ExitStack() as stack:
        runners = {"bert": stack.enter_context(packed(peer, bert.submodel, bucket))}
        for percent, (name, _) in _PUBLISHED.items():
            runners[name] = stack.enter_context(packed(mixer, engine_of(opened, percent, bucket).submodel, bucket))
        calls = {name: (lambda one=one: one.runner.run(one.feeds)) for name, one in runners.items()}
        times = interleaved(calls, _ROUNDS[bucket], runs=1, warmup=1)
    shape = f"{bucket.batch} x {bucket.sequence}"
    how = f"median ratio of {_ROUNDS[bucket]} interleaved rounds, encoders without a head, packed, {CORES} threads"
    return [
        speed_row(f"{name} engine against BERT Base, {shape}", times, "bert", name, bar, how)
        for name, bar in _PUBLISHED.values()
    ]


def _against_eager(mixer: Path) -> Row:
    model = load_model(_folder("sparse-mixer-base"))
    with packed(mixer, engine_of(open_bundle(mixer), 100, ONE).submodel, ONE) as ours:
        calls = {"eager": eager_call(model, ours.feeds), "ours": lambda: ours.runner.run(ours.feeds)}
        times = interleaved(calls, _ROUNDS[ONE], runs=1, warmup=1)
    how = f"median ratio of {_ROUNDS[ONE]} interleaved rounds, 1 x 512, {CORES} threads each"
    return speed_row("engine against PyTorch eager, Sparse Mixer Base", times, "eager", "ours", 2, how)
