"""What jobs of one model make alike lies in a pool, to which their stages link."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from nestforge.compiler.work.staging import staged
from nestforge.errors import ParityError

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
