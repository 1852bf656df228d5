"""A bundle of every rung of a 16-layer ladder: its bytes over those of its weights, and the seconds that it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

from ...bundle.manifest import WEIGHTS_NAME
from ...bundle.open_bundle import open_bundle
from ...compiler.compile import compile_bundle
from ...exporters.checkpoints.own_folder import save_model
from ...exporters.families.matformer.architecture.config import MatformerConfig
from ...exporters.families.matformer.model.language_model import MatformerLM
from ...profiles.budget import BudgetSpec
from ...profiles.load_profile import load_profile
from ..harness import Row
from ..subjects import BUCKET

_RUNGS = 49
_MAX_SECONDS = 180
# The paper's smallest shape (78M) with bytes for a vocabulary. A rung's graph of 16 layers takes about 39 kB whatever
# its widths, so the share that 49 of them add falls with the width: at 128 it would be 16 %.
_CONFIG = MatformerConfig(
    vocab_size=256,
    hidden_size=256,
    num_hidden_layers=16,
    num_attention_heads=16,
    intermediate_size=1024,
    max_position_embeddings=256,
    activation="gelu",
    tie_word_embeddings=True,
    nested=True,
)


def run() -> list[Row]:
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        model = save_model(MatformerLM(_CONFIG), _CONFIG, Path(folder) / "matlm")
        budgets = {"half": BudgetSpec(ffn_parameters="50 %")}
        profile = replace(load_profile("host-cpu"), buckets=(BUCKET,), budgets=budgets)
        began = perf_counter()
        bundle = open_bundle(compile_bundle(model, profile, Path(folder) / "matlm.bundle", include="ladder"))
        seconds = perf_counter() - began
        weights = bundle.file(WEIGHTS_NAME).stat().st_size
        total = sum(path.stat().st_size for path in bundle.path.iterdir())
        rungs = len(bundle.manifest.submodels)
        stages = sorted(bundle.build.seconds.items(), key=lambda stage: -stage[1])[:4]
    shown = ", ".join(f"{name} {taken:.0f} s" for name, taken in stages)
    return [
        Row(
            f"bundle of {rungs} rungs, MatLM 16 x {_CONFIG.hidden_size}",
            f"{total / weights:.4f}x ({total / 1e6:.2f} MB over {weights / 1e6:.2f} MB)",
            f"{_RUNGS} rungs, <= 1.05x",
            rungs == _RUNGS and total / weights <= 1.05,
            "all files of the bundle against weights.safetensors",
        ),
        Row(
            f"compile and verify {rungs} rungs, MatLM 16 x {_CONFIG.hidden_size}",
            f"{seconds:.0f} s ({shown})",
            f"< {_MAX_SECONDS} s",
            seconds < _MAX_SECONDS,
            f"compile_bundle for this host, {BUCKET.label}, every engine measured; the longest stages",
        ),
    ]
