from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.compiler.graph import template as template_module
from nestforge.compiler.graph.make_template import traced_template
from nestforge.compiler.graph.store import StoredTensor, read_store, recover_order, stored_name, write_store
from nestforge.compiler.graph.template import (
    Template,
    emit,
    load_template,
    private_bytes,
    save_template,
    weight_bytes,
    without_pairs,
)
from nestforge.compiler.tensorrt.graphs import accepted
from nestforge.elastic import ElasticSpec
from nestforge.errors import BuildError, CheckpointError, ExportError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal, magnitude_scores, rank
from nestforge.runtime.inputs.arrays import random_feeds
from support.derived_engines import parsed
from support.tiny_matlm import save_tiny_matlm
from support.tiny_models import add_pooling, save_tiny_encoder

BUCKET = Bucket(2, 8)


class Workbench:
    """A tiny universal model with its template and store on disk."""

    def __init__(self, folder: Path, model: UniversalModel, bucket: Bucket = BUCKET) -> None:
        self.folder, self.model, self.bucket = folder, model, bucket
        self.template = traced_template(model, model.module, model.source.signature, bucket, opset=20)
        files = write_store(model, self.template.weights, self.template.tables, folder)
        self.store = read_store(files, model.spec)

    def run(self, submodel_id: str, template: Template | None = None) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Outputs of the emitted graph, and of the narrowed PyTorch module."""
        submodel = self.model.spec.parse(submodel_id)
        path = self.folder / "engine.onnx"
        path.write_bytes(emit(template or self.template, self.store, submodel))
        onnx.checker.check_model(str(path.resolve()), full_check=True)
        feeds = random_feeds(self.model.source.signature.inputs, self.bucket)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        with torch.no_grad():
            reference = self.model.narrow(submodel)(*(torch.from_numpy(array) for array in feeds.values()))
        return session.run(None, feeds), [tensor.numpy() for tensor in reference]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    folder = save_tiny_encoder(tmp_path_factory.mktemp("model") / "m")
    add_pooling(folder)
    model = load_universal(open_source(folder))
    rank(model, magnitude_scores(model), "magnitude")
    return Workbench(tmp_path_factory.mktemp("bundle"), model)


def _close(bench: Workbench, submodel_id: str, template: Template | None = None) -> None:
    for found, expected in zip(*bench.run(submodel_id, template), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5, rtol=1e-4)


def test_the_slicer_understands_bert(bench: Workbench) -> None:
    assert bench.template.slice_problem is None
    kinds = {node.op_type for node in bench.template.proto.graph.node}
    assert "Gemm" in kinds
    assert not bench.template.proto.graph.value_info, "full-size intermediate shapes would contradict a submodel"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ffn=st.lists(st.integers(1, 64), min_size=3, max_size=3),
    heads=st.lists(st.integers(1, 4), min_size=3, max_size=3),
)
def test_any_submodel_equals_pytorch(bench: Workbench, ffn: list[int], heads: list[int]) -> None:
    _close(bench, bench.model.spec.from_kinds({"ffn": ffn, "heads": heads}).id)


def test_every_weight_is_a_prefix_view_and_nothing_large_is_private(bench: Workbench) -> None:
    small, full = (
        onnx.ModelProto.FromString(emit(bench.template, bench.store, bench.model.spec.parse(name)))
        for name in ("ffn16-heads1", "ffn64-heads4")
    )
    for cut, whole in zip(small.graph.initializer, full.graph.initializer, strict=True):
        place, place_whole = ({e.key: e.value for e in t.external_data} for t in (cut, whole))
        if cut.data_location == onnx.TensorProto.EXTERNAL:
            assert place["offset"] == place_whole["offset"]
            assert int(place["length"]) == 4 * int(np.prod(cut.dims)) <= int(place_whole["length"])
            assert set(place) == {"location", "offset", "length"}
    assert bench.template.private_bytes < 2_000
    assert set(bench.template.weights) == {stored_name(n, bench.model.spec) for n in bench.model.parameters()}


def test_no_trace_of_this_machine_in_an_engine(bench: Workbench) -> None:
    raw = emit(bench.template, bench.store, bench.model.spec.universal())
    assert b".py" not in raw
    assert str(Path.cwd()).encode() not in raw


def test_emission_is_deterministic_and_survives_a_round_trip(bench: Workbench, tmp_path: Path) -> None:
    submodel = bench.model.spec.parse("ffn32-heads2")
    save_template(bench.template, tmp_path / "t.onnx")
    again = load_template(tmp_path / "t.onnx")
    assert emit(again, bench.store, submodel) == emit(bench.template, bench.store, submodel)
    assert (again.bucket, again.module_outputs) == (bench.template.bucket, bench.template.module_outputs)


def test_a_traced_submodel_is_views_of_the_same_store(bench: Workbench) -> None:
    """The fallback where a model cannot be sliced: its graph needs no template of the universal model."""
    submodel = bench.model.spec.parse("ffn24_64x2-heads3")
    traced = traced_template(bench.model, bench.model.narrow(submodel), bench.model.source.signature, BUCKET, opset=20)
    _close(bench, submodel.id, traced)
    assert set(traced.weights) == set(bench.template.weights)


@pytest.mark.parametrize(
    ("model_type", "task"),
    [
        ("roberta", "ForMaskedLM"),
        ("xlm-roberta", "ForTokenClassification"),
        ("electra", "ForSequenceClassification"),
        ("bert", "ForMaskedLM"),
        ("camembert", "ForMaskedLM"),
    ],
)
def test_other_layouts_slice_too(tmp_path: Path, model_type: str, task: str) -> None:
    bench = Workbench(tmp_path, load_universal(open_source(save_tiny_encoder(tmp_path / "m", model_type, task))))
    assert bench.template.slice_problem is None
    _close(bench, "ffn64_16x2-heads4_2x2")
    graph = emit(bench.template, bench.store, bench.model.spec.universal())
    # RoBERTa and its kin count tokens to place them: TensorRT sums no whole numbers.
    assert (accepted("here", graph) != graph) == model_type.endswith(("roberta", "camembert"))


def test_the_order_of_a_store_is_found_by_its_bytes(bench: Workbench, tmp_path: Path) -> None:
    original = load_universal(bench.model.source)
    orders = recover_order([bench.folder / "weights.safetensors"], original)
    for cut in bench.model.spec.slices:
        if cut.dim == 0 and cut.unit == 1 and cut.parameter.endswith("bias"):
            ranked = original.parameters()[cut.parameter][orders[cut.axis]]
            assert torch.equal(ranked, bench.model.parameters()[cut.parameter])
    original.parameters()["encoder.layer.1.output.dense.weight"].data[5, 7] += 1
    with pytest.raises(CheckpointError, match=r"layers.1.ffn are not those in"):
        recover_order([bench.folder / "weights.safetensors"], original)


def test_a_parameter_sliced_twice_cannot_be_shared_and_says_so(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = bench.model.spec
    cut = next(cut for cut in spec.slices if cut.parameter == "encoder.layer.0.intermediate.dense.weight")
    twice = ElasticSpec(spec.axes, (*spec.slices, type(cut)(cut.parameter, 1, "layers.1.ffn")))
    source = replace(bench.model.source)
    object.__setattr__(source, "spec", twice)
    model = UniversalModel(source, bench.model.module)
    template = traced_template(model, model.module, source.signature, BUCKET, opset=20)
    assert "sliced in two dimensions" in (template.slice_problem or "")
    assert template.private_bytes >= 64 * 32 * 4
    monkeypatch.setattr(template_module, "_MOST_HELD", 64 * 32 * 4)  # of a weight of 2 GB
    with pytest.raises(ExportError, match=f"^{cut.parameter} and others, 0.0 GB, would lie in every engine's file"):
        traced_template(model, model.module, source.signature, BUCKET, opset=20)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """A causal mask of 8 x 8 is too small for a table; one of 12 x 12 is large enough."""
    folder = save_tiny_matlm(tmp_path_factory.mktemp("decoder") / "m")
    return Workbench(tmp_path_factory.mktemp("bundle"), load_universal(open_source(folder)), Bucket(2, 12))


def test_no_engine_computes_a_constant(decoder: Workbench) -> None:
    given = {value.name for value in decoder.template.proto.graph.input} | set(decoder.template.weights)
    for node in decoder.template.proto.graph.node:
        assert given & set(node.input), f"{node.op_type} would run on constants alone"
        given |= set(node.output)
    _close(decoder, "ffn8")


def test_tables_lie_in_the_store_under_the_names_of_their_contents(
    decoder: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {table.shape for table in decoder.template.tables.values()}
    assert (12, 12) in shapes
    assert decoder.template.private_bytes < 1000
    submodel = decoder.model.spec.parse("ffn8")
    engine = onnx.ModelProto.FromString(emit(decoder.template, decoder.store, submodel))
    raw = (decoder.folder / "weights.safetensors").read_bytes()
    for tensor in engine.graph.initializer:
        if tensor.name in decoder.template.tables:
            place = {entry.key: entry.value for entry in tensor.external_data}
            table = decoder.template.tables[tensor.name]
            assert raw[int(place["offset"]) :][: int(place["length"])] == table.tobytes()
    tables = sum(table.nbytes for table in decoder.template.tables.values())
    plain = sum(decoder.store[name].length(submodel) for name in decoder.template.weights)
    assert weight_bytes(decoder.template, decoder.store, submodel) == plain + tables
    save_template(decoder.template, tmp_path / "t.onnx")
    again = load_template(tmp_path / "t.onnx")
    assert {name: table.tolist() for name, table in again.tables.items()} == {
        name: table.tolist() for name, table in decoder.template.tables.items()
    }
    assert emit(again, decoder.store, submodel) == emit(decoder.template, decoder.store, submodel)
    monkeypatch.setattr(template_module, "_MOST_HELD", tables)
    lacking = {name: place for name, place in decoder.store.items() if name not in again.tables}  # traced by itself
    assert emit(again, decoder.store, submodel)
    with pytest.raises(ExportError, match=r"GB, would lie in every engine's file, .*; ask for shorter `buckets`"):
        emit(again, lacking, submodel)


def test_a_table_that_the_store_does_not_have_is_the_engines_own(decoder: Workbench) -> None:
    """A submodel that was traced by itself, after the store was written."""
    without = {name: stored for name, stored in decoder.store.items() if name not in decoder.template.tables}
    tables = sum(table.nbytes for table in decoder.template.tables.values())
    assert private_bytes(decoder.template, without) == decoder.template.private_bytes + tables
    assert private_bytes(decoder.template, decoder.store) == decoder.template.private_bytes
    expected, _ = decoder.run("ffn8")
    decoder.store, kept = without, decoder.store
    try:
        found, _ = decoder.run("ffn8")
    finally:
        decoder.store = kept
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other)


PAIR = """
    a = Gemm(x, down)
    b = Gemm(a, up)
    c = Reshape(b, s)
    w = Gemm(x, weight)
    y = Reshape(w, s)
    {end}
"""


# The parser takes no dots in names.
NAMES = {"down": "l.lora_A.weight.T", "up": "l.lora_B.weight", "weight": "l.weight"}


def template(end: str, outputs: str = "float[2,4] z") -> Template:
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[2,4] x) => ({outputs}) '
        "<int64[2] s = {2, 4}, float[4,1] down = {1, 1, 1, 1}, float[1,4] up = {1, 1, 1, 1}, float[1,1] weight = {1}> "
        f"{{ {PAIR.format(end=end)} }}"
    )
    for tensor in proto.graph.initializer:
        if tensor.name != "s":
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.name = NAMES[tensor.name]
    for node in proto.graph.node:
        node.input[:] = [NAMES.get(name, name) for name in node.input]
    return Template(Bucket(1, 2), proto, {"l": "t", "l.lora_B": "b", "other": "z"}, None)


@pytest.mark.parametrize("total", ["Add(y, c)", "Add(c, y)"])
def test_the_layer_takes_the_name_of_the_sum(total: str) -> None:
    found = without_pairs(template(f"t = {total} z = Tanh(t)"))
    graph = found.proto.graph
    assert [(node.op_type, *node.input, *node.output) for node in graph.node] == [
        ("Gemm", "x", "l.weight", "w"),
        ("Reshape", "w", "s", "t"),
        ("Tanh", "t", "z"),
    ]
    assert [tensor.name for tensor in graph.initializer] == ["s", "l.weight"]
    assert found.module_outputs == {"l": "t", "other": "z"}, "a module that is gone returns nothing"


def test_a_sum_may_be_an_output() -> None:
    graph = without_pairs(template("z = Add(y, c)")).proto.graph
    assert [node.output[0] for node in graph.node] == ["w", "z"]


def test_a_template_without_pairs_is_itself() -> None:
    plain = without_pairs(template("z = Add(y, c)"))
    assert without_pairs(plain) is plain


def test_a_pair_that_is_no_summand_is_refused() -> None:
    with pytest.raises(BuildError, match=r"l\.lora_B\.weight is no summand of its layer; nothing can be merged"):
        without_pairs(template("z = Mul(y, c)"))
    with pytest.raises(BuildError, match="is no summand"):
        without_pairs(template("t = Add(y, c) u = Tanh(c) z = Add(t, u)"))
    with pytest.raises(BuildError, match=r"l\.lora_A\.weight\.T, is read beside its layer"):
        without_pairs(template("z = Add(y, c) u = Tanh(a)", "float[2,4] z, float[2,1] u"))


def test_named_weights_become_inputs_in_the_shapes_of_their_views() -> None:
    body = parsed("g (float[2] x) => (float[2] y) { a = Add(x, w) y = Mul(a, v) }", w=(2,), v=(2,))
    store = {name: StoredTensor(0, (2,), 4, None, "w") for name in "wv"}
    universal, whole = ElasticSpec((), ()).universal(), Template(Bucket(1, 16), body, {}, None)
    found = onnx.ModelProto.FromString(emit(whole, store, universal, ["w"]))
    assert [tensor.name for tensor in found.graph.initializer] == ["v"]
    assert [value.name for value in found.graph.input] == ["x", "w"]
    assert [dim.dim_value for dim in found.graph.input[1].type.tensor_type.shape.dim] == [2]
