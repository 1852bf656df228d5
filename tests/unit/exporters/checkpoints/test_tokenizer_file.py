"""The tokenizer that a bundle gets against transformers' ``AutoTokenizer`` of the same folder."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nestforge
import pytest
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.config import offline_transformers
from nestforge.exporters.checkpoints.tokenizer_file import tokenizer_content
from nestforge.exporters.source import open_source
from support.tiny_compile import board, save_tiniest
from support.tokenizer_files import ROBERTA, byte_pairs, save_tokenizer, sentence_pieces, unigram, word_pieces
from tokenizers import Tokenizer

# Not the texts by which the module under test compares.
TEXTS = [
    "",
    "the Fox",
    "The quick FOX jumps",
    "  the   a\tthe\n\nFox  ",
    "caf\u00e9 cafe\u0301 na\u00efve \u00c9t\u00e9",
    "the\u65e5\u672c\u8a9ea",
    "12 123 1234567 3.14",
    "the quick, brown fox! isn't it?",
    "\x07the\u00a0Fox\x00",
    "\U0001f600 the \U0001f468\u200d\U0001f469",
    "a [MASK] the[SEP]a <mask> <eos>the </s>",
    "xylophone qqq lazy",
]
LAZY = {"content": "laz", "special": False, "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
BERT_SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}


@dataclass(frozen=True)
class Folder:
    """``changed``: ``tokenizer.json`` alone would make other tokens of ``TEXTS``."""

    name: str
    tokenizer: Callable[[], Tokenizer]
    model_type: str
    settings: Mapping[str, Any]
    changed: bool = True

    def write(self, folder: Path) -> Path:
        file = save_tokenizer(folder, self.tokenizer(), self.settings)
        (folder / "config.json").write_text(json.dumps({"model_type": self.model_type}))
        return file


def bert(name: str, tokenizer: Callable[[], Tokenizer], changed: bool = True, **settings: Any) -> Folder:
    return Folder(name, tokenizer, "bert", {"tokenizer_class": "BertTokenizer", **settings}, changed)


def plain(name: str, changed: bool, **settings: Any) -> Folder:
    return Folder(name, word_pieces, "bert", {"tokenizer_class": "PreTrainedTokenizerFast", **settings}, changed)


FOLDERS = [
    bert("case is kept", word_pieces, do_lower_case=False),
    bert("case is lowered", lambda: word_pieces(lowercase=False), do_lower_case=True),
    bert("case is lowered unless told", lambda: word_pieces(lowercase=False)),
    bert("accents are kept", word_pieces, strip_accents=False),
    bert("accents are stripped", lambda: word_pieces(lowercase=False), do_lower_case=False, strip_accents=True),
    bert("Chinese letters stay together", word_pieces, tokenize_chinese_chars=False),
    bert("Chinese letters come apart", lambda: word_pieces(chinese=False), tokenize_chinese_chars=True),
    bert("the old class", word_pieces, tokenizer_class="BertTokenizerFast", do_lower_case=False),
    Folder("the class of config.json", lambda: word_pieces(lowercase=False), "bert", {}),
    Folder("Gemma", sentence_pieces, "gemma", {"tokenizer_class": "GemmaTokenizer"}),
    Folder("Gemma, old class", sentence_pieces, "gemma2", {"tokenizer_class": "GemmaTokenizerFast"}),
    Folder(
        "Qwen2",
        lambda: byte_pairs(("<|endoftext|>", "<mask>"), "<|endoftext|>", None),
        "qwen2",
        {"tokenizer_class": "Qwen2Tokenizer"},
    ),
    *(
        Folder(
            f"RoBERTa, add_prefix_space {added}",
            lambda: byte_pairs(ROBERTA, "<s>", "</s>"),
            "roberta",
            {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": added},
        )
        for added in (False, True)
    ),
    Folder("XLM-RoBERTa", unigram, "xlm-roberta", {"tokenizer_class": "XLMRobertaTokenizer"}),
    plain("nothing is changed", False),
    plain(
        "what is not about tokens", False, padding_side="left", clean_up_tokenization_spaces=True, do_lower_case=True
    ),
    plain("special tokens are no text", True, **BERT_SPECIAL),
    plain("a token is added", True, added_tokens_decoder={"200": LAZY}),
    Folder("a class that is not known", word_pieces, "bert", {"tokenizer_class": "NoSuchTokenizer"}, False),
]


def ids(content: bytes) -> list[list[int]]:
    return [row.ids for row in Tokenizer.from_buffer(content).encode_batch(TEXTS)]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_tokens_are_those_of_transformers(tmp_path: Path, folder: Folder) -> None:
    file = folder.write(tmp_path / "m")
    theirs = offline_transformers().AutoTokenizer.from_pretrained(tmp_path / "m")(TEXTS)["input_ids"]
    content = tokenizer_content(file)
    assert ids(content) == theirs
    assert (ids(file.read_bytes()) != theirs) == folder.changed
    assert tokenizer_content(file) == content, "other bytes the second time"


@pytest.mark.parametrize("settings", [None, {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8}])
def test_a_file_that_is_right_keeps_its_bytes(tmp_path: Path, settings: Mapping[str, Any] | None) -> None:
    tokenizer = word_pieces(lowercase=False)
    tokenizer.enable_truncation(3)
    file = save_tokenizer(tmp_path, tokenizer, settings)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    file.write_text(f"{file.read_text()}\n \n")
    assert tokenizer_content(file) == file.read_bytes()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}, "code of the folder is never run"),
        ({"auto_map": {"AutoTokenizer": ["a/b--own.Own", None]}, "tokenizer_class": "Own"}, "never run"),
        (
            {"tokenizer_class": "AutoTokenizer", "auto_map": {"AutoTokenizer": ["own.Own", None]}},
            "'AutoTokenizer' is not",
        ),
        ({"tokenizer_class": "AutoModelFast"}, "'AutoModelFast' is not a tokenizer of transformers"),
        ({"tokenizer_class": "BertModel"}, "tokenizer_class 'BertModel' is not a tokenizer of transformers"),
        ({"tokenizer_class": ["BertTokenizer"]}, r"tokenizer_class: expected a name, got \['BertTokenizer'\]"),
        ({"tokenizer_class": "XLMRobertaTokenizer"}, "transformers cannot load the tokenizer"),
        ({"tokenizer_class": "ByT5Tokenizer"}, "ByT5Tokenizer of transformers makes tokens"),
        (
            {"tokenizer_class": "BertTokenizer", "split_special_tokens": True},
            "BertTokenizer of transformers makes tokens",
        ),
    ],
    ids=str,
)
def test_refusals(tmp_path: Path, settings: Mapping[str, Any], message: str) -> None:
    file = save_tokenizer(tmp_path, word_pieces(), settings)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own"}))
    (tmp_path / "own.py").write_text("raise SystemExit('the code of the folder was run')")
    with pytest.raises(CheckpointError, match=message) as caught:
        tokenizer_content(file)
    assert str(caught.value).startswith(str(tmp_path / "tokenizer_config.json"))
    assert "\n" not in str(caught.value)


def vocabulary_folder(folder: Path, model_type: str, files: Mapping[str, str]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder / "tokenizer.json"


def lines_of(vocabulary: Mapping[str, int]) -> str:
    return "".join(f"{piece}\n" for piece in sorted(vocabulary, key=lambda piece: vocabulary[piece]))


@pytest.mark.parametrize("settings", [None, {"tokenizer_class": "BertTokenizer", "do_lower_case": False}])
def test_a_vocabulary_of_word_pieces_is_converted(tmp_path: Path, settings: Mapping[str, Any] | None) -> None:
    files = {"vocab.txt": lines_of(word_pieces().get_vocab())}
    if settings is not None:
        files["tokenizer_config.json"] = json.dumps(settings)
    file = vocabulary_folder(tmp_path / "m", "bert", files)
    theirs = offline_transformers().AutoTokenizer.from_pretrained(tmp_path / "m")(TEXTS)["input_ids"]
    assert ids(tokenizer_content(file)) == theirs
    assert max(map(len, theirs)) > 4


@pytest.mark.parametrize("model_type", ["roberta", "gpt2", "qwen2"])
def test_a_vocabulary_of_byte_pairs_is_converted(tmp_path: Path, model_type: str) -> None:
    model = json.loads(byte_pairs((*ROBERTA, "<|endoftext|>"), "<s>", "</s>").to_str())["model"]
    merges = "".join(f"{' '.join(pair)}\n" for pair in model["merges"])
    files = {"vocab.json": json.dumps(model["vocab"]), "merges.txt": f"#version: 0.2\n{merges}"}
    file = vocabulary_folder(tmp_path / "m", model_type, files)
    theirs = offline_transformers().AutoTokenizer.from_pretrained(tmp_path / "m")(TEXTS)["input_ids"]
    assert ids(tokenizer_content(file)) == theirs


@pytest.mark.parametrize(
    ("model_type", "files", "message"),
    [
        ("gpt2", {"vocab.json": "{}"}, "transformers cannot load the tokenizer"),
        ("bert", {"merges.txt": ""}, "no such file, and BertTokenizer of transformers reads vocab.txt; write a token"),
        (
            "bert",
            {"vocab.txt": "[PAD]\n[UNK]\n", "tokenizer_config.json": '{"tokenizer_class": "ByT5Tokenizer"}'},
            "no such file, and ByT5Tokenizer of transformers tokenises in Python",
        ),
        pytest.param(
            "t5",
            {"spiece.model": ""},
            "transformers makes a tokenizer of it with the package sentencepiece, which is not installed; install it",
            marks=pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="sentencepiece is installed"),
        ),
    ],
    ids=str,
)
def test_a_vocabulary_that_is_not_converted_is_said(
    tmp_path: Path, model_type: str, files: Mapping[str, str], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        tokenizer_content(vocabulary_folder(tmp_path / "m", model_type, files))
    assert str(caught.value).startswith(str(tmp_path / "m"))
    assert "\n" not in str(caught.value)


def test_the_class_in_config_json_is_checked_too(tmp_path: Path) -> None:
    file = save_tokenizer(tmp_path, word_pieces(), {})
    (tmp_path / "config.json").write_text(json.dumps({"tokenizer_class": "AutoTokenizer"}))
    with pytest.raises(CheckpointError, match=r"config.json: tokenizer_class 'AutoTokenizer' is not a tokenizer"):
        tokenizer_content(file)


def test_a_plan_does_not_load_it(tmp_path: Path) -> None:
    folder = save_tiniest(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "AutoModel"}')
    nestforge.plan(folder, profile=board(budgets={"full": {}}))
    with pytest.raises(CheckpointError, match="tokenizer_class 'AutoModel'"):
        nestforge.compile(folder, profile=board(budgets={"full": {}}), output=tmp_path / "b")
    with pytest.raises(CheckpointError, match="tokenizer_class 'AutoModel'"):
        _ = open_source(folder).tokenizer
