from __future__ import annotations

import pytest
from nestforge.elastic import BITS, Axis, Submodel
from nestforge.profiles.precision import BITS_OF, PRECISIONS, RUN_BY, precision_of, precision_problem, widths_of

FFN = Axis("layers.0.ffn", 8)


def at(bits: int | None) -> Submodel:
    axes = [(FFN, 8)] if bits is None else [(FFN, 8), (Axis(BITS, 32, (8, 32)), bits)]
    return Submodel(tuple(axes))


def test_one_precision_is_no_choice() -> None:
    assert widths_of(["fp16"]) == ()
    assert precision_of(at(None), ["fp16"]) == "fp16"


def test_of_several_the_bits_tell() -> None:
    assert widths_of(["fp32", "int8-dynamic"]) == (8, 32)
    assert precision_of(at(8), ["fp32", "int8-dynamic"]) == "int8-dynamic"
    assert precision_of(at(32), ["int8-dynamic", "fp32"]) == "fp32"


def test_every_precision_has_a_width_and_a_backend() -> None:
    assert set(BITS_OF) == set(PRECISIONS) == {precision for run in RUN_BY.values() for precision in run}


@pytest.mark.parametrize(
    ("precisions", "backend", "problem"),
    [
        (["fp32", "fp16", "int8", "int4"], "onnxruntime", None),
        (["bf16", "int8", "fp32"], "tensorrt", None),
        ([], "tensorrt", "expected at least one"),
        (["int4"], "tensorrt", "int4 does not run on tensorrt; expected some of fp32, fp16, bf16, int8"),
        (["fp32", "fp32"], "onnxruntime", "fp32 is named twice; expected one precision of each width"),
        (["fp16", "bf16"], "tensorrt", "fp16 and bf16 both have 16 bits; expected one precision of each width"),
    ],
)
def test_what_a_backend_runs(precisions: list[str], backend: str, problem: str | None) -> None:
    assert precision_problem(precisions, backend) == problem  # type: ignore[arg-type]  # names of the table
