from dataclasses import FrozenInstanceError
from itertools import pairwise
from typing import get_args

import pytest
from nestforge.elastic import Axis, Submodel
from nestforge.profiles.precision import (
    ENCODINGS,
    FP32,
    PRECISIONS,
    TRACED,
    Encoding,
    Precision,
    encoded_bytes,
    encoded_shape,
    in_precision,
    precision_of,
    precision_problem,
    rank,
)


def named(precision: str | None) -> Submodel:
    return Submodel(((Axis("layers.0.ffn", 8), 8),), precision)


@pytest.mark.parametrize(
    ("precisions", "name", "precision"),
    [
        (["fp16"], None, "fp16"),
        (["int8", "fp32"], None, "fp32"),
        (["int8", "fp32", "int8-dynamic"], "int8", "int8"),
        (["int8", "fp32", "int8-dynamic"], "int8-dynamic", "int8-dynamic"),
    ],
)
def test_a_submodel_that_names_none_has_the_highest_precision(
    precisions: list[Precision], name: str | None, precision: Precision
) -> None:
    assert precision_of(named(name), precisions) == precision
    assert in_precision(named(None), precision, precisions) == named(name)


def test_every_name_has_an_entry() -> None:
    assert tuple(PRECISIONS) == get_args(Precision)


def test_entries_and_the_registry_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        PRECISIONS["fp32"].encoding = ".fp16"
    with pytest.raises(TypeError):
        PRECISIONS["fp8"] = PRECISIONS["fp16"]


def test_what_runs_nowhere_but_on_a_gpu_is_emulated() -> None:
    for spec in PRECISIONS.values():
        assert spec.is_emulated == ("onnxruntime" not in spec.backends)


def test_the_traced_precision_is_the_highest_and_no_tolerance_shrinks_below_another() -> None:
    assert rank(TRACED) == 0
    limits = [spec.tolerance for spec in PRECISIONS.values()]
    unclipped = [spec.tolerance.atol for spec in PRECISIONS.values() if spec.calibration != "scales"]
    assert unclipped == sorted(unclipped)
    for higher, lower in pairwise(limits):
        assert higher.rtol <= lower.rtol
        assert higher.rms <= lower.rms
        assert higher.min_cosine >= lower.min_cosine


@pytest.mark.parametrize(
    ("precisions", "backend", "problem"),
    [
        (["fp32", "fp16", "int8", "int4"], "onnxruntime", None),
        (["bf16", "int8", "fp32"], "tensorrt", None),
        ([], "tensorrt", "expected at least one"),
        (["int4"], "tensorrt", "int4 does not run on tensorrt; expected some of fp32, fp16, bf16, int8"),
        (["fp16", "bf16"], "tensorrt", None),
        (["fp32", "fp32"], "onnxruntime", "fp32 is named twice"),
    ],
)
def test_what_a_backend_runs(precisions: list[str], backend: str, problem: str | None) -> None:
    assert precision_problem(precisions, backend) == problem  # names of the table


@pytest.mark.parametrize(
    ("encoding", "shape", "size"),
    [
        ("", (48, 70), 4 * 48 * 70),
        (".fp16", (48, 70), 2 * 48 * 70),
        (".bf16", (48, 70), 2 * 48 * 70),
        (".int8", (48, 70), 48 * 70),
        (".int8-scale", (48,), 4 * 48),
        (".int8-zero", (48,), 48),
        (".int4", (48, 3, 16), 48 * 3 * 16),  # 70 inputs fill three blocks of 32
        (".int4-scale", (48, 3), 4 * 48 * 3),
        (".int4-g128", (48, 1, 64), 48 * 64),
        (".int4-g128-scale", (48, 1), 4 * 48),
    ],
)
def test_extents_and_bytes_of_a_matrix(encoding: Encoding, shape: tuple[int, ...], size: int) -> None:
    assert encoded_shape((48, 70), encoding) == shape
    assert encoded_bytes((48, 70), encoding) == size


def test_a_stack_is_so_many_matrices() -> None:
    for encoding in (FP32, *ENCODINGS):
        assert encoded_bytes((5, 48, 64), encoding) == 5 * encoded_bytes((48, 64), encoding)
