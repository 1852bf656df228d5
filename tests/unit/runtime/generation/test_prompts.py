"""Chats as prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import InputError
from nestforge.runtime.generation.prompts import Prompts
from nestforge.runtime.inputs.text import TextEncoder

CHAT = [{"role": "user", "content": "class method"}]


@pytest.fixture
def chatting(llama_bundle: Path) -> Bundle:
    return open_bundle(llama_bundle)


def prompts_of(bundle: Bundle) -> tuple[Prompts, TextEncoder]:
    manifest = bundle.manifest
    assert manifest.generation
    assert manifest.text
    encoder = TextEncoder(bundle.path / manifest.text.file, manifest.text, manifest.inputs)
    return Prompts(bundle, manifest.generation, lambda: encoder), encoder


def test_a_chat_is_rendered_and_encoded_as_it_is(chatting: Bundle) -> None:
    prompts, encoder = prompts_of(chatting)
    (ids,) = prompts.tokens(None, CHAT)
    text = "<|im_start|>user\nclass method<|im_end|>\n<|im_start|>assistant\n"
    assert ids.tolist() == encoder.ids(text, add_special_tokens=False)


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], "hello"])
def test_what_is_no_chat_is_refused(chatting: Bundle, messages: Sequence[dict[str, str]]) -> None:
    with pytest.raises(InputError, match=r"^chat: "):
        prompts_of(chatting)[0].tokens(None, messages)


def test_a_prompt_and_a_chat_are_one_too_many(chatting: Bundle) -> None:
    with pytest.raises(InputError, match=r"^generate: expected either a prompt or messages$"):
        prompts_of(chatting)[0].tokens("text", CHAT)


def test_half_a_surrogate_pair_is_refused(chatting: Bundle) -> None:
    with pytest.raises(InputError, match=r"half of a surrogate pair"):
        prompts_of(chatting)[0].tokens("\ud800", None)
