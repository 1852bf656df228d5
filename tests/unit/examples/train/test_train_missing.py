from __future__ import annotations

from pathlib import Path

from nestforge.examples.train.stages import Record, Stages
from nestforge.examples.train.train_missing import Stage, train_missing

Reported = list[tuple[str, int, int]]


def training(folder: Path, runs: dict[str, Stage]) -> tuple[list[str], Reported]:
    """The runs whose work was done, and what was reported."""
    done: list[str] = []
    reported: Reported = []

    def work(run: str) -> Record:
        done.append(run)
        (folder / run).touch()
        return {"of": run}

    train_missing(Stages(folder, lambda *told: reported.append(told)), work, runs, 1)
    return done, reported


def test_what_is_kept_is_not_done_again(tmp_path: Path) -> None:
    runs = {name: Stage(f"stage {name}", {"seed": 1}, [tmp_path / name]) for name in ("a", "b")}
    done, reported = training(tmp_path, runs)
    assert (done, reported) == (["a", "b"], [("training", 1, 2), ("training", 2, 2)])
    records = Stages(tmp_path, lambda *_: None).records()
    assert records["stage b"] == {"of": "b", "made_from": {"seed": 1}}
    (tmp_path / "b").unlink()
    changed = {**runs, "a": runs["a"]._replace(key={"seed": 2})}
    assert training(tmp_path, runs)[0] == ["b"], "its file is gone"
    assert training(tmp_path, changed)[0] == ["a"], "it was made from something else"
    done, reported = training(tmp_path, changed)
    assert (done, reported) == ([], [("stage a: kept", 1, 1), ("stage b: kept", 1, 1)])
