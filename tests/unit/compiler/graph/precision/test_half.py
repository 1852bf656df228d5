"""Half precision; and 16 bits on disk, float32 in the products: of a checkpoint in bfloat16 nothing is lost."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.graph.encodings import table_name
from nestforge.compiler.graph.precision.half import half
from nestforge.compiler.graph.precision.proof_graphs import emulated
from nestforge.compiler.tensorrt.graphs import accepted
from nestforge.runtime.load import load
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file
from support.cost_eff_models import save_tiny
from support.derived_engines import HalfEngines, half_engines, parsed, run_alone
from support.gated_decoders import make_decoder, save_decoder
from support.tiny_coda import save_tiny_coda
from support.tiny_compile import board, save_tiniest
from support.tiny_matlm import save_tiny_matlm
from support.tiny_mixer import save_tiny_mixer
from support.tiny_models import add_pooling, save_tiny_vit

PRECISIONS = ("fp16", "bf16")
NARROW = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
# A share of the rms, for each layer: tiny models with large random weights have been seen at 8e-3 and 7e-2.
PER_LAYER = {"fp16": 1e-2, "bf16": 1e-1}
FROM_ONE = {"fp16": 2e-5, "bf16": 1e-3}


def _pooled(folder: Path) -> None:
    save_tiniest(folder)
    add_pooling(folder)


def _save_gemma(folder: Path) -> None:
    """Every kind of norm, of queries and keys too, and windowed attention."""
    save_decoder(folder, "gemma3_text", num_hidden_layers=1, layer_types=["sliding_attention"])


# Checkpoint, bucket, segment, a narrow submodel.
FAMILIES: dict[str, tuple[Callable[[Path], Any], Bucket, int | None, str | None]] = {
    "bert": (_pooled, Bucket(2, 8), None, "ffn16-heads1"),
    "cost_eff": (save_tiny, Bucket(2, 8), 1, None),
    "matlm": (save_tiny_matlm, Bucket(2, 8), None, "ffn16"),
    "gated_decoder": (_save_gemma, Bucket(2, 8), None, "ffn8"),
    "vit": (lambda folder: save_tiny_vit(folder, "vit", "ForImageClassification"), Bucket(2, 1), None, "ffn8-heads1"),
    "sparse_mixer": (save_tiny_mixer, Bucket(2, 16), None, None),
    "coda": (lambda folder: save_tiny_coda(folder, num_hidden_layers=1), Bucket(2, 8), None, None),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[HalfEngines, str | None]:
    save, bucket, segment, narrow = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save(folder / "m")
    return half_engines(folder, folder / "m", bucket, segment), narrow


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_family_answers_as_in_float32(family: tuple[HalfEngines, str | None], precision: str) -> None:
    engines, narrow = family
    spec = engines.model.spec
    for submodel in (spec.universal(), *([spec.parse(narrow)] if narrow else [])):
        graph = engines.engine(precision, submodel)
        expected = engines.answers(engines.engine("fp32", submodel))
        found = engines.answers(graph if precision == "fp16" else emulated(graph))
        if any(not np.array_equal(found[name], array) for name, array in expected.items() if array.dtype == np.int64):
            assert precision == "bf16", "routes"  # other experts computed other answers, and rightly so
            continue
        for name, array in expected.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            if array.dtype == np.float32:
                allowed = PER_LAYER[precision] * spec.depth * max(1.0, float(np.sqrt(np.mean(array**2))))
                assert 0 < np.abs(found[name] - array).max() < allowed
                cosine = np.vdot(found[name], array) / np.linalg.norm(found[name]) / np.linalg.norm(array)
                assert 1 - cosine < FROM_ONE[precision]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_family_is_taken_by_tensorrt_in_one_store(family: tuple[HalfEngines, str | None], precision: str) -> None:
    engines, _ = family
    wide, template = engines.templates["fp32"], engines.templates[precision]
    universal = engines.model.spec.universal()
    accepted("here", engines.engine(precision, universal))
    weights, narrow = Counter(name.endswith(f".{precision}") for name in template.weights), NARROW[precision]
    assert weights[True] > weights[False], "most weights are narrow; norms, exits and routers are not"
    for tensor in template.proto.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL and tensor.name in template.weights:
            assert tensor.data_type == (narrow if tensor.name.endswith(f".{precision}") else TensorProto.FLOAT)
    assert _whole_numbers(template.proto) <= _whole_numbers(wide.proto), "a new constant could repeat an extent"
    assert not template.proto.graph.value_info


@pytest.mark.parametrize("precision", PRECISIONS)
def test_names_of_values_and_the_original_stay(family: tuple[HalfEngines, str | None], precision: str) -> None:
    engines, _ = family
    wide, template = engines.templates["fp32"], engines.templates[precision]
    made = {name for node in template.proto.graph.node for name in node.output}
    assert {name for node in wide.proto.graph.node for name in node.output} <= made
    for ours, theirs in zip(
        (*template.proto.graph.input, *template.proto.graph.output),
        (*wide.proto.graph.input, *wide.proto.graph.output),
        strict=True,
    ):
        assert ours == theirs
    kinds = {tensor.data_type for tensor in wide.proto.graph.initializer}
    assert kinds <= {TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.INT32}


def _whole_numbers(proto: onnx.ModelProto) -> set[bytes]:
    tensors = [t for t in proto.graph.initializer if t.data_type == TensorProto.INT64 and t.data_location == t.DEFAULT]
    return {numpy_helper.to_array(tensor).tobytes() for tensor in tensors}


def test_a_value_is_cast_once_and_an_output_under_its_own_name() -> None:
    model = parsed(
        """two (float[2, 4] x) => (float[2, 4] y, float[2, 4] z)
        { h = Gemm (x, w)  s = Softmax (h)  e = Exp (h)  m = Mul (s, h)  k = Add (s, m)  y = Gemm (k, w)
          n = Neg (y)  r = Add (n, e)  z = Softmax (y) }""".replace("z)", "z, float[2, 4] r)", 1),
        w=(4, 4),
    )
    found = half(model, {}, "fp16", ())[0]
    assert [f"{node.op_type} {', '.join(node.input)} {node.output[0]}" for node in found.graph.node] == [
        "Cast x x.fp16",
        "Gemm x.fp16, w.fp16 h",
        "Cast h h.fp32",
        "Softmax h.fp32 s",
        "Exp h.fp32 e",
        "Cast s s.fp16",
        "Mul s.fp16, h m",
        "Add s.fp16, m k",
        "Gemm k, w.fp16 y.fp16",
        "Cast y.fp16 y",
        "Neg y.fp16 n",
        "Cast n n.fp32",
        "Add n.fp32, e r",
        "Softmax y z",
    ]
    assert [(tensor.name, tensor.data_type) for tensor in found.graph.initializer] == [("w.fp16", TensorProto.FLOAT16)]


def test_a_weight_that_is_read_in_both_types_is_stored_in_both() -> None:
    model = parsed(
        "tied (int64[2] ids) => (float[2, 9] y) { e = Gather (w, ids)  h = Gelu (e)  y = Gemm <transB=1> (h, w) }",
        w=(9, 4),
    )
    found = half(model, {}, "bf16", ("y",))[0]
    assert {(tensor.name, tensor.data_type) for tensor in found.graph.initializer} == {
        ("w", TensorProto.FLOAT),
        ("w.bf16", TensorProto.BFLOAT16),
    }


@pytest.mark.parametrize("precision", PRECISIONS)
def test_tables_and_constants_are_converted_where_they_are_read_narrow(precision: Any) -> None:
    angles, places = np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 4), np.arange(8).reshape(2, 4)
    tables = {"angles": angles, "shared": angles, "places": places}
    model = parsed(
        """tables (float[2, 4] x) => (float[2, 4] y) <float[4] c = {1.1, 2.2, 3.3, 4.4}>
        { h = Gemm (x, w)  g = GatherElements <axis=1> (h, places)  m = Mul (g, angles)  s = Mul (m, shared)
          e = Exp (shared)  a = Add (s, c)  y = Sub (a, e) }""",
        w=(4, 4),
    )
    for name, table in tables.items():
        kind = helper.np_dtype_to_tensor_dtype(table.dtype)
        tensor = TensorProto(name=name, dims=table.shape, data_type=kind, data_location=TensorProto.EXTERNAL)
        model.graph.initializer.append(tensor)
    found, kept = half(model, tables, precision, ())
    dtype = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}[precision]
    converted = table_name(angles.astype(dtype))
    assert set(kept) == {"places", "shared", converted}
    assert np.array_equal(kept[converted], angles.astype(dtype))
    held = {tensor.name: tensor for tensor in found.graph.initializer}
    assert set(held) == {f"w.{precision}", "places", "shared", converted, f"c.{precision}"}
    assert held[converted].data_type == NARROW[precision]
    assert (
        numpy_helper.to_array(held[f"c.{precision}"]).tolist() == np.array([1.1, 2.2, 3.3, 4.4]).astype(dtype).tolist()
    )


@pytest.mark.parametrize(
    ("number", "precision", "kept"),
    [
        ("70000.0", "fp16", True),
        ("70000.0", "bf16", False),
        ("1e-9", "fp16", True),
        ("1e-9", "bf16", False),
        ("3.4e38", "bf16", True),
        ("0.0", "fp16", False),
        ("65504.0", "fp16", False),
    ],
)
def test_a_constant_that_would_be_lost_stays(number: str, precision: Any, kept: bool) -> None:
    text = f"c (float[2, 4] x) => (float[2, 4] y) <float c = {{{number}}}> {{ h = Gemm (x, w)  g = Min (h, c)"
    model = parsed(f"{text}  y = Gemm (g, w) }}", w=(4, 4))
    held = {tensor.name for tensor in half(model, {}, precision, ())[0].graph.initializer}
    assert held == {f"w.{precision}", "c" if kept else f"c.{precision}"}


OPERATIONS = {
    "gemm": "{0} = Gemm ({1}, w)",
    "matmul": "{0} = MatMul ({1}, w)",
    "add": "{0} = Add ({1}, {2})",
    "scale": "{0} = Mul ({1}, c)",
    "low": "{0} = Max ({1}, low)",
    "weigh": "{0} = Mul ({1}, s)",
    "gelu": "{0} = Gelu ({1})",
    "softmax": "{0} = Softmax ({1})",
    "norm": "{0} = LayerNormalization ({1}, s)",
    "exp": "{0}e = Tanh ({1})  {0} = Exp ({0}e)",
    "mean": "{0}m = ReduceMean ({1}, axis)  {0} = Sub ({2}, {0}m)",
    "move": "{0} = Transpose <perm=[0, 1]> ({1})",
    "best": "{0}v, {0}i = TopK ({1}, four)  {0} = Add ({0}v, {2})",
    "where": "{0}c = Less ({1}, {2})  {0} = Where ({0}c, {1}, {2})",
}


@settings(max_examples=60)
@given(data=st.data(), precision=st.sampled_from(PRECISIONS))
def test_any_graph_has_types_that_fit_and_casts_no_value_twice(data: st.DataObject, precision: Any) -> None:
    values, lines = ["x"], []
    for number in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(sorted(OPERATIONS)))
        first, second = (data.draw(st.sampled_from(values)) for _ in range(2))
        lines.append(OPERATIONS[kind].format(f"v{number}", first, second))
        values.append(f"v{number}")
    shown = data.draw(st.lists(st.sampled_from(values[1:]), min_size=1, max_size=3, unique=True))
    outputs = ", ".join(f"float[4, 4] {name}" for name in shown)
    constants = (
        "<float c = {0.3}, float low = {-1e38}, int64[1] axis = {-1}, int64[1] four = {4}, "
        f"float[4] s = {{0.5, 1.0, 1.5, 2.0}}, float[4, 4] w = {{{', '.join(str(k % 5 * 0.1) for k in range(16))}}}>"
    )
    model = parsed(f"any (float[4, 4] x) => ({outputs}) {constants} {{ {'  '.join(lines)} }}")
    before = model.SerializeToString(deterministic=True)
    found = half(model, {}, precision, data.draw(st.lists(st.sampled_from(shown), unique=True)))[0]
    assert model.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(found, full_check=True)
    assert {value.type.tensor_type.elem_type for value in found.graph.output} == {TensorProto.FLOAT}
    casts = [node for node in found.graph.node if node.op_type == "Cast"]
    assert len(casts) == len({node.input[0] for node in casts}), "of two types, one is the value's own"
    feeds = {"x": np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)}
    for name, array in run_alone(emulated(found.SerializeToString()), feeds).items():
        assert np.isfinite(array).all(), name


def test_a_checkpoint_in_bfloat16_is_stored_as_it_is_and_answers_as_in_float32(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 128, "head_dim": 8, "tie_word_embeddings": True}
    make_decoder("llama", num_hidden_layers=1, **sizes).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    profile = board(precision=["fp32", "bf16-weights"], budgets={"full": {}}, buckets=["1x8"])
    bundle = compile_bundle(tmp_path / "model", profile, tmp_path / "b", generate=True, levels={"ffn": (1.0,)})
    own, stored = load_file(tmp_path / "model" / "model.safetensors"), load_file(bundle / "weights.safetensors")
    narrow = {name.removesuffix(".bf16"): tensor for name, tensor in stored.items() if name.endswith(".bf16")}
    table = next(name for name in own if name.endswith("embed_tokens.weight"))
    assert torch.equal(narrow[next(name for name in narrow if table.endswith(name))], own[table])
    matrices = sum(tensor.numel() for tensor in own.values() if tensor.dim() == 2)
    assert sum(tensor.numel() for tensor in narrow.values()) == matrices, "the table, tied, once"
    with load(bundle, threads=1) as model:
        half, wide = model.bundle.manifest.submodels
        assert (wide.precision, half.precision) == ("fp32", "bf16-weights")
        assert half.weight_bytes < 0.52 * wide.weight_bytes
        ids = np.array([[3, 1, 4, 1, 5]])
        answers = [model({"input_ids": ids}, submodel=entry.id)["logits"] for entry in (wide, half)]
        assert np.array_equal(*answers)
        texts = [model.generate([3, 1, 4], submodel=entry.id, max_tokens=5).rows[0].tokens for entry in (wide, half)]
        assert texts[0] == texts[1]
    receipts = [engine.parity for engine in model.bundle.manifest.every_engine if engine.submodel == half.id]
    assert all(output.max_rms < 1e-5 for receipt in receipts if receipt for output in receipt.outputs)
    assert len(receipts) == 2
