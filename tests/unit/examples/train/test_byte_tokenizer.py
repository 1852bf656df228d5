"""Ids are the bytes of UTF-8."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from nestforge.examples.train.byte_tokenizer import byte_tokenizer
from tokenizers import Tokenizer

TOKENIZER = Tokenizer.from_str(byte_tokenizer().to_str())


@given(st.text())
def test_text_to_bytes_and_back(text: str) -> None:
    encoded = TOKENIZER.encode(text)
    assert bytes(encoded.ids) == text.encode()
    assert TOKENIZER.decode(encoded.ids) == text


def test_every_byte_has_a_token() -> None:
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(256))


def test_special_tokens_come_after_the_bytes() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer(["[MASK]"]).to_str())
    assert tokenizer.encode("a[MASK]b").ids == [97, 256, 98]
