"""What the benchmarks of Sparse Mixers compare, on tiny models: no time is judged here."""

from __future__ import annotations

from pathlib import Path

from nestforge.benchmarks.mixers import bytes_of_one, engine_of
from nestforge.bucket import Bucket
from nestforge.bundle.manifest import WEIGHTS_NAME
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from support.tiny_compile import board
from support.tiny_mixer import save_tiny_mixer


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
