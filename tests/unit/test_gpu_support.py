"""Assumptions and tools of the tests on a GPU, as far as they show without one."""

from __future__ import annotations

import importlib.util
import struct
import warnings
from pathlib import Path
from types import ModuleType

import pytest
from support.gpu_available import WITHOUT_TF32


@pytest.mark.filterwarnings(WITHOUT_TF32)
def test_inductor_may_say_that_tf32_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does on every GPU from compute capability 8.0 on, whatever is set, and warnings are errors in tests."""
    import torch
    from torch._inductor.compile_fx import _warn_tf32_disabled

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    torch.set_float32_matmul_precision("highest")
    _warn_tf32_disabled.cache_clear()
    _warn_tf32_disabled()
    _warn_tf32_disabled.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="TensorFloat32 tensor cores"):  # else nothing was let through above
            _warn_tf32_disabled()
    _warn_tf32_disabled.cache_clear()


@pytest.fixture(scope="module")
def module() -> ModuleType:
    path = Path(__file__).parents[1] / "gpu/other_gpus.py"
    spec = importlib.util.spec_from_file_location("other_gpus", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def entry(kind: int, arch: int, payload: bytes) -> bytes:
    head = struct.pack("<HHIQ", kind, 0, 64, len(payload))
    return (head.ljust(28, b"\1") + struct.pack("<I", arch)).ljust(64, b"\1") + payload


def library(*containers: list[bytes]) -> bytearray:
    """An ELF file with the sections .nv_fatbin and its names."""
    body = b"".join(
        b"\x50\xed\x55\xba\x01\x00" + struct.pack("<HQ", 16, sum(map(len, entries))) + b"".join(entries) + bytes(8)
        for entries in containers
    )
    names = b"\0.nv_fatbin\0.names\0"
    begin = 64
    table = begin + len(body) + len(names)
    sections = [(0, 0, 0), (1, begin, len(body)), (12, begin + len(body), len(names))]
    header = bytearray(64)
    header[:5] = b"\x7fELF\x02"
    struct.pack_into("<Q", header, 40, table)
    struct.pack_into("<HH", header, 60, len(sections), 2)
    rows = b"".join(struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, at, size, 0, 0, 1, 0) for name, at, size in sections)
    return bytearray(header + body + names + rows)


def test_code_of_one_architecture_and_what_is_no_code_stay(module: ModuleType) -> None:
    wanted, other, ptx = b"W" * 80, b"O" * 160, b"P" * 24
    data = library([entry(2, 80, other), entry(2, 90, wanted)], [entry(1, 75, ptx), entry(2, 75, other)])
    before = bytes(data)
    assert module.zero_other_gpus(data, 90) == (len(wanted) + len(ptx), 2 * len(other))
    assert len(data) == len(before)
    assert bytes(data) == before.replace(other, bytes(len(other)))


def test_another_layout_is_refused(module: ModuleType) -> None:
    with pytest.raises(ValueError, match="no machine code for sm_90"):
        module.zero_other_gpus(library([entry(2, 80, b"O" * 16)]), 90)
    with pytest.raises(ValueError, match="no 64-bit ELF file"):
        module.zero_other_gpus(bytearray(b"MZ" + bytes(100)), 90)
