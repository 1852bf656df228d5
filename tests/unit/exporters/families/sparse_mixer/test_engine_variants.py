"""Every variant as an engine: static operations alone, and the same answers as the module that it was traced from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.manifest import WEIGHTS_NAME
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.engines.templates import Templates
from nestforge.compiler.graph.emit import emit
from nestforge.compiler.graph.store import read_store, write_store
from nestforge.compiler.work.staging import Stage
from nestforge.errors import PlanError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from support.tensorrt_takes import assert_tensorrt_takes
from support.tiny_compile import board
from support.tiny_mixer import save_tiny_mixer

BUCKET = Bucket(2, 16)
ENGINES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "scatter, per expert": ({}, {"moe.products": "per_expert", "moe.combine": "scatter", "moe.dispatch": "gather"}),
    "gather, batched, two groups": (
        {"group_size": 16},
        {"moe.products": "batched", "moe.combine": "gather", "moe.dispatch": "gather"},
    ),
    "one-hot": (
        {"group_size": 16},
        {"moe.products": "per_expert", "moe.combine": "one_hot", "moe.dispatch": "one_hot"},
    ),
    "tokens choose, folded": (
        {"router": "tokens_choose", "mixing": "hartley", "capacity_factor": 0.75},
        {"moe.products": "per_expert", "moe.combine": "gather", "moe.dispatch": "gather", "mixing": "folded"},
    ),
    "tokens choose, dense": (
        {"router": "tokens_choose", "mixing": "fourier", "batch_prioritized": False, "capacity_factor": 0.5},
        {"moe.products": "batched", "moe.combine": "scatter", "moe.dispatch": "one_hot", "mixing": "dense"},
    ),
}


@pytest.mark.parametrize("case", ENGINES)
def test_an_engine_of_every_variant(case: str, tmp_path: Path) -> None:
    settings, variants = ENGINES[case]
    universal = load_universal(open_source(save_tiny_mixer(tmp_path / "m", **settings)))
    whole = universal.spec.universal()
    template = Templates(universal, Stage(tmp_path, tmp_path), board(variants=variants)).traced(whole, BUCKET, None)
    write_store(universal, template.weights, template.tables, tmp_path / WEIGHTS_NAME)
    path = tmp_path / "engine.onnx"
    path.write_bytes(emit(template, read_store(tmp_path / WEIGHTS_NAME, universal.spec), whole))
    _check_operations(path)
    assert_tensorrt_takes(tmp_path)
    assert template.slice_problem is None
    assert template.private_bytes < 4096

    draw = np.random.default_rng(5)
    feeds = {"input_ids": draw.integers(0, 24, (2, 16)), "token_type_ids": draw.integers(0, 2, (2, 16))}
    outputs, routes = universal.module.model.routed(*(torch.from_numpy(array) for array in feeds.values()))
    found = onnxruntime.InferenceSession(path).run(None, feeds)
    for array, layer in zip(found[-2:], (1, 2), strict=True):
        np.testing.assert_array_equal(array, routes[layer].chosen.numpy())
    for array, expected in zip(found[:-2], outputs, strict=True):
        np.testing.assert_allclose(array, expected.numpy(), atol=5e-5)


def _check_operations(path: Path) -> None:
    """Nothing whose result has a shape of its own, and no sum over rows that meet."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    assert not {node.op_type for node in nodes} & {"NonZero", "Compress", "Unique", "Loop", "If", "DFT"}
    reductions = [
        attribute.s
        for node in nodes
        if node.op_type.startswith("Scatter")
        for attribute in node.attribute
        if attribute.name == "reduction"
    ]
    assert set(reductions) <= {b"none"}


def test_a_bundle_says_its_forms_and_experts_share_the_stack(tmp_path: Path) -> None:
    """Engines that multiply expert by expert read views of the same stacked weights as those that do it at once."""
    two = {"num_hidden_layers": 2, "attention_layers": (1,), "moe_layers": (0,)}
    folder = save_tiny_mixer(tmp_path / "m", **two)
    sizes = {}
    for products in ("per_expert", "batched"):
        bundle = open_bundle(
            compile_bundle(
                folder,
                board(budgets={"full": {}}, buckets=["2x16"]),
                tmp_path / products,
                variants={"moe.products": products, "moe.dispatch": "gather", "moe.combine": "scatter"},
            )
        )
        sizes[products] = bundle.file(WEIGHTS_NAME).stat().st_size
        for engine in bundle.manifest.engines:
            assert engine.variants == {"moe.products": products, "moe.dispatch": "gather", "moe.combine": "scatter"}
            assert engine.emitted == "sliced"
            assert engine.parity is not None
    assert sizes["per_expert"] == sizes["batched"]


def test_a_form_that_does_not_exist_stops_before_any_work(tmp_path: Path) -> None:
    folder = save_tiny_mixer(tmp_path / "m")
    with pytest.raises(PlanError, match=r"^variant moe.combine=sum: expected one of gather, scatter, one_hot$"):
        compile_bundle(folder, board(), tmp_path / "b", buckets=[BUCKET], variants={"moe.combine": "sum"})
    assert not (tmp_path / "b").exists()
