import hashlib
import shutil
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.bundle.read_manifest import is_plain_name
from nestforge.compiler.engines import build_engine as module
from nestforge.compiler.engines.build_engine import EngineBuilder
from nestforge.compiler.graph import store
from nestforge.compiler.graph.encodings import encode
from nestforge.compiler.graph.precision.error_feedback import rounded
from nestforge.compiler.graph.template import emit, engine_names, short
from nestforge.compiler.parity.references import References
from nestforge.elastic import ElasticSpec, Submodel
from nestforge.errors import BuildError, ParityError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal
from nestforge.profiles.precision import INT4, INT4_SCALE
from nestforge.runtime.engines.runner import runner_for
from nestforge.strict import unstructure
from support.tiny_compile import BUCKET, board, builder_in, save_tiniest, template_of


def test_an_engine_answers_as_its_submodel(builder: EngineBuilder) -> None:
    submodel = builder.universal.spec.parse("ffn8_24-heads1_2")
    engine = builder.build(submodel, BUCKET)
    feeds = builder.cases[BUCKET][1].feeds
    with runner_for(builder.bundle, engine, "packed", 1) as runner:
        found = runner.run(feeds)
    expected = builder.universal.narrow(submodel)(*map(torch.from_numpy, feeds.values()))
    for output, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(output, reference.numpy(), atol=1e-5)


def test_memory_of_a_run_is_released_behind_it_before_pytorch_answers(
    builder: EngineBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = builder.build(builder.universal.spec.parse("ffn8-heads1"), BUCKET)
    order: list[str] = []
    for name in ("release_pages", "release_arena"):
        monkeypatch.setattr(f"nestforge.compiler.engines.build_engine.{name}", partial(order.append, name))
    with builder.runner(engine):
        order.append("run")
    assert order == ["release_pages", "run", "release_arena"]


def test_the_receipt_says_what_was_compared_and_how(builder: EngineBuilder) -> None:
    engine = builder.build(builder.universal.spec.parse("ffn8-heads1"), BUCKET)
    receipt = engine.parity
    assert (engine.id, engine.emitted, engine.file) == ("ffn8-heads1@b2-s8", "sliced", "ffn8-heads1.b2-s8.onnx")
    assert receipt.cases == ("random-0", "random-1", "whole", "padded", "text")
    assert [output.name for output in receipt.outputs] == ["last_hidden_state", "pooler_output", "sentence_embedding"]
    assert all(0 < output.max_abs < receipt.atol and output.min_cosine > 1 - 1e-6 for output in receipt.outputs)
    assert (receipt.atol, receipt.rtol, receipt.rms) == (8e-6, 2e-5, 8e-7)
    assert receipt.reference.endswith(" module narrowed to ffn8-heads1, in float64")
    for output in receipt.outputs:
        assert 0 < output.float32_rms < output.float32_max_abs < receipt.atol, "PyTorch's own rounding stands beside it"
        assert 0 < output.max_rms < output.max_abs
    folder = builder.stage.folder
    assert receipt.graph_sha256 == hashlib.sha256((folder / engine.file).read_bytes()).hexdigest()
    assert receipt.weights_sha256 == hashlib.sha256((folder / WEIGHTS_NAME).read_bytes()).hexdigest()
    assert receipt.difference_to_universal is not None
    assert receipt.difference_to_universal > 0.01
    written = unstructure(engine)  # of a model that decides nothing and has one form
    assert not {"routing", "metadata", "variants"} & {*written["kind"], *written["parity"]}


def test_the_universal_model_differs_from_nothing(builder: EngineBuilder) -> None:
    receipt = builder.build(builder.universal.spec.universal(), BUCKET).parity
    assert receipt.difference_to_universal is None


def test_finished_work_is_kept(builder: EngineBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    submodel = builder.universal.spec.parse("ffn8-heads1")
    first = builder.build(submodel, BUCKET)
    monkeypatch.setattr(module, "emit", lambda *_: pytest.fail("built again"))
    assert builder.build(submodel, BUCKET) == first


def test_an_engine_whose_file_was_removed_is_built_again(builder: EngineBuilder) -> None:
    """The manifest's stage removes rungs that were only measured; a resumed compile may want them again."""
    submodel = builder.universal.spec.parse("ffn8-heads1")
    first = builder.build(submodel, BUCKET)
    raw = (builder.stage.folder / first.file).read_bytes()
    (builder.stage.folder / first.file).unlink()
    assert builder.build(submodel, BUCKET) == first
    assert (builder.stage.folder / first.file).read_bytes() == raw


def test_a_build_that_was_interrupted_before_its_receipt_is_done_again(
    builder: EngineBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    submodel = builder.universal.spec.parse("ffn8-heads1")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(module, "judge_engine", interrupt)
        with pytest.raises(KeyboardInterrupt):
            builder.build(submodel, BUCKET)
    assert builder.build(submodel, BUCKET).parity is not None


@pytest.mark.parametrize(
    ("module", "tensor"),
    [
        ("encoder.layer.1.intermediate.dense", "bias"),
        ("encoder.layer.0.attention.output.dense", "weight.T"),
        ("embeddings.LayerNorm", "bias"),
    ],
)
def test_a_wrong_weight_stops_the_build_and_names_the_module(builder: EngineBuilder, module: str, tensor: str) -> None:
    path, stored = builder.stage.folder / WEIGHTS_NAME, builder.store[f"{module}.{tensor}"]
    raw = bytearray(path.read_bytes())
    struct.pack_into("<f", raw, stored.offset + 4 * 5, 3.0)
    path.write_bytes(raw)
    with pytest.raises(ParityError) as failure:
        builder.build(builder.universal.spec.parse("ffn8-heads1"), BUCKET)
    message = str(failure.value)
    assert message.startswith("engine ffn8-heads1@b2-s8: output last_hidden_state, case random-0: max abs ")
    assert "; allowed abs <= 8e-06 * rms" in message
    assert f"; first to diverge: {module} (max abs " in message
    assert "\n" not in message
    assert not list(builder.stage.work.glob("*b2-s8.json")), "no receipt for what failed"


@pytest.mark.usefixtures("blatant")
def test_4_bits_that_are_not_those_of_the_model_are_found_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are rounded plainly, and where examples chose; by the tensor, before an engine is run."""
    folder = save_tiniest(tmp_path / "model", hidden_size=32, intermediate_size=64)  # whole blocks
    universal, name = load_universal(open_source(folder)), "encoder.layer.1.intermediate.dense.weight"
    honest, whole = store.encode, universal.spec.universal()

    def wrong(array: np.ndarray, name: str, scale: np.ndarray | None = None) -> np.ndarray:
        return honest(array, name, scale) * (np.float32(1.3) if name.endswith(INT4_SCALE) and scale is None else 1)

    with monkeypatch.context() as context:
        context.setattr(store, "encode", wrong)  # the integers that are written follow from it
        builder = builder_in(tmp_path / "stage", universal, template_of(universal), board(precision=["int4"]))
    with pytest.raises(ParityError, match=r"^weight \S+\.int4-scale: the bundle has other numbers than are made of"):
        builder.build(whole, BUCKET)

    rows = np.random.default_rng(0).normal(size=(400, 12)) @ np.random.default_rng(1).normal(size=(12, 32))
    seen = [([name], (rows.T @ rows).astype(np.float32))]
    chosen = rounded(seen, universal.stored(), {name + INT4}, lambda done: None)
    assert (chosen[name + INT4] != encode(universal.parameters()[name].numpy(), name + INT4)).any()
    builder = replace(builder, templates=replace(builder.templates, rounded=chosen))
    folder, templates = builder.stage.folder, builder.templates
    for fault in (
        {name + INT4: np.full_like(chosen[name + INT4], 0x88)},  # zeros
        {name + INT4: np.roll(chosen[name + INT4], 1, axis=0)},
        {name + INT4_SCALE: chosen[name + INT4_SCALE] * np.float32(1.3)},
    ):
        store.write_store(universal, templates.weights(), templates.tables(), folder, {**chosen, **fault})
        with pytest.raises(ParityError, match=rf"^weight {next(iter(fault))}: the bundle has other numbers than are m"):
            replace(builder).build(whole, BUCKET)
    store.write_store(universal, templates.weights(), templates.tables(), folder, chosen)
    assert replace(builder).build(whole, BUCKET).parity


def test_an_engine_of_another_submodel_is_not_passed_off(
    builder: EngineBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    wider = builder.universal.spec.parse("ffn16-heads1")
    monkeypatch.setattr(module, "emit", lambda template, store, _, *rest: emit(template, store, wider, *rest))
    with pytest.raises(ParityError, match="first to diverge: "):
        builder.build(builder.universal.spec.parse("ffn8-heads1"), BUCKET)


def _with_spec(builder: EngineBuilder, spec: ElasticSpec) -> EngineBuilder:
    """The same files under other axes, as a family with a mistake in it would describe them."""
    source = builder.universal.source
    mistaken = replace(source.architecture, spec=spec, narrow=None, workload=lambda *_: [])
    universal = UniversalModel(replace(source, architecture=mistaken), builder.universal.module)
    return replace(builder, references=References(universal, builder.cases))


def test_an_axis_that_cuts_nothing_is_found_out(builder: EngineBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that forgets its slices: engine and reference agree, since both are the whole model."""
    spec = ElasticSpec(builder.universal.spec.axes, ())
    forgetful = _with_spec(builder, spec)
    monkeypatch.setattr(
        module,
        "emit",
        lambda template, store, _, *rest: emit(template, store, builder.universal.spec.universal(), *rest),
    )
    with pytest.raises(ParityError, match="returns the universal model's outputs; the slice has no effect"):
        forgetful.build(spec.parse("ffn8-heads1"), BUCKET)


def test_a_model_pruned_to_zeros_may_answer_as_before(tiniest: Path, tmp_path: Path) -> None:
    """Cutting what is zero changes nothing, rightly: the submodel is smaller all the same."""
    universal = load_universal(open_source(tiniest))
    for layer in universal.module.model.encoder.layer:
        layer.output.dense.weight.data[:, 8:] = 0
    builder = builder_in(tmp_path / "stage", universal, template_of(universal), board())
    receipt = builder.build(universal.spec.parse("ffn8"), BUCKET).parity
    assert receipt.difference_to_universal is not None
    assert receipt.difference_to_universal < 1e-5


def test_what_the_slicer_does_not_understand_is_traced_and_says_so(builder: EngineBuilder) -> None:
    templates = builder.templates
    known = {key: replace(t, slice_problem="node x (CumSum): no rule") for key, t in templates.known.items()}
    puzzled = replace(builder, templates=replace(templates, known=known))
    traced = puzzled.build(builder.universal.spec.parse("ffn8_24-heads1_2"), BUCKET)
    assert traced.emitted == "traced"
    assert traced.parity.difference_to_universal
    assert puzzled.build(builder.universal.spec.universal(), BUCKET).emitted == "sliced", "the template is its trace"
    graph = onnx.load(builder.stage.folder / traced.file, load_external_data=False).graph
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    assert shapes["encoder.layer.0.intermediate.dense.weight"] == (8, 16)
    assert shapes["encoder.layer.1.output.dense.weight.T"] == (24, 16)


def test_integers_are_refused_where_a_submodel_would_be_traced(builder: EngineBuilder) -> None:
    """Which products are wide enough for integers is judged at the universal model, whose weights the store has."""
    profile = replace(builder.profile, precisions=("int8-dynamic",))
    known = {key: replace(t, slice_problem="node x (CumSum): no rule") for key, t in builder.templates.known.items()}
    puzzled = replace(builder, profile=profile, templates=replace(builder.templates, profile=profile, known=known))
    message = (
        r"^engine ffn8-heads2@b2-s8: int8-dynamic is for models that are sliced as graphs, and this one is not \(node"
    )
    with pytest.raises(BuildError, match=message):
        puzzled.build(builder.universal.spec.parse("ffn8"), BUCKET)


def test_two_builders_write_the_same_bytes(builder: EngineBuilder, tmp_path: Path) -> None:
    other_folder = tmp_path / "other"
    shutil.copytree(builder.stage.folder, other_folder)
    second = replace(
        builder,
        stage=replace(builder.stage, folder=other_folder, work=other_folder / "work"),
        bundle=replace(builder.bundle, path=other_folder.absolute()),
    )
    submodel = builder.universal.spec.parse("ffn24-heads2")
    one, other = builder.build(submodel, BUCKET), second.build(submodel, BUCKET)
    assert one == other
    assert (builder.stage.folder / one.file).read_bytes() == (other_folder / other.file).read_bytes()


def test_parts_stand_before_the_bucket(tmp_path: Path) -> None:
    submodel: Submodel = open_source(save_tiniest(tmp_path / "model")).spec.universal()
    at = submodel.id
    assert engine_names(submodel, (), Bucket(1, 8)) == (f"{at}@b1-s8", f"{at}.b1-s8")
    assert engine_names(submodel, ("merged", "cached"), Bucket(1, 8))[0] == f"{at}.merged.cached@b1-s8"


def test_ids_too_long_for_a_file_name(tmp_path: Path) -> None:
    deep = load_universal(
        open_source(save_tiniest(tmp_path / "deep", num_hidden_layers=30, hidden_size=4, intermediate_size=400))
    )
    widths = [100 + 7 * layer for layer in range(30)]
    one = deep.spec.from_kinds({"ffn": widths, "heads": [1] * 15 + [2] * 15})
    other = deep.spec.from_kinds({"ffn": [*widths[:-1], 400], "heads": [1] * 15 + [2] * 15})
    names = {short(submodel.id) for submodel in (one, other)}
    assert len(names) == 2
    assert all(len(name) < 140 and is_plain_name(f"{name}.b1024-s1024.onnx") for name in names)
    assert short("ffn8-heads1") == "ffn8-heads1"
