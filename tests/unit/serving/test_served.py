"""What a server makes of one token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nestforge.serving.served import Served
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def test_a_token_keeps_the_space_before_it() -> None:
    """A decoder that takes it from a text's first token takes it from one alone too."""
    tokenizer = Tokenizer(models.BPE({"▁the": 0, "the": 1, "▁a": 2, "a": 3, "▁": 4}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    served: Any = SimpleNamespace(_texts=SimpleNamespace(encoder=lambda: SimpleNamespace(tokenizer=tokenizer)))
    assert tokenizer.decode([0]) == tokenizer.decode([1]) == "the"
    assert Served._written(served, 0) == (" the", list(b" the"))
    assert Served._written(served, 1) == ("the", list(b"the"))
