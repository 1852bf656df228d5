"""Compiles and farms as files, and a request's own checks, before any model or device is opened."""

from pathlib import Path
from typing import Any

import pytest
from nestforge.argument_types import options_of
from nestforge.bucket import Bucket
from nestforge.errors import InputError, OutputError, ProfileError
from nestforge.profiles.budget import BudgetSpec
from nestforge.profiles.compile_request import JOB_OPTIONS, CompileRequest, require_names
from nestforge.profiles.job_file import load_farm, load_job, save_job
from nestforge.profiles.load_profile import load_profile
from nestforge.profiles.nest_request import ConversionSettings, NestRequest

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


@pytest.fixture
def farm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        save_job(CompileRequest("model", profile="laptop-x86", overwrite=name == "b"), Path(f"{name}.yaml"))
    return tmp_path / "farm.yaml"


def test_jobs_times_profiles_and_plans_are_left_to_devices(farm: Path) -> None:
    farm.write_text("jobs: [a.yaml, b.yaml]\nprofiles: [raspberry-pi-5, l4]\noutput: fleet\n")
    found = load_farm(farm)
    assert [*found] == ["a-raspberry-pi-5", "a-l4", "b-raspberry-pi-5", "b-l4"]
    assert [str(one.output) for one in found.values()] == [f"fleet/{name}.bundle" for name in found]
    assert [one.emit_only for one in found.values()] == [False, True] * 2
    assert [one.overwrite for one in found.values()] == [False, False, True, True]
    assert found["b-l4"].profile == load_profile("l4")


def test_without_profiles_a_job_has_its_own(farm: Path) -> None:
    farm.write_text("jobs: [a.yaml]\noutput: fleet\n")
    (name, request), *others = load_farm(farm).items()
    assert (name, request.profile, others) == ("a", load_profile("laptop-x86"), [])


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        (
            "jobs: [nowhere.yaml]\noutput: o\n",
            InputError,
            "farm.yaml: jobs: nowhere.yaml: no such file; expected one that `nestforge compile --save` writes",
        ),
        ("jobs: []\noutput: o\n", InputError, "farm.yaml: jobs: expected at least one file of `nestforge compile --s"),
        ("jobs: [a.yaml]\n", InputError, "farm.yaml: missing key 'output'"),
        ("jobs: [a.yaml]\noutput: o\nprofile: [l4]\n", InputError, "unknown key 'profile'; did you mean 'profiles'?"),
        ("jobs: [a.yaml]\nprofiles: [l5]\noutput: o\n", ProfileError, "profile 'l5': neither a file nor a built-in"),
        (
            "jobs: [a.yaml, ./a.yaml]\nprofiles: [l4]\noutput: o\n",
            InputError,
            "o/a-l4.bundle would be written twice, by a.yaml for l4 and ./a.yaml for l4; rename a file",
        ),
        ("- a.yaml\n", InputError, "farm.yaml: expected a mapping, got a list"),
    ],
)
def test_what_it_refuses(farm: Path, text: str, error: type[Exception], says: str) -> None:
    farm.write_text(text)
    with pytest.raises(error) as refusal:
        load_farm(farm)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"farm.yaml: cannot be read"):
        load_farm(tmp_path / "farm.yaml")


@pytest.mark.parametrize("name", ["a", "_b.c-9", "x" * 64])
def test_names_of_tasks(name: str) -> None:
    require_names([name], taken=["other"])


@pytest.mark.parametrize("name", ["", ".a", "-a", "a b", "a/b", "x" * 65, "ä"])
def test_names_that_no_task_has(name: str) -> None:
    with pytest.raises(InputError, match="expected a name of at most 64 letters"):
        CompileRequest("model", tasks={name: "folder"})


def test_a_name_that_differs_in_case_alone_is_taken() -> None:
    with pytest.raises(InputError, match="task Both: there is another of this name"):
        require_names(["Both"], taken=["both"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tasks": {"a": "b", "A": "b"}}, "task a: there is another of this name"),
        ({"text": "a.txt", "data": "a.npz"}, "text and data: expected one of them"),
        ({"pairs": ["6:128"], "exits": [6]}, "pairs: they name exit layers and dimensions; leave out `exits` and"),
        ({"lora_rank": 10**9}, "lora_rank: expected a whole number from 1 to 65536, got 1000000000"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CompileRequest("model", **wrong)


@pytest.mark.parametrize("owner", [CompileRequest, NestRequest, ConversionSettings])
def test_help_says_the_meaning_of_every_field(owner: type) -> None:
    for name, field in options_of(owner).items():
        assert f"``{name}``: {field.metadata['help']}" in (owner.__doc__ or "")


def test_pairs_are_layers_and_dimensions() -> None:
    assert CompileRequest("m").layer_dimensions is None
    assert CompileRequest("m", pairs=["6:128", "12:768"]).layer_dimensions == ((6, 128), (12, 768))
    for wrong in ("6", "6:", "6:128:2", "-6:128", "6:1_0"):
        with pytest.raises(InputError, match="pairs: expected layers:dimensions, such as 6:128, got"):
            CompileRequest("m", pairs=[wrong]).layer_dimensions  # noqa: B018
