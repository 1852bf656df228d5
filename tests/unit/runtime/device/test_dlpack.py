from __future__ import annotations

import gc

import numpy as np
import onnxruntime
import pytest
from nestforge.runtime.device.store import DeviceView
from numpy.typing import NDArray


@pytest.fixture
def memory() -> NDArray[np.uint8]:
    return np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("float32", "float"),
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        ("int8", "int8"),
        ("uint8", "uint8"),
        ("int32", "int32"),
        ("int64", "int64"),
        ("bool", "bool"),
    ],
)
@pytest.mark.parametrize("shape", [(2, 3), (), (1, 1, 4)])
def test_onnx_runtime_takes_a_view_without_copying(
    memory: NDArray[np.uint8], dtype: str, kind: str, shape: tuple[int, ...]
) -> None:
    address = memory.ctypes.data + 16
    view = DeviceView(address, dtype, shape, "cpu", 0)
    value = onnxruntime.OrtValue.from_dlpack(view)
    assert value.data_type() == f"tensor({kind})"
    assert tuple(value.shape()) == shape
    assert value.data_ptr() == address
    del value
    gc.collect(0)  # its deleter is called, and the view is still there
    assert onnxruntime.OrtValue.from_dlpack(view).data_ptr() == address


def test_what_is_seen_is_the_memory_itself(memory: NDArray[np.uint8]) -> None:
    value = onnxruntime.OrtValue.from_dlpack(DeviceView(memory.ctypes.data, "uint8", (4,), "cpu", 0))
    memory[2] = 77
    assert value.numpy().tolist() == [0, 1, 77, 3]


def test_a_view_says_where_it_lies() -> None:
    assert DeviceView(256, "float32", (1,), "cuda", 3).__dlpack_device__() == (2, 3)
    assert DeviceView(256, "float32", (1,), "cpu", 0).__dlpack_device__() == (1, 0)
