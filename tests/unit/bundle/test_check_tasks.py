"""What a manifest may say of tasks, and what a list of tasks may."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nestforge.bundle.device_files.task_index import name_problem, read_tasks, require_new_name
from nestforge.bundle.entries.task_entry import TaskTensor
from nestforge.bundle.files import sealed_json
from nestforge.bundle.manifest import TASKS_NAME
from nestforge.bundle.open_bundle import open_bundle
from nestforge.bundle.read_manifest import read_manifest
from nestforge.elastic import Axis, ElasticSpec
from nestforge.errors import BundleFormatError, InputError

GOLDEN = Path(__file__).parents[2] / "golden" / "bundle-tasks"
Edit = Callable[[dict[str, Any]], object]


def test_a_tensor_shrinks_with_its_axis() -> None:
    spec = ElasticSpec((Axis("layers.0.heads", 4),), ())
    small = spec.submodel({"layers.0.heads": 3})
    assert TaskTensor("a", (32, 2), "layers.0.heads", 8).shape_in(small) == (24, 2)
    assert TaskTensor("b", (5,)).shape_in(small) == (5,)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda tasks: tasks.update(base_sha256="x"), "base_sha256 'x'; expected 64"),
        (lambda tasks: tasks.update(tensors=[]), "expected at least one tensor"),
        (lambda tasks: tasks["tensors"][0].update(shape=[]), "expected 1 to 8 positive numbers"),
        (lambda tasks: tasks["tensors"][0].update(shape=[2**20, 2**20]), "more than 2147483648 elements"),
        (lambda tasks: tasks["tensors"][0].update(name="input_ids"), "'input_ids' stands twice, or is an input"),
        (
            lambda tasks: tasks["tensors"][0].update(axis="layers.0.ffn"),
            "does not begin with 1 for each step of an axis",
        ),
        (lambda tasks: tasks["tensors"][0].update(axis="coda.reduction"), "does not begin with 1 for each step"),
        (lambda tasks: tasks.update(kind="dora"), "kind: got 'dora'"),
    ],
)
def test_a_manifest_of_other_tensors_is_refused(edit: Edit, said: str) -> None:
    data = json.loads((GOLDEN / "manifest.json").read_text())
    edit(data["tasks"])
    with pytest.raises(BundleFormatError, match=said):
        read_manifest(json.dumps(data).encode(), "manifest.json")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda task: task.update(name="../x"), "expected a name of at most 64"),
        (lambda task: task.update(name="QUARTER"), "quarter stands twice"),
        (lambda task: task.update(file="../weights.safetensors"), "expected a plain name such as task.NAME"),
        (lambda task: task.update(file="weights.safetensors"), "expected a plain name such as task.NAME"),
        (lambda task: task.update(sha256="0"), "expected 64 lower-case"),
        (lambda task: task.update(submodels=["ffn7"]), "submodels 'ffn7' are not all in the manifest"),
        (lambda task: task.update(submodels=[]), "submodels '' are not all in the manifest"),
        (lambda task: task["parity"].pop(), "expected one for every engine of its submodels"),
    ],
)
def test_a_list_of_other_tasks_is_refused(edit: Edit, said: str, tmp_path: Path) -> None:
    for path in GOLDEN.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    data = json.loads((GOLDEN / TASKS_NAME).read_text())
    edit(data["tasks"][0])
    del data["seal"]
    (tmp_path / TASKS_NAME).write_bytes(sealed_json(data))
    with pytest.raises(BundleFormatError, match=said):
        read_tasks(open_bundle(tmp_path))


@pytest.mark.parametrize("name", ["a", "_b.c-9", "x" * 64])
def test_names_of_tasks(name: str) -> None:
    assert name_problem(name) is None
    require_new_name(read_tasks(open_bundle(GOLDEN)), name)


@pytest.mark.parametrize("name", ["", ".a", "-a", "a b", "a/b", "x" * 65, "ä"])
def test_names_that_no_task_has(name: str) -> None:
    assert name_problem(name) is not None


def test_a_name_that_differs_in_case_alone_is_taken() -> None:
    with pytest.raises(InputError, match="task Both: the bundle has one of this name"):
        require_new_name(read_tasks(open_bundle(GOLDEN)), "Both")


def test_engines_that_tasks_are_merged_into_stand_beside_all_others() -> None:
    """And are judged as the engines of a bundle of their own."""
    data = json.loads((GOLDEN.with_name("bundle-merged") / "manifest.json").read_text())
    for edit, said in (
        (lambda merged: merged.pop(), "tasks: merged; expected one for every engine that takes tasks"),
        (lambda merged: merged[0].update(segment="cached"), "tasks: merged; expected one for every engine"),
        (lambda merged: merged[0].pop("parity"), r"ffn16-heads1\.merged@b1-s16: has no parity receipt"),
        (lambda merged: merged[0].update(file="x.onnx"), "file 'x.onnx' is not among the files"),
        (lambda merged: merged[0].update(id=data["engines"][0]["id"]), "engine 'ffn16-heads1@b1-s16' stands twice"),
    ):
        changed = json.loads(json.dumps(data))
        edit(changed["tasks"]["merged"])
        with pytest.raises(BundleFormatError, match=said):
            read_manifest(json.dumps(changed).encode(), "manifest.json")
