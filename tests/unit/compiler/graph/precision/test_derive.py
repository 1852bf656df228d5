"""What each derivation computes is tested beside the passes; here that every precision has one, and which."""

from __future__ import annotations

import pytest
from nestforge.compiler.graph.encodings import split_encoding
from nestforge.compiler.graph.precision.derive import in_precision
from nestforge.compiler.graph.template import Template
from nestforge.profiles.precision import PRECISIONS, TRACED, Precision
from support.derived_engines import wide_template
from support.tiny_compile import BUCKET, save_tiniest

# The encodings in which an encoder of [out, in] and [in, out] products is read, by backend; "" is float32.
READ: dict[tuple[str, str], set[str]] = {
    ("fp32", "onnxruntime"): {""},
    ("fp32", "tensorrt"): {""},
    ("fp32", "openvino"): {""},
    ("fp16", "onnxruntime"): {"", ".fp16"},
    ("fp16", "tensorrt"): {"", ".fp16"},
    ("bf16", "tensorrt"): {"", ".bf16"},
    ("bf16", "openvino"): {"", ".bf16"},
    ("int8", "onnxruntime"): {"", ".int8", ".int8-scale", ".int8-zero"},
    ("int8", "tensorrt"): {"", ".int8", ".int8-scale"},
    ("int8-dynamic", "onnxruntime"): {"", ".int8", ".int8-scale", ".int8-zero"},
    ("int4", "onnxruntime"): {"", ".int8", ".int8-scale", ".int8-zero", ".int4", ".int4-scale"},
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
    assert encodings == READ[precision, backend]
    assert PRECISIONS[precision].encoding in encodings
    assert wide.proto.SerializeToString(deterministic=True) == before, "templates are shared"
    assert (found.proto == wide.proto) == (precision == TRACED)
