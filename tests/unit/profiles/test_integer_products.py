from __future__ import annotations

import numpy as np
from nestforge.profiles.measure_rates import matmul_nbits_constants, qgemm_constants

WEIGHT = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)


def test_eight_bits_have_a_scale_for_each_output() -> None:
    found = qgemm_constants("w", WEIGHT, largest=2.54)
    assert (found["w.step"], found["w.middle"], found["w.last"].tolist()) == (np.float32(0.02), 128, [-1])
    integers, scale, zero = found["w.integers"], found["w.scale"], found["w.zero"]
    assert (integers.dtype, scale.shape, zero.dtype, zero.any()) == (np.int8, (16,), np.int8, np.False_)
    assert np.abs(integers).max(axis=1).tolist() == [127] * 16
    assert (np.abs(integers * scale[:, None] - WEIGHT) <= 0.501 * scale[:, None]).all()


def test_four_bits_have_a_scale_for_each_block_and_share_bytes() -> None:
    found = matmul_nbits_constants("w", WEIGHT)
    packed, scale = found["w.integers"], found["w.scale"]
    assert (packed.dtype, packed.shape, scale.shape) == (np.uint8, (16, 2, 16), (16, 2))
    integers = np.stack([packed & 15, packed >> 4], axis=-1).reshape(16, 2, 32).astype(int) - 8
    assert np.abs(integers).max() == 7
    assert (np.abs(integers * scale[..., None] - WEIGHT.reshape(16, 2, 32)) <= 0.501 * scale[..., None]).all()
