"""A tokenizer whose tokens are the bytes of UTF-8: id and byte are the same number, and nothing is added."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def byte_tokenizer(special: Sequence[str] = ()) -> Tokenizer:
    """256 ids, no merges, and the ``special`` tokens from 256 on. Pad with 0, which no source contains."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def _symbols() -> list[str]:
    """The character for which byte-level tokenizers take each byte: itself if it prints, else one from 256 on."""
    printing = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printing else next(others)) for byte in range(256)]
