from __future__ import annotations

import pytest
from nestforge.exporters.source import WeightBytes, expected_encodings, weight_bytes
from nestforge.profiles.precision import Encoding, Precision

INT8_ON_CPU = (".int8", ".int8-scale", ".int8-zero")


def test_a_processor_widens_one_stored_half_after_the_other() -> None:
    small, large = (weight_bytes(shape, (".fp16",), "onnxruntime") for shape in ((8, 4), (8, 16)))
    assert (small, large) == (WeightBytes(64, widened=128), WeightBytes(256, widened=512))
    assert (small + large).held == (large + small).held == 64 + 256 + 512
    assert weight_bytes((8, 4), (".fp16",), "tensorrt") == WeightBytes(64)
    assert weight_bytes((8, 4), ("", ".fp16"), "onnxruntime") == WeightBytes(192, widened=128)


def test_integers_and_floats_are_held_as_they_are_stored() -> None:
    assert weight_bytes((8, 4), ("",), "onnxruntime") == WeightBytes(128)
    assert weight_bytes((8, 4), INT8_ON_CPU, "onnxruntime") == WeightBytes(32 + 5 * 8)
    assert weight_bytes((8, 4), (), "tensorrt") == WeightBytes(0), "what no engine reads is not stored"


@pytest.mark.parametrize(
    ("precision", "backend", "shape", "is_table", "is_wider", "expected"),
    [
        ("fp32", "onnxruntime", (64, 64), False, False, ("",)),
        ("fp16", "tensorrt", (64,), False, False, (".fp16",)),
        ("bf16", "tensorrt", (64, 64), True, False, (".bf16",)),
        ("int8", "onnxruntime", (16, 32), False, False, INT8_ON_CPU),
        ("int8", "tensorrt", (16, 32), False, False, (".int8", ".int8-scale")),
        ("int8-dynamic", "onnxruntime", (15, 32), False, False, ("",)),
        ("int8-dynamic", "onnxruntime", (16, 31), False, False, ("",)),
        ("int8-dynamic", "onnxruntime", (64,), False, False, ("",)),
        ("int8-dynamic", "onnxruntime", (16, 3, 64, 64), False, False, ("",)),
        ("int8-dynamic", "onnxruntime", (8, 16, 32), False, False, INT8_ON_CPU),
        ("int8", "onnxruntime", (64, 64), True, False, (".int8", ".int8-scale")),
        ("int8", "tensorrt", (64, 64), True, False, ("",)),
        ("int4", "onnxruntime", (64, 64), False, False, (".int4", ".int4-scale")),
        ("int4", "onnxruntime", (64, 64), False, True, INT8_ON_CPU),
        ("int4", "onnxruntime", (64, 64), True, False, (".int8", ".int8-scale")),
    ],
)
def test_what_headers_let_expect(
    precision: Precision,
    backend: str,
    shape: tuple[int, ...],
    is_table: bool,
    is_wider: bool,
    expected: tuple[Encoding, ...],
) -> None:
    assert expected_encodings(precision, backend, shape, is_table, is_wider) == expected
