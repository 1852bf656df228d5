"""Every precision has its derivation; their numbers are tested beside the passes."""

import pytest
from nestforge.compiler.graph.encodings import split_encoding
from nestforge.compiler.graph.precision.derive import in_precision
from nestforge.compiler.graph.precision.half import with_half_weights
from nestforge.compiler.graph.template import Template
from nestforge.profiles.backends import BACKENDS
from nestforge.profiles.precision import PRECISIONS, TRACED, Precision
from support.derived_engines import parsed, wide_template
from support.tiny_compile import BUCKET, save_tiniest

# The encodings in which an encoder of [out, in] and [in, out] products is read; "" is float32. Zero points are operands
# of ONNX Runtime's own operators.
READ: dict[str, set[str]] = {
    "fp32": {""},
    "fp16-weights": {"", ".fp16"},
    "bf16-weights": {"", ".bf16"},
    "fp16": {"", ".fp16"},
    "bf16": {"", ".bf16"},
    "int8": {"", ".int8", ".int8-scale", ".int8-zero"},
    "int8-dynamic": {"", ".int8", ".int8-scale", ".int8-zero"},
    "int4": {"", ".int8", ".int8-scale", ".int8-zero", ".int4", ".int4-scale"},
    "int4-g128": {"", ".int8", ".int8-scale", ".int8-zero", ".int4-g128", ".int4-g128-scale"},
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Template:
    folder = save_tiniest(tmp_path_factory.mktemp("wide") / "bert", hidden_size=32)
    return wide_template(folder, BUCKET).template


@pytest.mark.parametrize(
    ("precision", "backend"), [(name, backend) for name, spec in PRECISIONS.items() for backend in spec.backends]
)
def test_every_precision_is_derived_for_every_backend_that_runs_it(
    wide: Template, precision: Precision, backend: str
) -> None:
    before = wide.proto.SerializeToString(deterministic=True)
    scales = dict.fromkeys(wide.external, 0.1)
    found = in_precision(wide, precision, backend, scales, frozenset())
    assert found.precision == precision
    encodings = {split_encoding(name)[1] for name in found.external}
    assert encodings == READ[precision] - (set() if BACKENDS[backend].own_operators else {".int8-zero"})
    assert PRECISIONS[precision].encoding in encodings
    assert wide.proto.SerializeToString(deterministic=True) == before, "templates are shared"
    assert (found.proto == wide.proto) == (precision == TRACED)


def test_half_weights_are_widened_once_where_they_are_read_and_tables_row_by_row() -> None:
    proto = parsed(
        """two (int64[2] i, float[2, 32] x) => (float[2, 16] y, float[2, 16] z)
        { r = Gather (t, i)  h = Gemm <transB = 1> (r, w)  k = MatMul (x, v__T)  u = Gemm <transB = 1> (x, w)
          m = Add (h, k)  s = Add (m, u)  y = Gemm <transB = 1> (s, few)  z = Gemm <transB = 1> (x, kept) }""",
        t=(40, 32),
        w=(16, 32),
        v__T=(32, 16),
        few=(16, 16),
        kept=(16, 32),
    )
    found = with_half_weights(proto, "fp16", {"kept"})
    assert [f"{node.op_type} {', '.join(node.input)} {node.output[0]}" for node in found.graph.node] == [
        "Gather t.fp16, i r.fp16",
        "Cast r.fp16 r",
        "Cast w.fp16 q0",
        "Gemm r, q0 h",
        "Cast v.T.fp16 q1",
        "MatMul x, q1 k",
        "Gemm x, q0 u",
        "Add h, k m",
        "Add m, u s",
        "Gemm s, few y",
        "Gemm x, kept z",
    ]
