"""Tiny Sparse Mixers through the whole compiler: every mixing, both routers, every axis."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.engines.templates import Templates
from nestforge.compiler.graph.store import read_store, recover_order, write_store
from nestforge.compiler.graph.template import emit
from nestforge.compiler.planning.candidate import chosen_variants
from nestforge.compiler.verify import verify_bundle
from nestforge.compiler.work.staging import Stage
from nestforge.errors import ExportError, PlanError
from nestforge.exporters.families.sparse_mixer import family
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal, permute_axis
from nestforge.profiles.load_profile import load_profile
from safetensors import safe_open
from support.mixer_reference import mixer_outputs
from support.tiny_compile import assert_tensorrt_takes, board
from support.tiny_mixer import mixer_config, save_tiny_mixer

BUCKET = Bucket(2, 16)
# One layer that mixes, with experts where there are any, and one that attends.
TWO: dict[str, Any] = {"num_hidden_layers": 2, "attention_layers": (1,), "moe_layers": (0,)}
DENSE: dict[str, Any] = {**TWO, "moe_layers": (), "num_experts": 0, "expert_intermediate_size": None}


def compiled(folder: Path, submodels: tuple[str, ...] = (), **overrides: Any) -> Path:
    save_tiny_mixer(folder / "m", **overrides)
    profile = board(budgets={"full": {}})
    return compile_bundle(folder / "m", profile, folder / "m.bundle", buckets=[BUCKET], submodels=submodels)


def universal_of(bundle: Path) -> UniversalModel:
    """The model as the bundle has it, its experts in the bundle's order."""
    universal = load_universal(open_source(bundle.with_suffix("")))
    for axis, order in recover_order([bundle / WEIGHTS_NAME], universal).items():
        permute_axis(universal, axis, order)
    return universal


def feeds(sequence: int, batch: int = 2) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(7)
    ids = draw.integers(1, 24, (batch, sequence))
    ids[:, -2:] = 0  # padding
    return {"input_ids": ids, "token_type_ids": draw.integers(0, 2, (batch, sequence))}


def check_answers(bundle: Path, sequences: dict[str, int]) -> None:
    """Every engine is a slice of the one store, and answers as PyTorch does on rows that fill its bucket."""
    assert_tensorrt_takes(bundle)
    universal = universal_of(bundle)
    names = [spec.name for spec in universal.source.signature.outputs]
    with nestforge.load(bundle) as model:
        engines = model.bundle.manifest.engines
        assert {engine.submodel: engine.bucket.sequence for engine in engines} == sequences
        for engine in engines:
            assert (engine.emitted, engine.slice_problem) == ("sliced", None)
            assert engine.private_bytes < 2000, "no matrix of mixing outside the store"
            rows = feeds(engine.bucket.sequence)
            answer = model(rows, submodel=engine.submodel)
            assert answer.submodel == engine.submodel
            narrowed = universal.narrow(universal.spec.parse(engine.submodel))
            expected = narrowed(*(torch.from_numpy(rows[name]) for name in ("input_ids", "token_type_ids")))
            for name, value in zip(names, expected, strict=True):
                np.testing.assert_allclose(answer.outputs[name], value.numpy(), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("mixing", ["linear", "circulant"])
def test_mixing_that_is_bound_to_one_sequence(tmp_path: Path, mixing: str) -> None:
    bundle = compiled(tmp_path, mixing=mixing, **DENSE)
    check_answers(bundle, {"universal": 16})
    with pytest.raises(ExportError, match=rf"^bucket b1-s8: {mixing} mixing is bound to 16 tokens"):
        compile_bundle(bundle.with_suffix(""), board(), tmp_path / "out", buckets=[Bucket(1, 8)])
    with pytest.raises(PlanError, match=r"^unknown axis kind 'sequence': this model has none, or labels: 100%$"):
        compile_bundle(bundle.with_suffix(""), board(), tmp_path / "out", buckets=[BUCKET], submodels=["sequence8"])


@pytest.mark.parametrize("mixing", ["fourier", "hartley"])
def test_mixing_that_serves_shorter_sequences(tmp_path: Path, mixing: str) -> None:
    check_answers(compiled(tmp_path, ("sequence8",), mixing=mixing, **DENSE), {"sequence8": 8, "sequence16": 16})


@pytest.mark.parametrize("mixing", ["toeplitz", "hartley_plus", "hartley_separable", "hartley_separable_plus"])
def test_other_mixing(tmp_path: Path, mixing: str) -> None:
    check_answers(compiled(tmp_path, mixing=mixing, **DENSE), {"sequence16": 16})


def test_routed_integers_are_verified_in_the_order_of_the_models_files_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores that do not follow their experts into the bundle's order: PyTorch and the engine agree there."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "expert_intermediate_size": 32, "mixing": "fourier"}
    model = save_tiny_mixer(tmp_path / "m", num_hidden_layers=1, attention_layers=(), moe_layers=(0,), **sizes)
    honest, found = family.elastic_spec, []
    for spec in (honest, lambda config: replace(honest(config), order_followers=())):
        monkeypatch.setattr(family, "elastic_spec", spec)
        bundle = tmp_path / f"b{len(found)}"
        profile = board(precision="int8-dynamic", budgets={"full": {}})
        compile_bundle(model, profile, bundle, buckets=[BUCKET], include="budgets", measure=False)
        found.append(verify_bundle(bundle, model))
    right, wrong = found
    assert right
    assert [str(verdict.problem)[:24] for verdict in wrong.engines] == ["output last_hidden_state"]


@pytest.fixture(scope="module")
def experts_choose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wanted = ("moe.capacity_factor50-moe.group_size16-moe.experts3", "moe.experts1")
    return compiled(tmp_path_factory.mktemp("choose"), wanted, capacities=(50, 100), **TWO)


def engines_of(bundle: Path) -> dict[str, EngineEntry]:
    """Engines by the values of their submodel that are not those trained."""
    manifest = nestforge.open_bundle(bundle).manifest
    spec = open_source(bundle.with_suffix("")).spec
    table = {}
    for engine in manifest.engines:
        values = [
            (axis.name.removeprefix("moe."), value, axis.size) for axis, value in spec.parse(engine.submodel).values
        ]
        table[" ".join(f"{name}={value}" for name, value, size in values if value != size)] = engine
    return table


def test_capacity_groups_and_experts_from_one_store(experts_choose: Path) -> None:
    check_answers(experts_choose, {engine.submodel: 16 for engine in engines_of(experts_choose).values()})


def test_an_engine_states_its_routing_and_returns_it(experts_choose: Path) -> None:
    found = {
        name: (
            *((engine.metadata or {})[key] for key in ("groups", "tokens per group", "experts", "capacity")),
            *(entry.shape for entry in engine.routing or ()),
        )
        for name, engine in engines_of(experts_choose).items()
    }
    assert found == {
        "": (1, 32, 4, 8, (1, 4, 8)),
        "capacity_factor=50": (1, 32, 4, 4, (1, 4, 4)),
        "capacity_factor=50 group_size=16 experts=3": (2, 16, 3, 2, (2, 3, 2)),
        "experts=1": (1, 32, 1, 8, (1, 1, 8)),
    }


def test_a_lower_capacity_takes_the_first_tokens_of_a_higher_one(experts_choose: Path) -> None:
    ids = {name: engine.submodel for name, engine in engines_of(experts_choose).items()}
    with nestforge.load(experts_choose) as model:
        whole, half = (
            (model(feeds(16), submodel=ids[name], routing=True).routing or {})["routes.0"]
            for name in ("", "capacity_factor=50")
        )
    np.testing.assert_array_equal(half, whole[..., :4])


def test_a_lower_capacity_costs_a_graph_and_no_weights(experts_choose: Path) -> None:
    with safe_open(experts_choose / WEIGHTS_NAME, framework="numpy") as store:
        held = {name: store.get_slice(name).get_shape() for name in store.keys()}  # noqa: SIM118  (not a dict)
    shapes = open_source(experts_choose.with_suffix("")).shapes
    assert sum(int(np.prod(shape)) for shape in held.values()) <= sum(int(np.prod(s)) for s in shapes.values()) * 1.01
    assert max(engine.private_bytes for engine in engines_of(experts_choose).values()) < 2000
    assert verify_bundle(experts_choose, against=experts_choose.with_suffix(""))


GROUPED = "moe.capacity_factor50-moe.group_size16"


@pytest.mark.parametrize("prioritized", [True, False], ids=["batch prioritized", "in order"])
def test_tokens_that_choose(tmp_path: Path, prioritized: bool) -> None:
    levels = {"granularities": {"moe.capacity_factor": (1.0,)}}
    more = {"router": "tokens_choose", "batch_prioritized": prioritized, **levels}
    bundle = compiled(tmp_path, (GROUPED,), **TWO, **more)
    assert verify_bundle(bundle, against=bundle.with_suffix(""))
    check_answers(bundle, {GROUPED: 16, "moe.capacity_factor100-moe.group_size4096": 16})
    assert [entry.shape for entry in engines_of(bundle)["capacity_factor=50 group_size=16"].routing or ()] == [(2, 16)]
    with nestforge.load(bundle) as model:
        found = (model(feeds(16), submodel=GROUPED, routing=True).routing or {})["routes.0"]
    for group in found:
        assert np.bincount(group[group >= 0]).max() <= 2, "half of 16 tokens over 4 experts"
        assert (group < 0).any()


def test_all_axes_at_once(tmp_path: Path) -> None:
    wanted = "moe.capacity_factor50-moe.group_size16-moe.experts2-sequence8"
    levels = {"granularities": {"moe.capacity_factor": (1.0,)}}
    bundle = compiled(tmp_path, (wanted,), mixing="toeplitz", **levels, **TWO)
    universal = "moe.capacity_factor100-moe.group_size4096-moe.experts4-sequence16"
    check_answers(bundle, {wanted: 8, universal: 16})


def test_both_heads_of_the_papers_training(tmp_path: Path) -> None:
    bundle = compiled(tmp_path, head="pretraining", num_labels=2, capacities=(100,), embedding_size=8, **TWO)
    check_answers(bundle, {"moe.group_size4096-moe.experts4": 16})


def test_a_bert_of_the_same_family(tmp_path: Path) -> None:
    folder = save_tiny_mixer(tmp_path / "m", **{**DENSE, "attention_layers": (0, 1)})
    buckets = [Bucket(2, 8), BUCKET]
    bundle = compile_bundle(folder, board(budgets={"full": {}}), tmp_path / "m.bundle", buckets=buckets)
    universal = load_universal(open_source(folder))
    with nestforge.load(bundle) as model:
        rows = feeds(8)
        answer = model(rows)
        assert answer.submodel == "universal"
        assert answer.bucket == Bucket(2, 8)
        expected = universal.module(*(torch.from_numpy(rows[name]) for name in ("input_ids", "token_type_ids")))
        np.testing.assert_allclose(answer.outputs["pooler_output"], expected[1].numpy(), atol=1e-5)


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
    """It answers as PyTorch does, and as the paper's formulas."""
    settings, variants = ENGINES[case]
    settings = {**settings, "num_hidden_layers": 3, "attention_layers": (2,)}
    universal = load_universal(open_source(save_tiny_mixer(tmp_path / "m", **settings)))
    whole = universal.spec.universal()
    template = Templates(universal, Stage(tmp_path, tmp_path), board(variants=variants)).traced(whole, BUCKET, None)
    files = write_store(universal, template.weights, template.tables, tmp_path)
    path = tmp_path / "engine.onnx"
    path.write_bytes(emit(template, read_store(files, universal.spec), whole))
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
    weights = {name: value.double().numpy() for name, value in universal.module.model.named_parameters()}
    paper = mixer_outputs({"head": "none", **vars(mixer_config(**settings))}, weights, *feeds.values())
    for array, expected, written in zip(found[:-2], outputs, paper, strict=True):
        np.testing.assert_allclose(array, expected.numpy(), atol=5e-5)
        np.testing.assert_allclose(array, written, atol=5e-5)


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
    folder = save_tiny_mixer(tmp_path / "m", capacities=(100,), **TWO)
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


CORE = {
    "gemm_gflops": 87,
    "batched_gemm_gflops": 75,
    "elementwise_gb_s": 20,
    "bandwidth_gb_s": 15,
    "op_overhead_us": 0.3,
}


@pytest.mark.parametrize(("batch", "percent"), [(1, 100), (1, 50), (8, 100), (8, 50), (8, 25)])
def test_experts_on_a_processor(batch: int, percent: int) -> None:
    source = open_source("preset:sparse-mixer-base")
    submodel = source.spec.submodel({"moe.capacity_factor": percent})
    assert chosen_variants(source, submodel, Bucket(batch, 512), board(rates=CORE)) == {
        "moe.dispatch": "gather",
        "moe.products": "per_expert",
        "moe.combine": "scatter",
    }


@pytest.mark.parametrize("batch", [1, 8])
def test_spectra_on_a_processor(batch: int) -> None:
    source = open_source("preset:hartley-mixer-4")
    assert chosen_variants(source, source.spec.universal(), Bucket(batch, 512), board(rates=CORE)) == {
        "mixing": "folded"
    }


def test_a_device_where_operations_cost_much_has_few_of_them() -> None:
    source = open_source("preset:sparse-mixer-base")
    variants = chosen_variants(source, source.spec.universal(), Bucket(1, 512), load_profile("h200"))
    assert (variants["moe.products"], variants["moe.combine"]) == ("batched", "one_hot")
