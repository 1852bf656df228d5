"""Commands that plan, with a profile or an option that asks for other precisions than fp32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from nestforge.compiler import mix_n_match, request
from nestforge.profiles.load_profile import dump_profile, load_profile
from nestforge.profiles.precision import Precision
from nestforge.tools.cli import main


def nestforge(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


def profile_with(folder: Path, profile: Path, *precisions: Precision) -> Path:
    path = folder / "precise.yaml"
    path.write_text(dump_profile(replace(load_profile(profile), precisions=precisions)))
    return path


@pytest.mark.parametrize(("precisions", "line"), [("int8", "int8"), ("fp32,int8", "fp32, int8")])
def test_a_plan_names_its_precisions(compiled: Any, precisions: str, line: str) -> None:
    arguments = ["plan", compiled.model, "--profile", compiled.profile, "--precision", precisions]
    table = nestforge(*arguments).stdout.splitlines()
    assert table[2].split(maxsplit=1) == ["precision", line]
    chosen = {budget["submodel"] for budget in json.loads(nestforge(*arguments, "--json").stdout)["budgets"]}
    unused = "," in precisions and not any(submodel.endswith("-bits8") for submodel in chosen)
    assert ("note: int8: no budget chose it; `--include levels` builds it all the same" in table) == unused


def test_inspect_counts_weights_in_the_precision_of_the_profile(compiled: Any, tmp_path: Path) -> None:
    plain = json.loads(nestforge("inspect", compiled.model, "--profile", compiled.profile, "--json").stdout)
    profile = profile_with(tmp_path, compiled.profile, "int8")
    narrow = json.loads(nestforge("inspect", compiled.model, "--profile", profile, "--json").stdout)
    planned = json.loads(nestforge("plan", compiled.model, "--profile", profile, "--json").stdout)
    bytes_of = {candidate["id"]: candidate["weight_bytes"] for candidate in planned["candidates"]}
    assert (plain["precisions"], narrow["precisions"]) == (["fp32"], ["int8"])
    assert {level["submodel"]: level["weight_bytes"] for level in narrow["levels"]}.items() <= bytes_of.items()
    assert narrow["levels"][-1]["weight_bytes"] < 0.5 * plain["levels"][-1]["weight_bytes"]
    text = nestforge("inspect", compiled.model, "--profile", profile).stdout
    assert [line.split() for line in text.splitlines() if line.startswith("precision")] == [["precision", "int8"]]


def test_inspect_shows_levels_in_the_widest_of_several(compiled: Any, tmp_path: Path) -> None:
    profile = profile_with(tmp_path, compiled.profile, "int8", "fp32")
    found = json.loads(nestforge("inspect", compiled.model, "--profile", profile, "--json").stdout)
    assert found["precisions"] == ["int8", "fp32"]
    assert not any("bits" in level["submodel"] for level in found["levels"])


@pytest.mark.parametrize("precisions", [("int8",), ("int8", "fp16")])
def test_mixnmatch_plans_in_the_widest_precision(
    compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precisions: tuple[Precision, ...]
) -> None:
    planned: list[Any] = []

    class Planned(Exception):
        """What comes after is PyTorch's in float32, whatever the precision."""

    def stop(source: Any) -> None:
        planned.append(source)
        raise Planned

    monkeypatch.setattr(mix_n_match, "read_corpus", stop)
    made, make_plan = [], request.make_plan
    monkeypatch.setattr(request, "make_plan", lambda *a, **k: made.append(make_plan(*a, **k)) or made[-1])
    profile = profile_with(tmp_path, compiled.profile, *precisions)
    arguments = ["mixnmatch", compiled.model, "--text", "t", "--budget", "parameters<=80%", "--profile", profile]
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert isinstance(result.exception, Planned)
    assert {c.precision for plan in made for c in plan.candidates} == {precisions[-1]}
    assert not any("bits" in c.id for plan in made for c in plan.candidates)
