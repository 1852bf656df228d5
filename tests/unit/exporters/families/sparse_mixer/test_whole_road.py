"""Compiled Sparse Mixers against the formulas, written a second time in numpy: engines, and nothing of PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from nestforge.bundle.manifest import WEIGHTS_NAME, SubmodelEntry
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from safetensors.numpy import load_file
from support.mixer_reference import Weights, mixer_outputs
from support.tiny_compile import board
from support.tiny_mixer import mixer_config, save_tiny_mixer

PROFILE = board(budgets={"full": {}}, buckets=["b2-s16"])
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "experts choose": ({"mixing": "hartley"}, "moe.capacity_factor50-moe.experts2-sequence8"),
    "tokens choose": ({"router": "tokens_choose"}, "moe.capacity_factor25-moe.group_size16"),
}


@pytest.mark.parametrize("case", CASES)
def test_engines_compute_what_the_paper_says(tmp_path: Path, case: str) -> None:
    """Of the trained model, and of a submodel that lowers every axis."""
    settings, submodel = CASES[case]
    folder = save_tiny_mixer(tmp_path / "m", **settings)
    bundle = compile_bundle(
        folder, PROFILE, tmp_path / "b", levels={"moe.capacity_factor": (1.0,)}, submodels=[submodel]
    )
    manifest = open_bundle(bundle).manifest
    entries = {entry.id: entry for entry in manifest.submodels}
    stored, trained = load_file(bundle / WEIGHTS_NAME), load_file(folder / "model.safetensors")
    assert len(manifest.engines) == 2
    for engine in manifest.engines:
        shape = (engine.bucket.batch, engine.bucket.sequence)
        weights, stated = _of(
            entries[engine.submodel], trained, stored, {"head": "none", **vars(mixer_config(**settings))}
        )
        session = onnxruntime.InferenceSession(bundle / engine.file)
        for seed in range(3):
            random = np.random.default_rng(seed)
            ids, types = random.integers(0, 24, shape), random.integers(0, 2, shape)
            expected = mixer_outputs(stated, weights, ids, types)
            found = session.run([spec.name for spec in manifest.outputs], {"input_ids": ids, "token_type_ids": types})
            for output, reference in zip(found, expected, strict=True):
                np.testing.assert_allclose(output, reference, atol=5e-5)


def _of(
    entry: SubmodelEntry, trained: Weights, stored: Weights, settings: dict[str, Any]
) -> tuple[Weights, dict[str, Any]]:
    """Weights and settings of one submodel: experts that it lacks answer with zeros.

    Which those are is told by the rows of the router, which the store has in its own order of the experts.
    """
    value = {name: values[0] for name, values in entry.values.items()}
    weights = {name: tensor.astype(np.float64) for name, tensor in trained.items()}
    for layer in settings["moe_layers"]:
        rows = [row.tolist() for row in stored[f"layers.{layer}.moe.router.weight"]]
        first = rows[: value.get("moe.experts", settings["num_experts"])]
        for expert, row in enumerate(trained[f"layers.{layer}.moe.router.weight"]):
            if row.tolist() not in first:
                weights[f"layers.{layer}.moe.experts.down_weight"][expert] = 0
                weights[f"layers.{layer}.moe.experts.down_bias"][expert] = 0
    capacity = value["moe.capacity_factor"] / 100
    return weights, {**settings, "capacity_factor": capacity, "group_size": value["moe.group_size"]}
