"""Keys at the start of a model card."""

from __future__ import annotations

from pathlib import Path

import pytest
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.card import read_card


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("---\nmatryoshka_layers: [2, 4]\ntags:\n- loss:AdaptiveLayerLoss\n---\n# A model\n---\n", {2, 4}),
        ("# A model\n---\nmatryoshka_layers: [2]\n---\n", set()),
        ("---\nmatryoshka_layers: [2]\n", set()),
        ("---\n- 1\n---\n", set()),
        ("", set()),
    ],
)
def test_keys_stand_between_two_lines(text: str, expected: set[int], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    assert {*read_card(tmp_path).get("matryoshka_layers", ())} == expected


def test_none_without_a_card(tmp_path: Path) -> None:
    assert read_card(tmp_path) == {}


@pytest.mark.parametrize("keys", ["a: [1", "a: !!python/object:os.system x", "[" * 5000])
def test_no_yaml(keys: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\n{keys}\n---\n")
    with pytest.raises(CheckpointError, match=r"README.md: not a readable YAML file"):
        read_card(tmp_path)
