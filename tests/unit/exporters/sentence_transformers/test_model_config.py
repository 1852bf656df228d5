"""``config_sentence_transformers.json``: prompts and the width of the embedding, or a refusal that names the key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from nestforge.errors import CheckpointError
from nestforge.exporters.sentence_transformers.model_config import ModelConfig, read_model_config


def written(folder: Path, data: dict[str, Any]) -> Path:
    (folder / "config_sentence_transformers.json").write_text(json.dumps(data))
    return folder


def test_without_the_file_nothing_is_stated(tmp_path: Path) -> None:
    assert read_model_config(tmp_path) == ModelConfig()


def test_prompts_and_width(tmp_path: Path) -> None:
    stated = {"prompts": {"query": "q: ", "document": None}, "default_prompt_name": "query", "truncate_dim": 8}
    config = read_model_config(written(tmp_path, {**stated, "__version__": {"pytorch": "2"}}))
    assert (config.texts, config.default_prompt_name, config.truncate_dim) == (
        {"query": "q: ", "document": ""},
        "query",
        8,
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"promts": {}}, "unknown key 'promts'; did you mean 'prompts'?"),
        ({"truncate_dim": 0}, "truncate_dim: expected at least 1, got 0"),
        (
            {"model_type": "SparseEncoder"},
            "model_type 'SparseEncoder', which gives sparse vectors over a vocabulary, is not supported",
        ),
        (
            {"default_prompt_name": "quary", "prompts": {"query": ""}},
            "default_prompt_name 'quary'; did you mean 'query'?",
        ),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, data: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_model_config(written(tmp_path, data))
