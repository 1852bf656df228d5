"""Tensors of checkpoints in files of a stage; the pool of what jobs of one model make alike, to which their stages
link."""

import errno
import gc
import os
import shutil
import stat
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from weakref import finalize

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nestforge.compiler.work import tensor_file
from nestforge.compiler.work.staging import staged
from nestforge.compiler.work.tensor_file import Unmade, map_file, release_pages, write_tensors
from nestforge.errors import ParityError
from nestforge.exporters.checkpoints.checkpoint import sha256_of
from nestforge.progress import heard_by

_TYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", ml_dtypes.bfloat16),
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    forms=st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(_TYPES), st.lists(st.integers(0, 3), max_size=3)),
        max_size=6,
    ),
    metadata=st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=5), st.text(max_size=5), min_size=1, max_size=1
    ),
)
def test_the_bytes_are_those_that_safetensors_writes(
    tmp_path: Path, forms: dict[str, tuple[str, list[int]]], metadata: dict[str, str]
) -> None:
    tensors = {n: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(t) for n, (t, shape) in forms.items()}
    write_tensors(tensors, tmp_path / "w", metadata)
    assert (tmp_path / "w").read_bytes() == safetensors.numpy.save(tensors, metadata)


def test_a_tensor_is_made_when_its_place_has_come_and_gone_before_the_next(tmp_path: Path) -> None:
    alive, most, rows = 0, 0, 0

    def made(number: int) -> np.ndarray:
        nonlocal alive, most, rows

        def gone() -> None:
            nonlocal alive
            alive -= 1

        array = np.full((2, 3), number, np.float32)
        finalize(array, gone)
        alive, rows = alive + 1, rows + 2
        most = max(most, alive)
        return array

    def blocks(first: int) -> Iterator[np.ndarray]:
        for number in range(first, first + 4):
            yield made(number)

    tensors = {str(n): Unmade(np.dtype(np.float32), (8, 3), partial(blocks, 4 * n)) for n in range(5)}
    told: list[tuple[int, int]] = []
    with heard_by(lambda *done: told.append(done)):
        write_tensors(tensors, tmp_path / "w", {})
        assert (most, alive, rows) == (2, 0, 40), "one, and the one before it until that is made"
        assert told == [(24 * number, 480) for number in range(1, 21)]
        sha256_of(tmp_path / "w")
    size = (tmp_path / "w").stat().st_size
    assert told[20:] == [(size, size)]
    found = safetensors.numpy.load_file(tmp_path / "w")
    assert all(np.array_equal(found[str(n)][:, 0], 4 * n + np.arange(8) // 2) for n in range(5))


@pytest.mark.parametrize("size", [1, 10**6])
def test_a_full_disk_is_an_error_of_the_system(size: int) -> None:
    with pytest.raises(OSError, match="No space left on device") as failure:
        write_tensors({"a": np.zeros(size)}, Path("/dev/full"), {})
    assert failure.value.errno == errno.ENOSPC


def test_the_file_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    """A bundle is compiled by one user and served by another."""
    before = os.umask(0o022)
    try:
        write_tensors({"a": np.zeros(3, np.float32)}, tmp_path / "w", {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "w").stat().st_mode) == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


def _resident(path: Path) -> int:
    """Bytes of the file in this process's memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if line.endswith(f" {path}")]
    sizes = (next(line for line in lines[start:] if line.startswith("Rss:")) for start in starts)
    return sum(int(line.split()[1]) * 1024 for line in sizes)


def test_pages_that_are_released_are_in_no_memory_and_are_read_again(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(2**20)
    (tmp_path / "w").write_bytes(data)
    pages = map_file(tmp_path / "w")
    assert pages[:] == data
    assert _resident(tmp_path / "w") == len(data)
    release_pages()
    assert _resident(tmp_path / "w") == 0
    assert pages[:] == data
    mapped = weakref.ref(pages)
    assert mapped() in tensor_file._mapped
    del pages
    gc.collect()
    assert mapped() is None  # the list of what is mapped holds nothing


def test_what_is_free_of_heaps_is_in_no_memory() -> None:
    blocks = [np.ones(12_500) for _ in range(1000)]  # 100 kB each, less than what glibc maps by itself
    some, held = blocks[::10], _anonymous()  # between those that are free, which glibc keeps
    del blocks
    release_pages()
    assert held - _anonymous() > 50e6
    assert all(block.all() for block in some)


def _anonymous() -> int:
    """Bytes of memory that no file holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


KEY = "one job"


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _write(path: Path) -> None:
    path.write_bytes(b"whole")


def test_jobs_with_one_pool_link_to_what_the_first_of_them_made(tmp_path: Path) -> None:
    made = []

    def make(path: Path) -> None:
        made.append(path.name)
        path.with_name("table.npy").write_bytes(b"beside")
        path.write_bytes(b"whole")

    def job(name: str, key: str) -> list[int]:
        with staged(tmp_path / name, KEY, pool=tmp_path / "pool") as stage:
            stage.once(stage.folder / "weights", make, ["fp32", key])
            stage.once(stage.folder / "own", _write)
        assert left(tmp_path / name) == ["own", "table.npy", "weights"]
        return [(tmp_path / name / file).stat().st_ino for file in ("own", "table.npy", "weights")]

    path = tmp_path / "a" / "weights"
    (own_a, *a), (own_b, *b), (_, *other) = job("a", "k"), job("b", "k"), job("c", "another")
    assert a == b != other
    assert own_a != own_b
    assert made == ["weights"] * 2
    shutil.rmtree(tmp_path / "pool")
    assert path.read_bytes() == b"whole"


def test_what_failed_in_a_pool_is_made_again(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"ha")
        raise ParityError("engine a: differs")

    for produce, expected in ((fail, False), (_write, True)):
        with suppress(ParityError), staged(tmp_path / "out", KEY, pool=tmp_path / "pool") as stage:
            stage.once(stage.folder / "weights", produce, "fp32")
        assert (tmp_path / "out" / "weights").exists() == expected
    assert len(left(tmp_path / "pool")) == 1
