"""Settings of texts in a folder of sentence-transformers reach the manifest's ``text`` entry, or are refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nestforge.bundle.manifest import TextEntry
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.checkpoint import Checkpoint
from nestforge.exporters.sentence_transformers.text_settings import ModelConfig, read_model_config, with_text_settings

TEXT = TextEntry("tokenizer.json", "input_ids", "attention_mask", None, None)
PROMPTS = {"prompts": {"query": "q: "}, "default_prompt_name": "query"}


def folder_of(folder: Path, **files: dict[str, Any]) -> Checkpoint:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Checkpoint(folder, {}, {})


def test_another_folder_says_nothing(tmp_path: Path) -> None:
    checkpoint = folder_of(tmp_path, sentence_bert_config={"do_lower_case": True})
    assert with_text_settings(checkpoint, TEXT, "pooled") is TEXT


@pytest.mark.parametrize(
    ("transformer", "tokenizer", "longest"),
    [
        ({"max_seq_length": 16}, {"model_max_length": 32}, 16),
        ({"max_seq_length": None}, {"model_max_length": 32}, 32),
        ({}, {"model_max_length": 1e30}, None),
        ({}, {}, None),
    ],
)
def test_case_length_and_prompts(
    tmp_path: Path, transformer: dict[str, Any], tokenizer: dict[str, Any], longest: int | None
) -> None:
    checkpoint = folder_of(
        tmp_path,
        modules={},
        sentence_bert_config={**transformer, "do_lower_case": True},
        tokenizer_config=tokenizer,
        config_sentence_transformers=PROMPTS,
    )
    assert with_text_settings(checkpoint, TEXT, "pooled") == replace(
        TEXT, max_tokens=longest, lowercase=True, prompts={"query": "q: "}, default_prompt="query", pooled="pooled"
    )


def test_settings_may_lie_in_the_file_of_another_model_type(tmp_path: Path) -> None:
    files = {"sentence_roberta_config": {"query_length": 4}}
    with pytest.raises(CheckpointError, match=r"sentence_roberta_config\.json: query_length is not supported"):
        with_text_settings(folder_of(tmp_path, modules={}, **files), TEXT, None)


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
