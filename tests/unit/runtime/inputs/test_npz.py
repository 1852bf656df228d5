from __future__ import annotations

import contextlib
import os
import random
import zipfile
from pathlib import Path

import numpy as np
import pytest
from nestforge.errors import InputError
from nestforge.runtime.inputs.npz import read_npz

ROWS = {"a": np.arange(600).reshape(3, 200), "b": np.ones(3, np.float32)}


def refused(path: Path, max_bytes: int = 2**20) -> str:
    with pytest.raises(InputError) as error:
        read_npz(path, max_bytes)
    message = str(error.value)
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


NO_NPZ = "expected an NPZ file of plain arrays, as numpy.savez writes it"


@pytest.fixture(params=[np.savez, np.savez_compressed])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    request.param(tmp_path / "a.npz", **ROWS)
    return tmp_path / "a.npz"


def test_arrays_by_name(path: Path) -> None:
    found = read_npz(path, 10_000)
    assert found.keys() == ROWS.keys()
    assert all(np.array_equal(found[name], ROWS[name]) for name in ROWS)


def test_what_it_unpacks_to_is_bounded(path: Path) -> None:
    assert refused(path, max_bytes=4000).endswith("bytes, more than the 4000 allowed; send fewer rows")


def test_damage_of_any_kind(path: Path) -> None:
    """Decompressors, zipfile and numpy each have errors of their own."""
    raw, rng = path.read_bytes(), random.Random(0)
    for _ in range(200):
        damaged = bytearray(raw)
        for place in rng.sample(range(len(raw)), 3):
            damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with contextlib.suppress(InputError):  # some bits matter to nobody
            read_npz(path, 2**20)


def test_other_files_among_the_arrays(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("readme.txt", "hello")
    assert refused(path) == NO_NPZ


@pytest.mark.parametrize("raw", [b"", b"PK", b"[1, 2]", bytes(100)])
def test_no_npz_at_all(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(raw)
    assert refused(tmp_path / "a.npz") == NO_NPZ


def test_no_pickle_is_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.array([{}], object))
    assert refused(tmp_path / "a.npz") == NO_NPZ


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert refused(tmp_path / "a.npz") == "cannot be read (No such file or directory)"
    assert refused(tmp_path) == "expected a file, not a folder, a pipe or a device"


@pytest.mark.parametrize("kind", ["device", "pipe", "long", "folder"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    """A device has no end, and a pipe may have no writer."""
    path = {"device": Path("/dev/full"), "long": tmp_path / ("x" * 5000)}.get(kind, tmp_path / "it")
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
    with pytest.raises(InputError, match=r"a pipe or a device$|cannot be read \(File name too long\)"):
        read_npz(path, 10)
