from __future__ import annotations

import pytest
from nestforge.profiles.precision import ENCODINGS, FP32, Encoding, encoded_bytes, encoded_shape


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
    ],
)
def test_extents_and_bytes_of_a_matrix(encoding: Encoding, shape: tuple[int, ...], size: int) -> None:
    assert encoded_shape((48, 70), encoding) == shape
    assert encoded_bytes((48, 70), encoding) == size


def test_a_stack_is_so_many_matrices() -> None:
    for encoding in (FP32, *ENCODINGS):
        assert encoded_bytes((5, 48, 64), encoding) == 5 * encoded_bytes((48, 64), encoding)
