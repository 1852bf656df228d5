"""A stage is done once for its key and its files; what was interrupted leaves nothing."""

import json
import math
from pathlib import Path

import pytest
import torch
from nestforge.examples.training import (
    RECORDS_NAME,
    Record,
    Stage,
    Stages,
    decay_groups,
    linear_schedule,
    one_thread,
    parameters_of,
    replace_file,
    replace_folder,
    side_by_side,
    train_missing,
)


@pytest.fixture
def stages(tmp_path: Path) -> Stages:
    return Stages(tmp_path, lambda *_: None)


def test_a_stage_is_done_once_for_its_key(stages: Stages) -> None:
    done: list[float] = []

    def work() -> dict[str, float]:
        done.append(torch.rand(1).item())
        return {"drawn": done[-1]}

    for key in ({"steps": (1, 2)}, {"steps": (1, 2)}, {"steps": (1, 3)}, {"steps": (1, 3)}):
        stages.run("one", key, [], 7, work)
    assert len(done) == 2
    assert done[0] == done[1]  # the seed is set ahead of each
    record = stages.records()["one"]
    assert record.pop("seconds") >= 0
    assert record == {"drawn": done[1], "made_from": {"steps": [1, 3]}}


def test_a_stage_whose_file_is_gone_is_done_again(stages: Stages, tmp_path: Path) -> None:
    result = tmp_path / "result"

    def work() -> dict[str, str]:
        replace_file(result, b"whole")
        return {}

    stages.run("one", {}, [result], 0, work)
    result.unlink()
    stages.run("one", {}, [result], 0, work)
    assert result.read_bytes() == b"whole"


def test_what_an_interrupted_stage_left_is_removed(stages: Stages, tmp_path: Path) -> None:
    (tmp_path / "model.writing").mkdir()
    (tmp_path / "text.writing").touch()
    stages.run("one", {}, [], 0, dict)
    assert [path.name for path in tmp_path.iterdir()] == [RECORDS_NAME]


def test_records_of_other_stages_stay(stages: Stages, tmp_path: Path) -> None:
    stages.store("one", {"a": 1}, {"loss": 2.0})
    stages.store("two", {}, {"loss": 3.0})
    stages.store("one", {"a": 2}, {"loss": 1.0})
    written = json.loads((tmp_path / RECORDS_NAME).read_text())
    assert written == {"one": {"loss": 1.0, "made_from": {"a": 2}}, "two": {"loss": 3.0, "made_from": {}}}


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()

    def write(folder: Path) -> None:
        assert not (folder / "old").exists()
        folder.mkdir()
        (folder / "new").touch()

    replace_folder(tmp_path / "model", write)
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["model", "model/new"]


def test_matrices_decay_and_nothing_else() -> None:
    model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(3, 4), "up": torch.nn.Linear(4, 5)})
    matrices, others = decay_groups(model.named_parameters(), rate=0.5, decay=0.1)
    assert matrices == {
        "params": [model["embedding"].weight, model["up"].weight],
        "lr": 0.5,
        "weight_decay": 0.1,
    }
    assert others == {"params": [model["up"].bias], "lr": 0.5, "weight_decay": 0.0}
    assert parameters_of(model) == 3 * 4 + 4 * 5 + 5


def test_the_rate_rises_for_a_tenth_and_falls_to_the_end() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([parameter], lr=1.0)
    schedule = linear_schedule(optimiser, 20)
    rates = []
    for _ in range(20):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        schedule.step()
    assert rates == pytest.approx([0.5, 1.0, *(n / 18 for n in range(18, 0, -1))])


def test_one_thread_gives_the_others_back() -> None:
    threads = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_run_is_done_once_and_a_failure_is_raised(jobs: int) -> None:
    """The work is a function of a module without torch, which processes would import for seconds."""
    found: dict[int, float] = {}
    side_by_side(math.sqrt, [1, 4, 16], jobs, found.__setitem__)
    assert found == {1: 1.0, 4: 2.0, 16: 4.0}
    with pytest.raises(ValueError, match="math domain error"):
        side_by_side(math.sqrt, [4, -1], jobs, found.__setitem__)


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
