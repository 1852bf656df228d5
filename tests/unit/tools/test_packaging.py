"""Contents of a wheel, and packages of a fresh clone."""

from __future__ import annotations

import re
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed_and_nothing_else() -> None:
    outside = {"tests", "docs", "build", "dist", "demo", "examples", "benchmarks"}
    inside = [top for top in ROOT.iterdir() if top.is_dir() and top.name not in outside and top.name[0] != "."]
    folders = {Path()} | {path.parent.relative_to(ROOT) for top in inside for path in top.rglob("*.py")}
    assert [folder for folder in folders if not (ROOT / folder / "__init__.py").exists()] == []
    names = {".".join(("nestforge", *folder.parts)) for folder in folders}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == names


def test_constraints_pin_every_requirement_exactly_and_name_no_local_build() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pins = {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines}
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line) for line in lines)
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["cpu"], *extras["compile"], *extras["dev"]]
    names = {re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", text)[0]).lower() for text in wanted}
    assert names <= pins


def test_continuous_integration_runs_exactly_make_test() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert [line for line in script.splitlines() if line.startswith(("exec", "make"))] == ["exec make test"]
