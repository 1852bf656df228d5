"""Places that take no bundle: one clear line, and nothing of anybody lost."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
from nestforge.bucket import Bucket
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.engines import templates as templates_module
from nestforge.errors import OutputError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from support.refused_compile import Case
from support.tiny_compile import template_of


@pytest.fixture(scope="module")
def templates(model: Path) -> dict[Bucket, Any]:
    """Traces are not what is wrong here, so they are made once."""
    universal = load_universal(open_source(model))
    return {bucket: template_of(universal, bucket) for bucket in (Bucket(2, 8), Bucket(1, 1))}


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_an_output_that_exists(case: Case, kind: str) -> None:
    match kind:
        case "folder":
            case_path = case.output
            case_path.mkdir()
            (case_path / "mine").touch()
        case "file":
            case.output.touch()
        case _:
            case.output.symlink_to("nowhere")
    refusal = case.refused()
    assert str(refusal) == f"{case.output}: exists already; choose another `output` or `overwrite=True`"
    assert type(refusal) is OutputError


def test_a_folder_that_is_not_ours_in_the_place_of_the_stage(case: Case) -> None:
    mine = case.output.with_name("out.partial")
    mine.mkdir()
    (mine / "thesis").touch()
    assert "out.partial: not a folder that a compile left" in str(case.refused())
    assert (mine / "thesis").exists()


def test_an_output_below_a_file(case: Case) -> None:
    (case.output.parent / "file").touch()
    case.output = case.output.parent / "file" / "out"
    with pytest.raises(OutputError, match=r"out: cannot be written \(Not a directory\)$"):
        compile_bundle(case.model, case.profile, case.output)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without rights")
def test_a_folder_that_cannot_be_written(case: Case) -> None:
    """As another user, who may read what is needed and enter the folder, but not write in it."""
    for path in case.model.iterdir():
        path.chmod(0o755 if path.is_dir() else 0o644)
    modes = {folder: folder.stat().st_mode for folder in (*case.model.parents, case.output.parent)}
    for folder, mode in modes.items():
        folder.chmod(mode | 0o055)
    os.seteuid(65534)
    try:
        refusal = case.refused()
    finally:
        os.seteuid(0)
        for folder, mode in modes.items():
            folder.chmod(mode)
    assert str(refusal) == f"{case.output}: cannot be written (Permission denied)"


@pytest.mark.parametrize("limit", [100, 4_000, 20_000])
def test_a_disk_that_takes_no_more(
    case: Case, templates: dict[Bucket, Any], monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """The system refuses to write beyond ``limit`` bytes of a file: the key, a graph, the weight store, in turn."""
    monkeypatch.setattr(templates_module, "traced_template", lambda _u, _m, _i, bucket, *_: templates[bucket])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        refusal = case.refused()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(refusal) == f"{case.output}: cannot be written (File too large)"
