"""Prompts of chats against ``apply_chat_template`` of transformers."""

import sys
from typing import Any

import pytest
from jinja2 import TemplateError
from nestforge.errors import InputError
from nestforge.runtime.generation import chat as module
from nestforge.runtime.generation.bounded_templates import allowance
from nestforge.runtime.generation.chat import MAX_TEMPLATE_LETTERS, ChatTemplate, sandbox
from support.tokenizer_files import CHATML, GEMMA, LLAMA_2, MISTRAL, STYLES, word_pieces
from transformers import PreTrainedTokenizerFast

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def chat_of(*turns: str) -> list[dict[str, str]]:
    """``"user: text"`` and so on."""
    return [{"role": turn.partition(": ")[0], "content": turn.partition(": ")[2]} for turn in turns]


CHATS = {
    "one turn": chat_of('user: Who are <you> & "why"?'),
    "answered": chat_of("user:  a  \n", "assistant: b\n\n c", "user: caf\u00e9 \U0001f600"),
    "system": chat_of("system: Be brief.\n", "user: a", "assistant: b", "user: c"),
    "empty": chat_of("user: "),
    "marks": chat_of("user: {{ bos_token }} {% raw %} <|im_end|> </s>"),
    "two in a row": chat_of("user: a", "user: b"),
    "long": chat_of(*["user: a", "assistant: b"] * 5, "user: c"),
    "another role": chat_of("tool: a"),
}


def of_transformers(template: str, chat: Any, tokens: dict[str, str], prompted: bool) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_pieces(), chat_template=template, **tokens)
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompted)


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_the_prompt_is_that_of_transformers(style: str, chat: list[dict[str, str]]) -> None:
    template = ChatTemplate(style, TOKENS)
    for prompted in (True, False):
        try:
            expected, refusal = of_transformers(style, chat, TOKENS, prompted), None
        except TemplateError as failure:
            refusal = f"chat template: cannot render this chat ({failure})"
        if refusal is None:
            assert template.render(chat, prompted) == expected
        else:
            with pytest.raises(InputError) as caught:
                template.render(chat, prompted)
            assert str(caught.value) == refusal


def test_prompts_as_they_are() -> None:
    """Against a mistake that transformers would share: its templates are ours."""
    chat = CHATS["answered"]
    assert ChatTemplate(CHATML, {}).render(chat[:1]) == "<|im_start|>user\n a  \n<|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate(GEMMA, {"bos_token": "<bos>"}).render(chat[:2], add_generation_prompt=False) == (
        "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb\n\n c<end_of_turn>\n"
    )
    assert ChatTemplate(LLAMA_2, TOKENS).render(CHATS["system"][:2]) == (
        "<s>[INST] <<SYS>>\nBe brief.\n\n<</SYS>>\n\na [/INST]"
    )
    assert (
        ChatTemplate(MISTRAL, TOKENS).render(CHATS["system"])
        == "<s>[INST] a[/INST] b</s>[INST] Be brief.\n\n\nc[/INST]"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}|{{ pad_token }}|{{ unk_token is defined }}|{{ tools }}|{{ documents }}",
        "a\r\n{{ messages | length }}\r\n\r\n",
        "{{ messages | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}",
        "{{ dict.fromkeys(['a', 'b'], 1) }}{{ dict([('c', 2)], d=3) }}{{ namespace({'self': 4}, e=5).self }}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{% for i in 'abc' %}{% if i == 'b' %}{% continue %}{% endif %}{{ i }}{% endfor %}",
        "{% for i in 'abc' %}{% if i == 'b' %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "  {# a comment #}\n  {% if true %}\n  kept\n  {% endif %}\n",
        "{{ no_such.attribute }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ ''.__class__.__mro__ }}|{{ raise_exception.__globals__ }}",
        "{{ dict.__class__.__base__.__subclasses__() }}",
        "{{ (dict | attr('__call__')).__globals__ }}",
        "{{ namespace(_a=1) }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ range(1000000) | length }}",
        "{{ strftime_now.__code__ }}{{ strftime_now('%%') }}",
        "{% include 'file' %}",
        "{{ raise_exception('no\\nnews') }}",
        "{{ strftime_now(format='%%') }}{{ raise_exception(message='no') }}",
    ],
)
def test_templates_can_what_they_can_in_transformers(template: str) -> None:
    chat = CHATS["answered"]
    try:
        expected = of_transformers(template, chat, {"bos_token": "<s>"}, True)
    except Exception:  # noqa: BLE001  (whatever the template raises)
        with pytest.raises(InputError, match=r"^chat template: cannot render this chat \(.+\)$"):
            ChatTemplate(template, {"bos_token": "<s>"}).render(chat)
    else:
        assert ChatTemplate(template, {"bos_token": "<s>"}).render(chat) == expected


def test_objects_of_the_caller_stay_outside() -> None:
    class Text(str):
        def leak(self) -> str:
            return "leaked"

    with pytest.raises(InputError, match="has no attribute 'leak'"):
        ChatTemplate("{{ messages[0].content.leak() }}", {}).render([{"role": "user", "content": Text("a")}])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for message in messages %}", "chat template: cannot be compiled (Unexpected end of template. Jinja was"),
        ("{{ " + "(" * 20_000 + " }}", "chat template: cannot be compiled ("),
        ("a" * (MAX_TEMPLATE_LETTERS + 1), "chat template: expected at most 262144 letters, got 262145"),
    ],
    ids=["unfinished", "deep", "long"],
)
def test_texts_that_are_no_template(source: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        ChatTemplate(source, {})
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([], "chat: expected a list of messages, at least one, got []"),
        ("hello", "chat: expected a list of messages, at least one, got 'hello'"),
        ({"role": "user", "content": "a"}, "chat: expected a list of messages, at least one, got {'role'"),
        (["a"], "chat: message 0: expected {'role': text, 'content': text} and no other key, got 'a'"),
        ([*CHATS["empty"], {"role": "user"}], "chat: message 1: expected {'role': text, 'content': text} and no"),
        ([{"role": "user", "content": ["a"]}], "chat: message 0: expected {'role': text, 'content': text} and no"),
        ([{"role": "user", "content": "a", "name": "b"}], "chat: message 0: expected {'role': text, 'content': tex"),
    ],
    ids=str,
)
def test_chats_that_are_none(chat: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        ChatTemplate("a", {}).render(chat)
    assert str(caught.value).startswith(message)


def test_without_jinja_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(InputError) as caught:
        sandbox()
    assert str(caught.value) == (
        "chat template: needs Jinja2 (pip install 'nestforge[generate]'), which is not installed here; install it, or "
        "pass a prompt in place of a chat"
    )


@pytest.mark.parametrize(
    ("installed", "fits"), [("3.1.5", False), ("2.11", False), ("3.1.6", True), ("3.10.0rc1", True)]
)
def test_releases_with_an_open_sandbox_are_refused(monkeypatch: pytest.MonkeyPatch, installed: str, fits: bool) -> None:
    monkeypatch.setattr(module, "version", lambda name: installed)
    if fits:
        with allowance():
            assert sandbox().from_string("{{ 1 }}").render() == "1"
        return
    with pytest.raises(InputError) as caught:
        sandbox()
    assert str(caught.value) == (
        f"chat template: expected Jinja2 3.1.6 or later, got {installed}; pip install 'nestforge[generate]'"
    )
