"""A task's tensors in the order and the layout of a bundle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from nestforge.compiler.add_task import with_task
from nestforge.errors import CheckpointError
from nestforge.exporters.architecture import Task, hash_of
from nestforge.exporters.source import open_source
from nestforge.exporters.tasks import with_tasks
from nestforge.exporters.universal import UniversalModel, load_universal
from support.tiny_coda import TASK_SETTINGS, save_tiny_coda, save_tiny_task
from support.tiny_compile import save_tiniest


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[UniversalModel, Task]:
    folder = tmp_path_factory.mktemp("layout")
    base = save_tiny_coda(folder / "base", **TASK_SETTINGS)
    save_tiny_task(base, folder / "task", 1, epsilon=0.25)
    source, tasks = with_tasks(open_source(base), {"one": folder / "task"})
    return load_universal(source), tasks["one"]


def test_a_hash_follows_names_shapes_and_numbers() -> None:
    one, two = np.arange(4, dtype=np.float32), np.arange(4, dtype=np.float32).reshape(2, 2)
    assert len({hash_of({"a": one}), hash_of({"b": one}), hash_of({"a": two}), hash_of({"a": one + 1})}) == 4
    assert hash_of({"a": one, "b": two}) == hash_of({"b": two, "a": one})


def test_the_frozen_weights_are_what_the_task_says(opened: tuple[UniversalModel, Task]) -> None:
    universal, task = opened
    assert universal.frozen_sha256() == task.base_sha256


def test_a_task_brings_its_own_tensors_and_leaves_the_rest(opened: tuple[UniversalModel, Task]) -> None:
    """Parameters and the constants of the schedule; frozen weights are the same memory."""
    universal, task = opened
    of_task = with_task(universal, task, {}, task.base_sha256 or "")
    for name, parameter in of_task.parameters().items():
        if name in task.tensors:
            np.testing.assert_array_equal(parameter.numpy(), task.tensors[name])
            assert not torch.equal(parameter, universal.parameters()[name])
        else:
            assert parameter.data_ptr() == universal.parameters()[name].data_ptr()
    (temperatures,) = of_task.task_constants().values()
    assert temperatures.tolist()[-1] == 0.25
    (kept,) = universal.task_constants().values()
    assert kept.tolist()[-1] == 0.5


def test_another_base_is_refused(opened: tuple[UniversalModel, Task]) -> None:
    universal, task = opened
    with pytest.raises(CheckpointError, match="made for a base whose frozen weights have the hash"):
        with_task(universal, task, {}, "0" * 64)


def test_a_model_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="family bert has tasks as adapters of PEFT alone"):
        with_tasks(open_source(save_tiniest(tmp_path)), {"one": tmp_path})
