"""Tokens a second behind a long text: a decoder of base shape with MHE attention against one with ordinary heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from time import sleep

import numpy as np
import torch

from ... import load
from ...bucket import Bucket
from ...compiler.compile import compile_bundle
from ...exporters.checkpoints.own_folder import save_model
from ...exporters.families.mhe.architecture.config import MheDecoderConfig
from ...exporters.families.mhe.architecture.presets import PRESETS
from ...exporters.families.mhe.model.decoder import MheDecoder
from ...profiles.budget import BudgetSpec
from ...runtime.model import ElasticModel
from ..harness import Row
from ..kept import CACHE
from ..subjects import CORES, elsewhere

_VALID, _NEW, _POSITIONS = 2048, 32, 2304
_ROUNDS, _PAUSE = 5, 0.3
_FASTER = 1.5


def run() -> list[Row]:
    with load(_bundle("mhe-mul"), threads=CORES) as ours, load(_bundle("mha"), threads=CORES) as other:
        steps = [(_step_ms(ours), _step_ms(other)) for _ in range(_ROUNDS)]
    speed = median(theirs / own for own, theirs in steps)
    rates = [1e3 / median(each) for each in zip(*steps, strict=True)]
    return [
        Row(
            f"tokens per second of mhe_mul over mha, {_VALID} valid tokens",
            f"{speed:.2f}x ({rates[0]:.1f} against {rates[1]:.1f} tokens/s)",
            f">= {_FASTER}x",
            speed >= _FASTER,
            f"{_ROUNDS} rounds in turn, medians of {_NEW} greedy tokens, decoders of base shape with random weights, "
            f"{CORES} threads",
        )
    ]


def _step_ms(model: ElasticModel) -> float:
    sleep(_PAUSE)
    prompt = np.random.default_rng(0).integers(3, 50_000, _VALID).tolist()
    return median(model.generate(prompt, max_tokens=_NEW, stop=[]).rows[0].token_ms)


def _bundle(kind: str) -> Path:
    path, folder = CACHE / f"{kind}-decoder.bundle", CACHE / f"{kind}-decoder-checkpoint"
    if not folder.exists():
        preset = PRESETS[f"{kind}-decoder-base"]
        assert isinstance(preset, MheDecoderConfig)
        config = replace(preset, max_position_embeddings=_POSITIONS, elastic_heads=False)
        torch.manual_seed(0)
        save_model(MheDecoder(config), config, folder)
    if not path.exists():
        device = replace(elsewhere(), buckets=(Bucket(1, 16),), budgets={"full": BudgetSpec()})
        compile_bundle(folder, device, path, include="budgets", generate=True)
    return path
