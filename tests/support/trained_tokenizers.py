"""Tokenizers of the kinds that language models have, trained on the docstrings of the standard library."""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import subprocess
import textwrap
import threading
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

_MODULES = (argparse, collections, pathlib, subprocess, textwrap, threading)
_OTHER_SCRIPTS = [
    "naïve café, \u00fcber 5 €",
    "日本語のテキスト",
    "\U0001f600 \U0001f468\u200d\U0001f469",
    "Привет, мир",
]
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
def word_pieces() -> Tokenizer:
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


KINDS = [byte_level, byte_fallback, metaspace, word_pieces, word_ends, whole_words]
