"""A compile as a file: what was stated comes back, whatever cannot be is one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from nestforge.bucket import Bucket
from nestforge.errors import InputError, OutputError
from nestforge.profiles.budget import BudgetSpec
from nestforge.profiles.compile_request import JOB_OPTIONS, CompileRequest
from nestforge.profiles.job_file import load_job, save_job

REQUEST = CompileRequest(
    Path("models/m"),
    output="out",
    overwrite=True,
    text="texts.txt",
    levels={"ffn": (0.25, 0.5, 1.0)},
    budgets={"flops<=50%": BudgetSpec(flops="50 %"), "small": BudgetSpec(parameters=1000, optional=True)},
    submodels=("S", "M+2"),
    buckets=(Bucket(1, 128), Bucket(8, 512, 1, 1)),
    budget_at=Bucket(1, 32),
    dimensions=(64, 32),
    variants={"moe.combine": "one_hot"},
    precisions=("fp32", "int8"),
    tasks={"reviews": Path("tasks/r")},
    lora_rank=8,
    generate=True,
    measure=False,
)


def test_a_job_comes_back_as_it_was(tmp_path: Path) -> None:
    for request in (REQUEST, CompileRequest("m")):
        save_job(request, path := tmp_path / f"{request.output}.yaml".replace(".bundle", ""))
        again = CompileRequest(**load_job(path))
        save_job(again, tmp_path / "again.yml")
        assert (tmp_path / "again.yml").read_bytes() == path.read_bytes()
        (tmp_path / "again.yml").unlink()
        assert again.shapes == request.shapes
        assert again.budgets == request.budgets
        assert (again.precisions, again.levels) == (
            None if request.precisions is None else list(request.precisions),
            None if request.levels is None else {"ffn": [0.25, 0.5, 1.0]},
        )
    # Every option is stated, and nothing else.
    names = [line.partition(":")[0] for line in path.read_text().splitlines() if line[:1] not in " -"]
    assert names == list(JOB_OPTIONS)


def test_what_a_file_leaves_out_has_its_default(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model: m\ninclude: ladder\ntasks: null\nlora_rank: null\n")
    assert CompileRequest(**load_job(path)) == CompileRequest("m", include="ladder")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: m\nprecison: [fp32]\n", r"no option 'precison'; did you mean 'precisions'\?"),
        ("model: m\ncommand: [rm]\n", "no option 'command'"),
        ("model: m\n1: 2\n", "no option 1"),
        ("output: o\n", "expected a compile's options by name, the folder of its model among them"),
        ("model: null\n", "expected a compile's options by name, the folder of its model among them"),
        ("- model\n", "expected a compile's options by name"),
        ("model: m\nmodel: n\n", "key 'model' stands twice"),
        ("model: !!python/object:os.system m\n", "not a readable YAML file"),
        ("model: m\nlora_rank: 0\n", "lora_rank: expected a whole number from 1 to 65536, got 0"),
        ("model: m\nlevels: [1]\n", "levels: expected a mapping of str to a list of float or None, got list"),
        ("model: m\nbudgets: {small: {flop: 1}}\n", "budgets.small: unknown key 'flop'"),
        ("model: m\nbudgets: {small: {flops: -1}}\n", "budgets.small: flops: expected more than 0"),
        ("model: m\ntext: a\ndata: b\n", "text and data: expected one of them"),
        ("model: 3\n", "model: expected str, Path or torch.nn.Module, got int 3"),
    ],
)
def test_refusals(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=f"job.yaml: .*{expected}") as refusal:
        load_job(path)
    assert "\n" not in str(refusal.value)


def test_a_file_is_new_and_is_yaml(tmp_path: Path) -> None:
    save_job(REQUEST, tmp_path / "job.yaml")
    with pytest.raises(OutputError, match=r"job.yaml: exists"):
        save_job(REQUEST, tmp_path / "job.yaml")
    with pytest.raises(InputError, match=r"job.json: expected a file name that ends in .yaml or .yml"):
        save_job(REQUEST, tmp_path / "job.json")
    save_job(REQUEST, tmp_path / "JOB.YAML")
    assert load_job(tmp_path / "JOB.YAML")["text"] == "texts.txt"
    with pytest.raises(InputError, match=r"none\.yaml: cannot be read"):
        load_job(tmp_path / "none.yaml")
