"""A farm's file: which compiles it states, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from nestforge.errors import InputError, ProfileError
from nestforge.profiles.compile_request import CompileRequest
from nestforge.profiles.farm_file import load_farm
from nestforge.profiles.job_file import save_job
from nestforge.profiles.load_profile import load_profile


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
