"""Tiny encoders with conditional adapters through the whole compiler, at several reductions over one weight store."""

import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.verify import verify_bundle
from nestforge.errors import BundleCorruptError
from nestforge.exporters.families.coda.model import load_model
from safetensors.numpy import load_file
from support.sealing import edit_manifest
from support.tiny_coda import save_tiny_coda
from support.tiny_compile import assert_tensorrt_takes, board

NARROW = "ffn24-coda.reduction4"
INDEXED = {"coda.dispatch": "gather", "coda.combine": "scatter"}
PROFILE = board(budgets={"full": {}, "half": {"flops": "60 %"}}, buckets=["2x8"], variants=INDEXED)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Reductions 4 and 1, and one with half of the neurons; the model's folder lies beside it."""
    folder = tmp_path_factory.mktemp("coda")
    save_tiny_coda(folder / "m")
    return open_bundle(compile_bundle(folder / "m", PROFILE, folder / "b", submodels=[NARROW]))


def test_every_reduction_is_an_engine_that_passed_the_gate(bundle: Bundle) -> None:
    engines = {engine.submodel: engine for engine in bundle.manifest.engines}
    assert engines.keys() == {NARROW, *(f"ffn48-coda.reduction{r}" for r in (4, 1))}
    for engine in engines.values():
        assert (engine.emitted, engine.slice_problem, engine.variants) == ("sliced", None, INDEXED)
        assert [judged.name for judged in engine.parity.routing or ()] == ["routes.0", "routes.1"]
        assert all(judged.worst_score_gap <= engine.parity.atol for judged in engine.parity.routing or ())
    assert {id_: (engine.metadata or {})["tokens selected"] for id_, engine in engines.items()} == {
        NARROW: 2,
        "ffn48-coda.reduction4": 2,
        "ffn48-coda.reduction1": 8,
    }
    assert [(proof.suite, proof.subject) for proof in bundle.manifest.proofs] == [("slice", NARROW)]


def test_budgets_choose_among_reductions(bundle: Bundle) -> None:
    chosen = {budget.name: budget.submodel for budget in bundle.manifest.budgets}
    assert chosen == {"full": "ffn48-coda.reduction1", "half": "ffn48-coda.reduction4"}
    with nestforge.load(bundle.path) as model:
        feeds = {"input_ids": np.ones((1, 8), np.int64), "attention_mask": np.ones((1, 8), np.int64)}
        assert model(feeds).submodel == "ffn48-coda.reduction1", "of equally many parameters the one that keeps most"
        assert model(feeds, budget="half").submodel == "ffn48-coda.reduction4"


def test_reductions_share_every_weight(bundle: Bundle, tmp_path: Path) -> None:
    """Another reduction is a graph more, and not a byte of weights."""
    profile, levels = replace(PROFILE, budgets={}), {"ffn": (0.5, 1.0)}  # weights are laid out for narrower ones too
    one = compile_bundle(bundle.path.with_name("m"), profile, tmp_path / "b", levels=levels, include="budgets")
    assert {engine.submodel for engine in open_bundle(one).manifest.engines} == {"ffn48-coda.reduction1"}
    ours, single = (path / WEIGHTS_NAME for path in (bundle.path, one))
    assert ours.read_bytes() == single.read_bytes()
    assert all(engine.private_bytes < 1024 for engine in bundle.manifest.engines), "scalars and tables of indices"


def test_engines_answer_and_select_as_the_model_does(bundle: Bundle) -> None:
    """Also the text that fills a bucket in part, and a request that fills it with a row of padding."""
    module = load_model(bundle.path.with_name("m")).double()
    torch.manual_seed(0)
    ids, mask = torch.randint(0, 40, (1, 8)), torch.ones(1, 8, dtype=torch.int64)
    mask[0, 5:] = 0
    with nestforge.load(bundle.path) as model:
        for reduction in (4, 1):
            feeds = {"input_ids": ids[:, :5].numpy(), "attention_mask": mask[:, :5].numpy()}
            answer = model(feeds, submodel=f"ffn48-coda.reduction{reduction}", routing=True)
            module.reduction = reduction
            expected, found = module.routed(ids, mask)
            np.testing.assert_allclose(answer.outputs["last_hidden_state"], expected[:, :5], rtol=0, atol=1e-4)
            for layer, selection in found.items():
                assert set(answer.routing[f"routes.{layer}"][0]) == set(selection.chosen[0].tolist())


def test_a_graph_selects_by_one_top_k_and_adds_without_a_reduction(bundle: Bundle) -> None:
    for engine in bundle.manifest.engines:
        graph = onnx.load(bundle.path / engine.file, load_external_data=False).graph
        kinds = [node.op_type for node in graph.node]
        assert kinds.count("TopK") == kinds.count("ScatterND") == 2
        assert not {"NonZero", "If", "Loop", "ScatterElements"} & set(kinds)
        for node in graph.node:
            if node.op_type == "ScatterND":
                assert all(attribute.s in (b"", b"none") for attribute in node.attribute)
    assert_tensorrt_takes(bundle.path)


def test_a_round_is_four_operations(bundle: Bundle) -> None:
    """A log-softmax, a difference, a product and a minimum: two layers of three rounds. What is of all rounds is made
    at once and taken apart by one Split."""
    for engine in bundle.manifest.engines:
        kinds = [node.op_type for node in onnx.load(bundle.path / engine.file, load_external_data=False).graph.node]
        assert kinds.count("LogSoftmax") == kinds.count("Min") == 2 * 3
        assert (kinds.count("Split"), kinds.count("CumSum")) == (2, 0)
        assert kinds.count("Sub") <= 2 * (3 + 2), "one a round, one of the gates, one of the biases' steps"
        assert not {"Log", "ReduceMax", "ReduceSum", "Slice"} & set(kinds)


def test_it_is_still_the_model_that_it_came_from(bundle: Bundle) -> None:
    assert verify_bundle(bundle.path, against=bundle.path.with_name("m"))


def test_another_k_than_the_manifest_s_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    """The graph selects 2 tokens; a manifest that says 3 is not its."""
    shutil.copytree(bundle.path, tmp_path / "b")

    def other_k(manifest: dict[str, Any]) -> None:
        engine = next(one for one in manifest["engines"] if one["submodel"] == "ffn48-coda.reduction4")
        for entry in engine["kind"]["routing"]:
            entry["shape"] = [2, 3]

    edit_manifest(tmp_path / "b", other_k)
    ids = np.ones((2, 8), np.int64)
    problem = (
        r"^engine ffn48-coda\.reduction4@b2-s8: outputs are .*'routes.0': .*\(2, 2\).*, the manifest says .*\(2, 3\)"
    )
    with nestforge.load(tmp_path / "b") as model, pytest.raises(BundleCorruptError, match=problem):
        model({"input_ids": ids, "attention_mask": ids}, budget="half")


SETTINGS: dict[str, dict[str, Any]] = {
    "k to k, LoRA, grouped, gated, the paper's residual": {
        "num_hidden_layers": 1,
        "keys_of": "selected",
        "adapter": "lora",
        "num_key_value_heads": 2,
        "gated_ffn": True,
        "activation": "gelu_tanh",
        "ffn_residual": "normed",
    },
    "rotary, sequential adapter, multi-query, sigmoid, one dense layer, classes": {
        "position": "rotary",
        "tokens_selected": {"8": {"4": 3}},
        "adapter": "sequential",
        "num_key_value_heads": 1,
        "router": "sigmoid",
        "conditional_layers": (1,),
        "num_labels": 3,
    },
    "first k, learned places, layer norms with biases": {
        "num_hidden_layers": 1,
        "router": "first_k",
        "position": "learned",
        "norm": "layer",
        "bias": True,
    },
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_other_kinds(tmp_path: Path, settings: dict[str, Any]) -> None:
    save_tiny_coda(tmp_path / "m", **settings)
    profile = board(budgets={"full": {}}, buckets=["2x8"])
    path = compile_bundle(tmp_path / "m", profile, tmp_path / "b", levels={"coda.reduction": (0.25, 1.0)})
    for engine in open_bundle(path).manifest.engines:
        assert (engine.emitted, engine.slice_problem) == ("sliced", None)
        assert engine.parity is not None
        if engine.submodel.endswith("reduction4"):
            assert (engine.metadata or {})["tokens selected"] == (3 if "tokens_selected" in settings else 2)
    if settings.get("router") == "first_k":
        check_first_two(path, load_file(tmp_path / "m" / "model.safetensors"))


Floats = npt.NDArray[np.float64]


def check_first_two(bundle: Path, weights: Mapping[str, Floats]) -> None:
    """The engine of reduction 4 against ``first_two``: neither padding in front nor within is a first token."""
    ids, mask = np.random.default_rng(0).integers(0, 40, (2, 8)), np.ones((2, 8), np.int64)
    mask[0, :3], mask[1, [1, 4, 7]] = 0, 0
    with nestforge.load(bundle) as model:
        (found,) = model({"input_ids": ids, "attention_mask": mask}, submodel="ffn48-coda.reduction4").outputs.values()
    wide = {name: tensor.astype(np.float64) for name, tensor in weights.items()}
    for row in range(2):
        np.testing.assert_allclose(found[row], first_two(wide, ids[row], mask[row]), rtol=0, atol=2e-5)


def first_two(weights: Mapping[str, Floats], ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64]) -> Floats:
    """Last states of one row ``[n]`` by the paper's formulas, written again: a layer of 4 heads of 8 that computes the
    first two tokens, which read all tokens of the row."""

    def normed(x: Floats, name: str) -> Floats:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x: Floats, name: str) -> Floats:
        return x @ weights[f"layers.0.{name}.weight"].T + weights[f"layers.0.{name}.bias"]

    x = weights["embeddings.word.weight"][ids] + weights["embeddings.position.weight"][: len(ids)]
    read, chosen = normed(x, "layers.0.attention_norm"), np.flatnonzero(mask)[:2]
    query, key, value = (linear(read, f"attention.{part}") for part in ("query", "key", "value"))
    heads = []
    for head in range(4):
        own = slice(8 * head, 8 * head + 8)
        scores = query[chosen][:, own] @ key[:, own].T / math.sqrt(8)
        shares = np.exp(scores - scores.max(-1, keepdims=True)) * mask
        heads.append(shares / shares.sum(-1, keepdims=True) @ value[:, own])
    attended = linear(np.concatenate(heads, -1), "attention.output")
    inner = np.maximum(linear(normed(x[chosen] + attended, "layers.0.ffn_norm"), "ffn.up"), 0)
    y = x + linear(np.maximum(linear(read, "adapter.down"), 0), "adapter.up")
    y[chosen] += attended + linear(inner, "ffn.down")
    return normed(y, "norm")
