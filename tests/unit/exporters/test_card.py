"""Keys at the start of a model card."""

from __future__ import annotations

from pathlib import Path

import pytest
from nestforge.errors import CheckpointError
from nestforge.exporters.dimensions import read_card

KEY = "matryoshka_layers"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("---\nmatryoshka_layers: [2, 4]\ntags:\n- loss:AdaptiveLayerLoss\n---\n# A model\n---\n", {KEY: [2, 4]}),
        ("---\nmatryoshka_layers:\n- 2\n  # half\n\n- 4\nlicense: mit\n---\n", {KEY: [2, 4]}),
        ("---\nmatryoshka_layers:\n  - 2\n---\n", {KEY: [2]}),
        ("---\nmodel-index: [1\n  {\nmatryoshka_layers: [2]\nmodel-index: &a\n---\n", {KEY: [2]}),  # not ours to read
        ("# A model\n---\nmatryoshka_layers: [2]\n---\n", {}),
        ("---\nmatryoshka_layers: [2]\n", {}),
        ("---\nnested:\n  matryoshka_layers: [2]\n---\n", {}),
        ("---\n- 1\n---\n", {}),
        ("---\n---\n", {}),
        ("", {}),
    ],
)
def test_keys_stand_between_two_lines(text: str, expected: dict[str, list[int]], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    assert read_card(tmp_path, (KEY,)) == expected


def test_none_without_a_card(tmp_path: Path) -> None:
    assert read_card(tmp_path, (KEY,)) == {}


@pytest.mark.parametrize(
    "value", ["[1", "!!python/object:os.system x", "[" * 5000, "[2]\nmatryoshka_layers: [3]", "*a"]
)
def test_no_yaml(value: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\nmatryoshka_layers: {value}\n---\n")
    with pytest.raises(CheckpointError, match=r"README.md: not a readable YAML file"):
        read_card(tmp_path, (KEY,))
