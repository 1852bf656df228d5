"""Text that a server generates, asked for by the openai client, beside the call of the model in this process."""

import json
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import sleep
from typing import Any

import openai
import pytest
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from support.generating import llama_folder
from support.servers import Running, serving

PROMPT, CHAT = "class method", [{"role": "user", "content": "class method"}]
DRAWN = {"temperature": 1.5, "seed": 7, "top_p": 0.9}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(llama_folder(tmp_path_factory) / "bundle") as running:
        yield running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElasticModel]:
    with load(llama_folder(tmp_path_factory) / "bundle") as opened:
        yield opened


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{server.address}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.mark.parametrize("options", [{}, DRAWN, {"stop": ["the", "e"]}], ids=str)
def test_a_completion_is_that_of_a_call_whole_and_as_it_comes(
    client: openai.OpenAI, model: ElasticModel, options: dict[str, Any]
) -> None:
    expected = model.generate([PROMPT, "the"], max_tokens=40, **options).rows
    given: Any = {"model": "bundle", "prompt": [PROMPT, "the"], "max_tokens": 40, **options}
    found = client.completions.create(**given)
    assert [one.text for one in found.choices] == [row.text for row in expected]
    assert [one.finish_reason for one in found.choices] == [
        "length" if r.finish == "length" else "stop" for r in expected
    ]
    assert found.usage.prompt_tokens == sum(row.prompt_tokens for row in expected)
    assert found.usage.completion_tokens == sum(len(row.tokens) for row in expected)
    texts, finished, usage = ["", ""], [None, None], None
    for event in client.completions.create(**given, stream=True, stream_options={"include_usage": True}):
        usage = event.usage or usage
        for one in event.choices:
            texts[one.index] += one.text
            finished[one.index] = one.finish_reason or finished[one.index]
    assert texts == [row.text for row in expected]
    assert finished == [one.finish_reason for one in found.choices]
    assert usage == found.usage


def test_a_chat_is_that_of_a_call_whole_and_as_it_comes(client: openai.OpenAI, model: ElasticModel) -> None:
    expected = model.generate(messages=CHAT, max_tokens=30, logprobs=2).rows[0]
    given: Any = {"model": "bundle", "messages": CHAT, "max_completion_tokens": 30, "user": "one", "n": 1}
    given |= {"logprobs": True, "top_logprobs": 2}
    found = client.chat.completions.create(**given)
    assert found.choices[0].message.content == expected.text
    parts = [{"type": "text", "text": text} for text in ("class ", "method")]
    in_parts = client.chat.completions.create(**{**given, "messages": [{"role": "user", "content": parts}]})
    assert in_parts.choices[0].message.content == expected.text
    tokens = found.choices[0].logprobs.content
    assert tokens is not None
    assert expected.log_probabilities is not None
    own = [one.token for one in expected.log_probabilities]
    assert [one.logprob for one in tokens] == pytest.approx(own, abs=1e-4)
    assert [len(one.top_logprobs) for one in tokens] == [2] * 30
    events = list(client.chat.completions.create(**given, stream=True))
    assert "".join(event.choices[0].delta.content or "" for event in events) == expected.text
    assert [event.choices[0].delta.role for event in events] == ["assistant", *[None] * (len(events) - 1)]
    assert [event.choices[0].finish_reason for event in events] == [*[None] * (len(events) - 1), "length"]
    streamed = [one for event in events for one in (event.choices[0].logprobs.content or [])]
    assert [one.token for one in streamed] == [one.token for one in tokens]


def test_log_probabilities_of_a_completion(client: openai.OpenAI, model: ElasticModel) -> None:
    expected = model.generate(PROMPT, max_tokens=5, logprobs=3).rows[0]
    found = client.completions.create(model="bundle", prompt=PROMPT, max_tokens=5, logprobs=3).choices[0].logprobs
    assert found.token_logprobs == pytest.approx([one.token for one in expected.log_probabilities or ()], abs=1e-4)
    assert [len(one) for one in found.top_logprobs or ()] == [3] * 5
    assert (found.tokens or [])[0] == model.generate.token_text(expected.tokens[0]), "a part of a letter has no other"
    assert found.text_offset[0] == 0


def test_rows_that_come_and_go_get_their_own_texts(client: openai.OpenAI, model: ElasticModel) -> None:
    asked = [([5 + n, 9, 40 + n], 3 + 7 * (n % 9)) for n in range(24)]
    prompts = [model.generate(ids, max_tokens=12).text or "a" for ids, _ in asked]
    expected = [model.generate(text, max_tokens=count).text for text, (_, count) in zip(prompts, asked, strict=True)]

    def ask(number: int) -> str:
        found = client.completions.create(model="bundle", prompt=prompts[number], max_tokens=asked[number][1])
        return found.choices[0].text

    with ThreadPoolExecutor(24) as threads:
        assert list(threads.map(ask, range(24))) == expected


def test_long_prompts_are_read_beside_rows_that_step(client: openai.OpenAI, model: ElasticModel) -> None:
    prompts = ["class method " * 28 + str(n) for n in range(6)] + ["the"] * 4
    assert model.generate(prompts[0], max_tokens=1).rows[0].prompt_tokens > 130
    expected = [model.generate(text, max_tokens=20).text for text in prompts]

    def ask(text: str) -> str:
        return client.completions.create(model="bundle", prompt=text, max_tokens=20).choices[0].text

    with ThreadPoolExecutor(10) as threads:
        assert list(threads.map(ask, prompts)) == expected


def test_who_generates_is_asked_for_as_on_other_routes(client: openai.OpenAI, model: ElasticModel) -> None:
    for how, wanted in (
        ({}, ("ffn32", "no limit given: the largest submodel")),
        ({"extra_body": {"submodel": "S"}}, ("ffn8", "submodel S requested")),
        ({"extra_headers": {"nestforge-submodel": "S"}}, ("ffn8", "submodel S requested")),
    ):
        options: Any = {"model": "bundle", "prompt": PROMPT, "max_tokens": 9, **how}
        raw = client.completions.with_raw_response.create(**options)
        found = raw.parse().choices[0]
        assert (raw.headers["nestforge-submodel"], raw.headers["nestforge-reason"]) == wanted
        assert found.text == model.generate(PROMPT, max_tokens=9, submodel=wanted[0]).text
        assert found.model_extra == {"nestforge": [{"submodel": wanted[0], "tokens": 9, "reason": wanted[1]}]}
        with client.completions.with_streaming_response.create(**options, stream=True) as streamed:
            assert streamed.headers["nestforge-submodel"] == wanted[0]


def test_a_deadline_is_kept_by_smaller_submodels_or_refused(client: openai.OpenAI, server: Running) -> None:
    given: Any = {"model": "bundle", "prompt": PROMPT, "max_tokens": 20, "stop": []}
    found = client.completions.create(**given, extra_body={"deadline_ms": 60_000})
    assert [run["submodel"] for run in found.choices[0].model_extra["nestforge"]] == ["ffn32"]
    with pytest.raises(openai.RateLimitError, match="no submodel generates 20 tokens behind") as refusal:
        client.completions.create(**given, extra_body={"deadline_ms": 0.01})
    assert refusal.value.code == "overloaded"
    assert float(refusal.value.response.headers["nestforge-needs-ms"]) > 0.01
    assert b"nestforge_run_requests_count 0.0" in server.ask("GET", "/metrics")[2], "no run is a whole text's"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n": 2}, "n: not served but for 1, got 2"),
        ({"presence_penalty": 0.5}, "presence_penalty: not served but for 0, got 0.5"),
        ({"extra_body": {"guided_json": {}}}, "guided_json: not served; leave it out"),
        ({"extra_body": {"latency_ms": 5}}, "latency_ms: is of one run; a generation takes deadline_ms"),
        ({"logprobs": 6}, "logprobs: expected a whole number from 0 to 5, got 6"),
        ({"max_tokens": 4000}, "tokens and `max_tokens=4000` are more than the capacity of 256"),
        ({"temperature": -1}, "temperature: expected a number, 0 or above, got -1"),
        ({"prompt": [[5, 6]]}, "prompt: expected a text or a list of texts"),
        ({"prompt": ""}, "prompt 0: empty; there is nothing to continue"),
        ({"prompt": ["a"] * 65}, "prompt: 65 texts; expected at most 64 in a request"),
        ({"stream_options": {"include_usage": True}}, "stream_options: is of a stream"),
        ({"extra_body": {"submodel": "S", "deadline_ms": 9}}, "expected a budget, or a submodel, or limits"),
        ({"extra_body": {"task": "no"}}, "no task 'no'"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(client: openai.OpenAI, options: dict[str, Any], said: str) -> None:
    given: Any = {"model": "bundle", "prompt": PROMPT, **options}
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(**given)
    assert said in refusal.value.message
    assert refusal.value.type == "invalid_request_error"


def test_what_a_chat_does_not_serve_is_refused_by_name(client: openai.OpenAI) -> None:
    image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    for options, said in (
        ({"messages": image}, "messages: expected content that is a text, or parts of type text alone"),
        ({"messages": ["hi"]}, "messages: expected objects with role and content, got 'hi'"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools: not served but for []"),
        ({"top_logprobs": 3}, "top_logprobs: is of logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs: expected a whole number from 0 to 20, got 21"),
    ):
        given: Any = {"model": "bundle", "messages": CHAT, **options}
        with pytest.raises(openai.BadRequestError, match=re.escape(said)):
            client.chat.completions.create(**given)


def test_a_client_that_goes_away_stops_its_generation(client: openai.OpenAI, server: Running) -> None:
    for _ in range(20):
        with client.completions.create(model="bundle", prompt=[PROMPT] * 8, max_tokens=240, stream=True) as events:
            next(iter(events))
    for _ in range(50):
        if b"nestforge_generating 0.0" in server.ask("GET", "/metrics")[2]:
            break
        sleep(0.1)
    else:
        pytest.fail("rows go on")
    assert client.completions.create(model="bundle", prompt=PROMPT, max_tokens=3).choices[0].text


def test_a_bundle_that_does_not_generate_says_so(tiny_bundle: Path) -> None:
    with serving(tiny_bundle) as running:
        asked: list[tuple[str, dict[str, Any]]] = [
            ("completions", {"prompt": "a"}),
            ("chat/completions", {"messages": CHAT}),
        ]
        for path, given in asked:
            status, _, said = running.ask("POST", f"/v1/{path}", {"model": "tiny", **given})
            assert (status, said["error"]["message"]) == (400, "model tiny: this model does not generate text")


def test_a_bundle_that_is_removed_chats_on(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    own = Path(shutil.copytree(llama_folder(tmp_path_factory) / "bundle", tmp_path / "own"))
    with serving(own) as running:
        shutil.rmtree(own)  # before any request
        status, _, said = running.ask("POST", "/v1/chat/completions", {"model": "own", "messages": CHAT})
        assert status == 200, said


def test_what_outlives_the_time_to_stop_is_cut_off_quietly(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with serving(llama_folder(tmp_path_factory) / "bundle", stop_s=1.0) as own, ExitStack() as opened:
        for _ in range(4):  # together more than a second's work
            one = opened.enter_context(socket.create_connection((own.host, own.port)))
            body = json.dumps({"model": "bundle", "prompt": [PROMPT] * 64, "max_tokens": 200}).encode()
            one.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        while b"nestforge_generating 8.0" not in own.ask("GET", "/metrics")[2]:
            sleep(0.05)
        own.process.send_signal(signal.SIGTERM)
        _, said = own.process.communicate(timeout=60)
    assert (own.process.returncode, said) == (0, "")
