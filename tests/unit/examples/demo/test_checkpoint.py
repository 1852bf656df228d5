"""The demo's model has a short name: a link to the folder inside the installed package."""

from __future__ import annotations

from pathlib import Path

import pytest
from nestforge.errors import CheckpointError
from nestforge.examples.demo import checkpoint


def test_the_link_leads_to_the_folder_that_is_installed_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(checkpoint, "demo_checkpoint", lambda name=name: tmp_path / name)
        link = checkpoint.link_checkpoint(tmp_path / "minilm")
        assert (link, link.resolve()) == (tmp_path / "minilm", tmp_path / name)
    (tmp_path / "new").rmdir()
    assert checkpoint.link_checkpoint(link).is_symlink()  # one that leads nowhere is replaced as well


def test_what_is_no_link_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "demo_checkpoint", lambda: tmp_path / "model")
    (tmp_path / "minilm").mkdir()
    with pytest.raises(CheckpointError, match="minilm: expected nothing or a link"):
        checkpoint.link_checkpoint(tmp_path / "minilm")
    assert (tmp_path / "minilm").is_dir()
