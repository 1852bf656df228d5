"""Small tokenizers of the kinds that transformers' classes rebuild, as folders of a model hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.tiny_models import WORDS
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

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
