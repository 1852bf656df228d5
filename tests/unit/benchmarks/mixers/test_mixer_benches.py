"""What the benchmarks of Sparse Mixers compare, on tiny models: no time is judged here."""

from __future__ import annotations

from pathlib import Path

import torch
from nestforge.benchmarks.mixers.bench_mixer import bytes_of_one, engine_of
from nestforge.benchmarks.mixers.bench_moe import EveryExpert, Routed
from nestforge.bucket import Bucket
from nestforge.bundle.manifest import WEIGHTS_NAME
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.exporters.families.sparse_mixer.model.moe import MoE
from support.tiny_compile import board
from support.tiny_mixer import mixer_config, save_tiny_mixer, tiny_mixer

VARIANTS = {"moe.dispatch": "gather", "moe.products": "per_expert", "moe.combine": "scatter"}


def test_every_expert_on_every_token_is_the_same_block() -> None:
    moe = tiny_mixer(mixer_config()).layers[1].moe
    assert isinstance(moe, MoE)
    x = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0))
    for block in (EveryExpert(moe), Routed(moe, VARIANTS)):
        torch.testing.assert_close(block(x), moe(x)[0], atol=1e-5, rtol=1e-5)


def test_bytes_of_one_capacity(tmp_path: Path) -> None:
    """The weights but for what only other capacities read, and the engine; of one capacity alone, all but the rest."""
    two = {"num_hidden_layers": 2, "attention_layers": (1,), "moe_layers": (0,), "capacities": (50, 100)}
    folder = save_tiny_mixer(tmp_path / "m", **two)
    bundle = open_bundle(compile_bundle(folder, board(buckets=["2x16"], budgets={"full": {}}), tmp_path / "b"))
    engine = engine_of(bundle, 100, Bucket(2, 16))
    one, file = bytes_of_one(bundle, engine.submodel), bundle.file(engine.file).stat().st_size
    weights = bundle.file(WEIGHTS_NAME).stat().st_size
    parameters = next(entry.weight_bytes for entry in bundle.manifest.submodels if entry.id == engine.submodel)
    assert parameters <= one - file <= weights
