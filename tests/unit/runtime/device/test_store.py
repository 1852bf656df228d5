"""Arrays in a device's memory, values that several share, and the store of weights there."""

import gc
import json
import struct
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from nestforge.errors import BundleCorruptError
from nestforge.runtime.device.device import DeviceArray, SharedValues
from nestforge.runtime.device.store import DeviceView, StoreUse
from nestforge.runtime.graphs.initializers import Initializer
from numpy.typing import NDArray
from safetensors.numpy import save_file
from support.fake_gpu import HostDevice

MATRIX = np.arange(21, dtype=np.float32).reshape(7, 3)  # rows of 12 bytes
BIAS = np.arange(5, dtype=np.int64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file({"matrix": MATRIX, "bias": BIAS}, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def places(path: Path) -> dict[str, int]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}


def rows(path: Path, begin: int, end: int, name: str = "w") -> Initializer:
    begins, size = places(path)["matrix"] + 12 * begin, 12 * (end - begin)
    return Initializer(name, "float32", (end - begin, 3), begins, size, path.name)


def values(view: DeviceView) -> list[object]:
    return onnxruntime.OrtValue.from_dlpack(view).numpy().tolist()


def test_every_prefix_is_a_view_of_one_copy(path: Path) -> None:
    device = HostDevice()
    use = StoreUse(path, device)
    assert use.store.bytes == 0  # nothing goes over before an engine reads it
    views = [use.store.views([rows(path, 0, end)], "e")["w"] for end in (2, 7, 4)]
    assert len({view.address for view in views}) == 1
    assert [values(view) for view in views] == [MATRIX[:end].tolist() for end in (2, 7, 4)]
    assert use.store.bytes == device.allocated_bytes == MATRIX.nbytes
    use.store.views([Initializer("b", "int64", (5,), places(path)["bias"], 40, path.name)], "e")
    assert use.store.bytes == MATRIX.nbytes + BIAS.nbytes
    use.close()
    assert device.allocated_bytes == 0


def test_a_view_within_a_tensor_is_one_where_kernels_can_read_it(path: Path) -> None:
    """Row 4 begins at byte 48, a multiple of 16; row 1 at byte 12, and gets a copy of its own, once."""
    use = StoreUse(path, HostDevice())
    whole, fourth = (use.store.views([rows(path, *span)], "e")["w"] for span in ((0, 7), (4, 5)))
    assert fourth.address == whole.address + 48
    first, again = (use.store.views([rows(path, 1, 2)], "e")["w"] for _ in range(2))
    assert first.address == again.address
    assert first.address % 16 == 0
    assert values(first) == MATRIX[1:2].tolist()
    assert values(fourth) == MATRIX[4:5].tolist()
    use.close()


def test_users_of_one_file_share_and_the_last_frees(path: Path) -> None:
    device, other = HostDevice(), HostDevice()
    first, second, elsewhere = StoreUse(path, device), StoreUse(path, device), StoreUse(path, other)
    assert first.store is second.store
    assert first.store is not elsewhere.store
    second.store.views([rows(path, 0, 1)], "e")
    first.close()
    assert device.allocated_bytes == MATRIX.nbytes
    second.close()
    assert device.allocated_bytes == 0
    elsewhere.close()


def test_a_replaced_file_is_another_store(path: Path) -> None:
    device = HostDevice()
    before = StoreUse(path, device)
    path.unlink()
    save_file({"matrix": MATRIX + 1, "bias": BIAS}, path)
    after = StoreUse(path, device)
    assert values(after.store.views([rows(path, 0, 1)], "e")["w"]) == (MATRIX[:1] + 1).tolist()
    before.close()
    after.close()


def test_a_file_that_is_cut_short_is_an_error_and_not_a_bus_error(path: Path) -> None:
    device = HostDevice()
    use, read = StoreUse(path, device), rows(path, 0, 7)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BundleCorruptError, match=r"weights\.safetensors: cannot be read as a weight store"):
        use.store.views([read], "e")
    use.close()
    assert device.allocated_bytes == 0


def test_what_lies_in_no_tensor_is_refused(path: Path) -> None:
    use = StoreUse(path, HostDevice())
    for wrong in (rows(path, 6, 9), Initializer("w", "float32", (2,), 0, 8, path.name)):
        with pytest.raises(BundleCorruptError, match=r"^e: initializer 'w': bytes \d+ to \d+ are no tensor of weights"):
            use.store.views([wrong], "e")
    use.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff" * 16,
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 20) + b'{"a":{"data_offsets":',
        struct.pack("<Q", 29) + b'{"a":{"data_offsets":[0,99]}}',
        struct.pack("<Q", 29) + b'{"a":{"data_offsets":["0",1]}',
    ],
)
def test_a_header_that_cannot_be_read_is_one_line(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    with pytest.raises(BundleCorruptError, match=r"weights.safetensors: cannot be read as a weight store; fetch"):
        StoreUse(path, HostDevice())
    path.unlink()
    with pytest.raises(BundleCorruptError, match="cannot be read as a weight store"):
        StoreUse(path, HostDevice())


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


def test_rows_of_an_array_are_an_array_in_place() -> None:
    array = DeviceArray(1024, "float16", (6, 2, 3))
    assert (array.row_bytes, array.bytes) == (12, 72)
    assert array.rows(2, 5) == DeviceArray(1024 + 24, "float16", (3, 2, 3))


class Thing:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_all_users_get_one_and_the_last_closes_it() -> None:
    shared: SharedValues[str, Thing] = SharedValues()
    first = shared.take("a", Thing)
    assert shared.take("a", Thing) is first
    other = shared.take("b", Thing)
    shared.give("a")
    assert (first.closed, other.closed) == (0, 0)
    shared.give("a")
    assert (first.closed, other.closed) == (1, 0)
    assert shared.take("a", Thing) is not first


def test_what_cannot_be_made_is_not_kept() -> None:
    shared: SharedValues[str, Thing] = SharedValues()

    def fail() -> Thing:
        raise ValueError("none")

    with pytest.raises(ValueError, match="none"):
        shared.take("a", fail)
    assert isinstance(shared.take("a", Thing), Thing)
