"""What a server makes of one token, and keeps of requests."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

from nestforge.runtime.load import load
from nestforge.serving.kserve import _short_head
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


def test_what_is_remembered_of_requests_keeps_no_bundle(tiny_bundle: Path) -> None:
    text = b'{"inputs": [], "parameters": {"submodel": "S"}}'
    with load(tiny_bundle) as model:
        served = Served("tiny", model)
        head = served.remembered(_short_head, text, ())
        assert served.remembered(_short_head, text, ()) is head
        assert served.remembered(_short_head, text, (("nestforge-client", "a"),)) is not head
    gone = ref(served)
    del served, head
    gc.collect()
    assert gone() is None
