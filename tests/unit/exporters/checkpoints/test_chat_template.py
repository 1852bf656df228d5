"""The template that a folder states, against the one that transformers' tokenizer of the folder has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.chat_template import StatedTemplate, read_chat_template
from nestforge.exporters.checkpoints.offline_transformers import offline_transformers
from nestforge.runtime.generation.chat import MAX_TEMPLATE_LETTERS
from support.chat_templates import CHATML, GEMMA, LLAMA_2
from support.tokenizer_folders import save_tokenizer, word_pieces

PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast"}
SEP = {"content": "[SEP]", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
NAMED = [{"name": "tool_use", "template": GEMMA}, {"name": "default", "template": CHATML}]


def folder_of(folder: Path, settings: Any, files: dict[str, str]) -> Path:
    save_tokenizer(folder, word_pieces(), settings)
    (folder / "config.json").write_text('{"model_type": "bert"}')
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
    return folder


@pytest.mark.parametrize(
    ("settings", "files", "source"),
    [
        ({"chat_template": CHATML, "bos_token": "[CLS]", "eos_token": {**SEP, "__type": "AddedToken"}}, {}, CHATML),
        ({"chat_template": NAMED, "pad_token": None}, {}, CHATML),
        ({"chat_template": GEMMA, "bos_token": "[CLS]"}, {"chat_template.jinja": LLAMA_2}, LLAMA_2),
        ({"eos_token": "[SEP]"}, {"chat_template.jinja": "caf\u00e9\r\n{{ bos_token }}\r\n"}, None),
        (
            {"chat_template": CHATML, "bos_token": "[CLS]", "pad_token": "[PAD]"},
            {"special_tokens_map.json": json.dumps({"bos_token": SEP, "mask_token": "[MASK]"})},
            CHATML,
        ),
        (
            {"chat_template": CHATML, "bos_token": "[CLS]", "added_tokens_decoder": {"3": SEP}},
            {"special_tokens_map.json": json.dumps({"bos_token": "[SEP]"})},
            CHATML,
        ),
    ],
    ids=["text", "named", "file first", "file alone", "older tokens", "no older tokens"],
)
def test_it_is_what_transformers_finds(
    tmp_path: Path, settings: dict[str, Any], files: dict[str, str], source: str | None
) -> None:
    folder = folder_of(tmp_path / "m", {**PLAIN, **settings}, files)
    theirs = offline_transformers().AutoTokenizer.from_pretrained(folder)
    found = read_chat_template(folder)
    assert found == StatedTemplate(theirs.get_chat_template(), theirs.special_tokens_map)
    assert source is None or found.source == source


def test_a_folder_without_a_default_template(tmp_path: Path) -> None:
    assert read_chat_template(folder_of(tmp_path / "a", PLAIN, {})) is None
    assert read_chat_template(folder_of(tmp_path / "b", None, {})) is None
    assert read_chat_template(folder_of(tmp_path / "c", {**PLAIN, "chat_template": NAMED[:1]}, {})) is None
    without = folder_of(
        tmp_path / "d", None, {"chat_template.jinja": "a", "special_tokens_map.json": '{"eos_token": "b"}'}
    )
    assert read_chat_template(without) == StatedTemplate("a", {"eos_token": "b"})


@pytest.mark.parametrize(
    ("settings", "files", "message"),
    [
        (
            {"chat_template": 3},
            {},
            "tokenizer_config.json: chat_template: expected a text or a list of named ones, got 3",
        ),
        ({"chat_template": ["a"]}, {}, "tokenizer_config.json: chat_template: expected a text or a list of named ones"),
        (
            {"chat_template": [{"name": "default", "template": 3}]},
            {},
            "tokenizer_config.json: chat_template: expected a",
        ),
        (
            {"chat_template": "a" * (MAX_TEMPLATE_LETTERS + 1)},
            {},
            "tokenizer_config.json: chat template: expected at most 262144 letters, got 262145",
        ),
        ({}, {"chat_template.jinja": "a" * 2**18 + "b"}, "chat_template.jinja: chat template: expected at most 262144"),
        ({}, {"chat_template.jinja": "a" * (2**20 + 1)}, "chat_template.jinja: 1048577 bytes, more than the 1048576"),
        ({"chat_template": "a", "eos_token": 3}, {}, "tokenizer_config.json: eos_token: expected a text, got 3"),
        (
            {"chat_template": "a"},
            {"special_tokens_map.json": '{"pad_token": {"content": []}}'},
            "special_tokens_map.json: pad_token: expected a text, got {'content': []}",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refusals(tmp_path: Path, settings: dict[str, Any], files: dict[str, str], message: str) -> None:
    folder = folder_of(tmp_path / "m", {**PLAIN, **settings}, files)
    with pytest.raises(CheckpointError) as caught:
        read_chat_template(folder)
    assert str(caught.value).startswith(f"{folder}/{message}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", PLAIN, {})
    (folder / "chat_template.jinja").write_bytes(b"ab\xff")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja: expected UTF-8 \(invalid start byte at byte 2\)$"):
        read_chat_template(folder)
