"""Generation defaults of a folder, against transformers' ``GenerationConfig`` of the folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.checkpoint import Checkpoint
from nestforge.exporters.checkpoints.config import offline_transformers
from nestforge.exporters.checkpoints.generation_defaults import (
    GenerationDefaults,
    StatedTemplate,
    read_chat_template,
    read_generation_defaults,
)
from nestforge.outside_file import read_json
from nestforge.runtime.generation.chat import MAX_TEMPLATE_LETTERS
from nestforge.runtime.generation.sampling import Sampling
from support.tokenizer_files import CHATML, GEMMA, LLAMA_2, save_tokenizer, word_pieces
from transformers import AutoConfig, GenerationConfig

VOCABULARY = 32
LLAMA = {"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2}
FOLDERS: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    (LLAMA, None),
    ({**LLAMA, "eos_token_id": [2, 7]}, None),
    ({**LLAMA, "bos_token_id": None, "eos_token_id": None}, None),
    (LLAMA, {}),
    (LLAMA, {"eos_token_id": [5, 6], "bos_token_id": 0}),
    (LLAMA, {"eos_token_id": 0, "temperature": 0.6, "top_p": 0.9}),
    (LLAMA, {"do_sample": True}),
    (LLAMA, {"do_sample": True, "temperature": 0.6, "top_k": None, "top_p": 0.9, "_from_model_config": True}),
    (LLAMA, {"do_sample": True, "top_k": 0, "min_p": 0.1, "repetition_penalty": 1.1, "renormalize_logits": True}),
    (LLAMA, {"repetition_penalty": 1.3, "transformers_version": "5.0.0"}),
]


def checkpoint_of(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return Checkpoint(folder, read_json(folder / "config.json", CheckpointError), {})


@pytest.mark.parametrize(("config", "generation"), FOLDERS)
def test_it_is_what_transformers_finds(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None
) -> None:
    checkpoint = checkpoint_of(tmp_path / "m", config, generation)
    if generation is None:
        theirs = GenerationConfig.from_model_config(AutoConfig.from_pretrained(tmp_path / "m"))
    else:
        theirs = GenerationConfig.from_pretrained(tmp_path / "m")
    theirs.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    ends = theirs.eos_token_id
    expected = Sampling(repetition_penalty=theirs.repetition_penalty)
    if theirs.do_sample:
        filters = (theirs.top_k, theirs.top_p, theirs.min_p or 0.0, theirs.repetition_penalty)
        expected = Sampling(theirs.temperature, *filters)
    assert read_generation_defaults(checkpoint, VOCABULARY) == GenerationDefaults(
        () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,), theirs.bos_token_id, expected, ()
    )


@pytest.mark.parametrize("generation", [None, {}])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2", "t5"])
def test_a_folder_that_states_no_end_has_none(
    tmp_path: Path, model_type: str, generation: dict[str, Any] | None
) -> None:
    """As for a model that transformers loads from the folder, whatever its class has by default."""
    checkpoint = checkpoint_of(tmp_path / "m", {"model_type": model_type}, generation)
    assert AutoConfig.from_pretrained(tmp_path / "m").eos_token_id is not None
    file, legacy = ("config.json", True) if generation is None else ("generation_config.json", None)
    theirs = GenerationConfig.from_pretrained(tmp_path / "m", config_file_name=file, _from_model_config=legacy)
    assert theirs.eos_token_id is None
    assert read_generation_defaults(checkpoint, VOCABULARY).end_ids == ()


def test_settings_without_a_counterpart_are_named(tmp_path: Path) -> None:
    stated = {"num_beams": 4, "no_repeat_ngram_size": 3, "typical_p": 0.9, "bad_words_ids": [[3]], "min_length": 0}
    stated |= {"guidance_scale": None, "encoder_repetition_penalty": 1.0, "suppress_tokens": [], "max_length": 20}
    found = read_generation_defaults(checkpoint_of(tmp_path, LLAMA, stated), VOCABULARY)
    assert found.left_out == ("num_beams", "no_repeat_ngram_size", "bad_words_ids")
    found = read_generation_defaults(checkpoint_of(tmp_path, LLAMA, {**stated, "do_sample": True}), VOCABULARY)
    assert found.left_out == ("num_beams", "no_repeat_ngram_size", "bad_words_ids", "typical_p")


@pytest.mark.parametrize(
    ("key", "value"), [("stop_strings", ["###"]), ("max_new_tokens", 64), ("max_length", 64), ("penalty_alpha", 0.6)]
)
def test_settings_that_end_a_text_otherwise_are_named(tmp_path: Path, key: str, value: object) -> None:
    assert read_generation_defaults(checkpoint_of(tmp_path, LLAMA, {key: value}), VOCABULARY).left_out == (key,)


def test_suppressed_tokens_of_the_vocabulary_are_kept(tmp_path: Path) -> None:
    stated = {"suppress_tokens": [7, 3, 50256, -1], "begin_suppress_tokens": [2, 220]}
    found = read_generation_defaults(checkpoint_of(tmp_path, LLAMA, stated), VOCABULARY)
    assert (found.suppressed, found.suppressed_first, found.left_out) == ((7, 3), (2,), ())


def test_tokens_beyond_the_vocabulary_can_never_come(tmp_path: Path) -> None:
    stated = {"eos_token_id": [2, 32], "bos_token_id": 50256}
    found = read_generation_defaults(checkpoint_of(tmp_path, LLAMA, stated), VOCABULARY)
    assert (found.end_ids, found.begin_id) == ((2,), None)
    assert found.beyond == ("eos_token_id 32", "bos_token_id 50256")


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"eos_token_id": -1}, "eos_token_id: expected at least 0, got -1"),
        ({"eos_token_id": [2, "a"]}, "eos_token_id[1]: expected a whole number, got str 'a'"),
        ({"eos_token_id": True}, "eos_token_id: expected a whole number, got bool True"),
        ({"bos_token_id": 1.5}, "bos_token_id: expected a whole number, got float 1.5"),
        ({"do_sample": 1}, "do_sample: expected true or false, got int 1"),
        ({"do_sample": True, "top_p": 0}, "top_p: expected a number above 0, at most 1, got 0.0"),
        (
            {"repetition_penalty": 0},
            "repetition_penalty: expected a number from 1e-06 to 1000000, got 0.0",
        ),
    ],
    ids=str,
)
def test_refused_defaults(tmp_path: Path, generation: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_generation_defaults(checkpoint_of(tmp_path, LLAMA, generation), VOCABULARY)
    assert str(caught.value) == f"{tmp_path / 'generation_config.json'}: {message}"
    with pytest.raises(CheckpointError) as caught:
        read_generation_defaults(checkpoint_of(tmp_path / "other", {**LLAMA, **generation}, None), VOCABULARY)
    assert str(caught.value) == f"{tmp_path / 'other' / 'config.json'}: {message}"


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
def test_a_template_is_what_transformers_finds(
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
def test_refused_templates(tmp_path: Path, settings: dict[str, Any], files: dict[str, str], message: str) -> None:
    folder = folder_of(tmp_path / "m", {**PLAIN, **settings}, files)
    with pytest.raises(CheckpointError) as caught:
        read_chat_template(folder)
    assert str(caught.value).startswith(f"{folder}/{message}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", PLAIN, {})
    (folder / "chat_template.jinja").write_bytes(b"ab\xff")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja: expected UTF-8 \(invalid start byte at byte 2\)$"):
        read_chat_template(folder)
