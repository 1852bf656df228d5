from __future__ import annotations

from importlib import metadata
from pathlib import Path

from nestforge.compiler.provenance import source_entries, tool_versions
from nestforge.exporters.source import open_source


def test_source_files_follow_their_bytes(tiniest: Path) -> None:
    assert source_entries(open_source(tiniest)) == source_entries(open_source(f"{tiniest}/"))


def test_versions_do_not_depend_on_which_distribution_brings_onnxruntime(monkeypatch) -> None:
    """onnxruntime-gpu brings the same module."""
    asked: list[str] = []
    known = metadata.version

    def version(name: str) -> str:
        asked.append(name)
        return known(name)

    monkeypatch.setattr(metadata, "version", version)
    versions = tool_versions()
    assert not [name for name in asked if name.startswith("onnxruntime")]
    assert versions["onnxruntime"] == known("onnxruntime")


def test_the_back_end_that_proves_engines_is_among_the_versions() -> None:
    assert tool_versions("openvino")["openvino"] == metadata.version("openvino")
    assert tool_versions("tensorrt") == tool_versions()
