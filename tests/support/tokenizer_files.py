"""Tokenizers of the kinds that language models have, trained on the docstrings of the standard library or with a
vocabulary of few words, as a folder has them; and chat templates."""

import argparse
import collections
import json
import pathlib
import subprocess
import textwrap
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

_MODULES = (argparse, collections, pathlib, subprocess, textwrap, threading)
_OTHER_SCRIPTS = [
    "naïve café, \u00fcber 5 €",
    "日本語のテキスト",
    "\U0001f600 \U0001f468\u200d\U0001f469",
    "Привет, мир",
]
WORDS = tuple(
    "the a quick brown fox jumps over lazy dog model engine budget shape time compile run test of to and".split()  # noqa: SIM905
)
END = "</s>"
SPECIAL = ["<unk>", "<s>", END]


@cache
def docstrings() -> tuple[str, ...]:
    """Paragraphs of docstrings, and some text in other scripts."""
    objects = [each for module in _MODULES for each in (module, *vars(module).values())]
    texts = [getattr(each, "__doc__", None) for each in objects]
    parts = [part for text in texts if isinstance(text, str) for part in text.split("\n\n")]
    return (*dict.fromkeys(parts), *_OTHER_SCRIPTS)


@cache
def byte_level() -> Tokenizer:
    """As GPT-2's and Qwen's: a letter may be several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(tokenizer, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, special_tokens=SPECIAL))


@cache
def byte_fallback() -> Tokenizer:
    """As Llama's: a space before the text, bytes for letters that the vocabulary lacks."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))  # noqa: S106  (a token)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    stripped = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), stripped]
    )
    _trained(tokenizer, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, limit_alphabet=70))
    data = json.loads(tokenizer.to_str())
    first = len(data["model"]["vocab"])
    data["model"]["vocab"] |= {f"<0x{byte:02X}>": first + byte for byte in range(256)}
    data["model"]["byte_fallback"] = True
    return Tokenizer.from_str(json.dumps(data))


@cache
def metaspace() -> Tokenizer:
    """As T5's: a unigram model."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _trained(tokenizer, trainers.UnigramTrainer(vocab_size=400, special_tokens=SPECIAL, unk_token="<unk>"))  # noqa: S106


@cache
def trained_word_pieces() -> Tokenizer:
    """As BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))  # noqa: S106
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _trained(tokenizer, trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL))


@cache
def word_ends() -> Tokenizer:
    """A BPE with a mark at the end of words, as the first GPT's."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    return _trained(tokenizer, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, end_of_word_suffix="</w>"))


@cache
def whole_words() -> Tokenizer:
    """Without a decoder: tokens are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _trained(tokenizer, trainers.WordLevelTrainer(vocab_size=400, special_tokens=SPECIAL))


def _trained(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    trainer.show_progress = False
    tokenizer.train_from_iterator(docstrings(), trainer)
    return tokenizer


KINDS = [byte_level, byte_fallback, metaspace, trained_word_pieces, word_ends, whole_words]


BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SENTENCE_PIECE = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def save_tokenizer(folder: Path, tokenizer: Tokenizer, settings: Mapping[str, Any] | None) -> Path:
    """``tokenizer.json``, and ``settings`` as ``tokenizer_config.json`` unless None; returns the former."""
    folder.mkdir(exist_ok=True)
    file = folder / "tokenizer.json"
    tokenizer.save(str(file))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return file


def word_tokenizer(vocabulary: int) -> Tokenizer:
    """Whole lower-case words, the first of four special tokens and WORDS."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = {word: index for index, word in enumerate([*special, *WORDS][:vocabulary])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))  # noqa: S106  (a token, not a password)
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def word_pieces(lowercase: bool = True, strip_accents: bool | None = None, chinese: bool = True) -> Tokenizer:
    """BERT's kind, over words and letters in both cases, with and without accents."""
    letters = "abcdefghijklmnopqrstuvwxyz\u00e9\u00ef\u00df\u65e5\u672c\u8a9e0123456789"
    pieces = [*letters, *(f"##{letter}" for letter in letters), *"FTQEB", *",.!?'", *WORDS, "caf\u00e9", "Fox", "FOX"]
    tokenizer = Tokenizer(models.WordPiece(_numbered(BERT, pieces), unk_token="[UNK]"))  # noqa: S106  (a token)
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=chinese, strip_accents=strip_accents, lowercase=lowercase
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _framed(tokenizer, "[CLS]", "[SEP]")


def byte_pairs(special: tuple[str, ...], first: str, last: str | None) -> Tokenizer:
    """A byte-level BPE as Qwen2's and RoBERTa's, but that it puts a space before each text."""
    merges = [("t", "h"), ("th", "e"), ("\u0120", "the"), ("\u0120", "a"), ("F", "o"), ("Fo", "x"), ("1", "2")]
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(_numbered(special, vocabulary), merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    return _framed(tokenizer, first, last)


def sentence_pieces() -> Tokenizer:
    """A BPE as Gemma's, but that it lowers case and puts a space before each text."""
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "a"), ("F", "o"), ("Fo", "x")]
    letters = "abcdefghijklmnopqrstuvwxyzFTQEB\u00e9\u65e50123456789.,'"
    vocabulary = ["\u2581", *letters, *("".join(pair) for pair in merges), *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE(_numbered(SENTENCE_PIECE, vocabulary), merges, unk_token="<unk>", byte_fallback=True)  # noqa: S106
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return _framed(tokenizer, "<bos>", None)


def unigram() -> Tokenizer:
    """A unigram model as XLM-RoBERTa's, but that it lowers case and keeps runs of spaces apart."""
    pieces = [
        "\u2581",
        *"abcdefghijklmnopqrstuvwxyzFTQEB\u00e9\u65e50123456789.,'",
        "\u2581the",
        "\u2581a",
        "\u2581Fox",
    ]
    vocabulary = [*((token, 0.0) for token in ROBERTA[:4]), *((piece, -float(len(pieces))) for piece in pieces)]
    tokenizer = Tokenizer(models.Unigram([*vocabulary, ("<mask>", 0.0)], unk_id=3, byte_fallback=False))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    return _framed(tokenizer, "<s>", "</s>")


def _numbered(special: tuple[str, ...], pieces: list[str]) -> dict[str, int]:
    return {piece: number for number, piece in enumerate(dict.fromkeys([*special, *pieces]))}


def _framed(tokenizer: Tokenizer, first: str, last: str | None) -> Tokenizer:
    """Every text between two special tokens."""
    ends = [token for token in (first, last) if token]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last or ''}".strip(), special_tokens=[(end, tokenizer.token_to_id(end)) for end in ends]
    )
    return tokenizer


LLAMA_2 = """\
{% if messages[0]['role'] == 'system' %}
    {% set loop_messages = messages[1:] %}
    {% set system_message = messages[0]['content'] %}
{% else %}
    {% set loop_messages = messages %}
    {% set system_message = false %}
{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate: user, assistant, user, ...') }}
    {% endif %}
    {% if loop.index0 == 0 and system_message != false %}
        {% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {% else %}
        {% set content = message['content'] %}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' -}}
    {% elif message['role'] == 'assistant' %}
        {{- ' ' + content.strip() + ' ' + eos_token -}}
    {% endif %}
{% endfor %}
"""

CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}\
{% endgeneration %}{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)

MISTRAL = """\
{%- set ns = namespace(index=0, system='') -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- set ns.system = message.content -%}
        {%- continue -%}
    {%- endif -%}
    {%- if message.role not in ['user', 'assistant'] -%}
        {{- raise_exception('Only user and assistant roles are supported, got ' + message.role) -}}
    {%- endif -%}
    {%- set ns.index = ns.index + 1 -%}
{%- endfor -%}
{{- bos_token -}}
{%- for message in messages | selectattr('role', 'ne', 'system') -%}
    {%- if message.role == 'user' -%}
        {{- '[INST] ' ~ (ns.system ~ '\\n\\n' if loop.last and ns.system else '') ~ message.content ~ '[/INST]' -}}
    {%- else -%}
        {{- ' ' ~ message.content ~ eos_token -}}
    {%- endif -%}
    {%- if loop.index >= 6 %}{% break %}{% endif -%}
{%- endfor -%}
"""

LLAMA_3 = """\
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") %}
{%- endif %}
{{- bos_token + "<|start_header_id|>system<|end_header_id|>\\n\\nYear: " + date_string }}
{%- if tools is not none %}{{ " with tools" }}{%- endif %}
{{- " <|eot_id|>" }}
{%- for message in messages %}
    {%- set header = dict(role=message.role, turn=loop.index) %}
    {{- "<|start_header_id|>" ~ header | tojson ~ "<|end_header_id|>\\n\\n" }}
    {{- message['content'] | trim ~ "<|eot_id|>" }}
    {{- header | tojson(indent=2) if loop.last }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}
"""

STYLES = {"llama-2": LLAMA_2, "chatml": CHATML, "gemma": GEMMA, "mistral": MISTRAL, "llama-3": LLAMA_3}
