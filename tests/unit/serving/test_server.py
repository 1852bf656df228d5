"""``nestforge serve`` as a process of its own, asked by clients of others: tritonclient, openai, and plain sockets."""

import asyncio
import json
import re
import shutil
import signal
import socket
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import nestforge
import numpy as np
import openai
import pytest
import tritonclient.http as triton
from nestforge.bucket import Bucket
from nestforge.runtime.inputs.arrays import random_feeds
from nestforge.serving.app import client_of
from nestforge.serving.server import JoinedWrites
from nestforge.serving.server import _bound as bound_to
from support.commands import error_of, usage_of
from support.exit_bundles import exits_manifest, requests, write_exits_bundle
from support.latencies import latency
from support.servers import Running, serving
from support.small_bundle import HIDDEN, reference

TOKEN = "known-to-both"  # noqa: S105  (of a server of this test)
TEXTS = ["a nest of models", "models", "a nest"]


@pytest.fixture(scope="module")
def server(tiny_bundle: Path, exits_bundle: Path) -> Iterator[Running]:
    with serving(tiny_bundle, exits_bundle) as running:
        yield running


def arrays(rows: int, steps: int) -> dict[str, Any]:
    ids = np.random.default_rng(rows * steps).integers(0, 16, (rows, steps))
    return {"input_ids": ids, "attention_mask": np.ones((rows, steps), np.int64)}


def tensors(feeds: dict[str, Any], binary: bool) -> list[Any]:
    found = []
    for name, array in feeds.items():
        found.append(triton.InferInput(name, list(array.shape), "INT64"))
        found[-1].set_data_from_numpy(array, binary_data=binary)
    return found


@pytest.mark.parametrize("binary", [True, False])
def test_tritons_client_gets_the_models_answers(server: Running, tiny_bundle: Path, binary: bool) -> None:
    client = triton.InferenceServerClient(server.address)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny", "1")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    metadata = client.get_model_metadata("tiny")
    assert metadata["inputs"][0] == {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]}
    assert metadata["outputs"][1] == {"name": "total", "datatype": "FP32", "shape": [-1, HIDDEN]}
    for rows, steps in ((1, 5), (2, 16), (5, 3)):
        feeds = arrays(rows, steps)
        outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("total", "hidden")]
        for asked, width in (({}, 32), ({"submodel": "S"}, 16), ({"deadline_ms": 10_000.0}, 32)):
            result = client.infer("tiny", tensors(feeds, binary), outputs=outputs, parameters=asked, request_id="7")
            expected = reference(width, feeds["input_ids"], feeds["attention_mask"])
            for name in ("total", "hidden"):
                np.testing.assert_allclose(result.as_numpy(name), expected[name], atol=1e-4, rtol=1e-5)
            response = result.get_response()
            assert response["id"] == "7"
            assert response["parameters"]["submodel"] == f"ffn{width}"
            assert response["parameters"]["reason"]
    client.close()


def test_the_openai_client_gets_embeddings(server: Running, tiny_bundle: Path) -> None:
    with nestforge.load(tiny_bundle) as model:
        expected = model(TEXTS)["total"]
    client = openai.OpenAI(base_url=f"http://{server.address}/v1", api_key="none", max_retries=0)
    assert [one.id for one in client.models.list()] == ["tiny", "exits"]
    for form in ("float", "base64"):
        found = client.embeddings.create(model="tiny", input=TEXTS, encoding_format=form)
        vectors = [
            np.frombuffer(__import__("base64").b64decode(one.embedding), "<f4") if form == "base64" else one.embedding
            for one in found.data
        ]
        np.testing.assert_allclose(vectors, expected, atol=1e-4, rtol=1e-5)
    by_default = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=5)
    np.testing.assert_allclose(by_default.data[0].embedding, expected[0, :5], atol=1e-4, rtol=1e-5)
    assert by_default.usage.total_tokens == 6
    small = client.embeddings.with_raw_response.create(model="tiny", input="a", extra_body={"submodel": "S"})
    assert small.headers["nestforge-submodel"] == "ffn16"
    assert small.headers["nestforge-reason"] == "submodel S requested"
    with pytest.raises(openai.NotFoundError, match="no model 'other'; there is tiny, exits") as unknown:
        client.embeddings.create(model="other", input="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="dimensions: expected 1 to 16, got 17"):
        client.embeddings.create(model="tiny", input="a", dimensions=17)
    with pytest.raises(openai.BadRequestError, match="expected a text or a list of texts"):
        client.embeddings.create(model="tiny", input=[[1, 2]])
    client.close()


def test_the_routes_of_text_embeddings_inference(server: Running, tiny_bundle: Path) -> None:
    with nestforge.load(tiny_bundle) as model:
        expected = model(TEXTS)["total"]
    unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    for before in ("", "/models/tiny"):
        np.testing.assert_allclose(
            server.ask("POST", f"{before}/embed", {"inputs": TEXTS})[2], unit, atol=1e-4, rtol=1e-5
        )
    raw = server.ask("POST", "/embed", {"inputs": TEXTS[0], "normalize": False})[2]
    np.testing.assert_allclose(raw, expected[:1], atol=1e-4, rtol=1e-5)
    asked = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}}
    np.testing.assert_allclose(server.ask("POST", "/similarity", asked)[2], unit[1:] @ unit[0], atol=1e-4, rtol=1e-5)
    ((first, *_, last),) = server.ask("POST", "/tokenize", {"inputs": "a nest"})[2]
    assert first == {"id": 1, "text": "[CLS]", "special": True, "start": 0, "stop": 0}
    assert last["id"] == 2
    bare = server.ask("POST", "/tokenize", {"inputs": "a nest", "add_special_tokens": False})[2]
    assert [token["text"] for token in bare[0]] == ["a", "nest"]
    info = server.ask("GET", "/info")[2]
    assert (info["model_id"], info["max_input_length"]) == ("tiny", 16)
    status, _, said = server.ask("POST", "/embed", {"inputs": []})
    assert (status, said["error_type"]) == (422, "validation")


@pytest.mark.parametrize(
    ("path", "body", "unit"),
    [
        pytest.param("/", {"inputs": TEXTS}, True, id="huggingface_hub-1.33.0"),
        pytest.param("/models/tiny", {"inputs": TEXTS[0]}, True, id="huggingface_hub-1.33.0-one"),
        pytest.param("/", {"inputs": TEXTS, "truncate": True}, True, id="langchain-huggingface-1.2.3"),
        pytest.param("/embed", {"inputs": TEXTS, "truncate": True}, True, id="llama-index-0.6.0"),
        pytest.param("/", {"inputs": TEXTS, "normalize": False, "truncate": True}, False, id="haystack-3.1.0"),
    ],
)
def test_requests_that_clients_of_text_embeddings_inference_were_seen_to_send(
    server: Running, tiny_bundle: Path, path: str, body: dict[str, Any], unit: bool
) -> None:
    with nestforge.load(tiny_bundle) as model:
        expected = model(body["inputs"])["total"]
    if unit:
        expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    status, _, found = server.ask("POST", path, body)
    assert status == 200, found
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-5)


def test_only_the_end_of_a_text_is_cut(server: Running) -> None:
    long = {"inputs": "nest " * 99, "truncate": True}
    assert server.ask("POST", "/", {**long, "truncation_direction": "Right"})[0] == 200
    status, _, said = server.ask("POST", "/", {**long, "truncation_direction": "left"})
    assert status == 422
    assert said["error"] == "truncation_direction: expected right, for the end of a text is cut, got 'left'"


def test_rows_say_where_they_left(server: Running, exits_bundle: Path) -> None:
    with nestforge.load(exits_bundle) as model:
        specs = {spec.name: spec for spec in model.inputs}
        answer_inputs = random_feeds(model.inputs, Bucket(1, 8))
        expected = model(answer_inputs)
    given = [
        {
            "name": name,
            "datatype": {"int64": "INT64", "float32": "FP32"}[specs[name].dtype],
            "shape": list(a.shape),
            "data": a.tolist(),
        }
        for name, a in answer_inputs.items()
    ]
    status, headers, said = server.ask("POST", "/v2/models/exits/infer", {"inputs": given})
    assert status == 200
    assert headers["nestforge-exit"] == said["parameters"]["exit"] == ",".join(map(str, expected.exits.layer))


def test_clients_at_once_get_what_each_would_get_alone(tmp_path: Path) -> None:
    """Rows of them join between segments, by chance."""
    figures = [latency(e.id, 0.0, 100.0 + e.bucket.batch) for e in exits_manifest().engines]
    bundle = write_exits_bundle(tmp_path / "exits.bundle", latencies=figures)
    each = [requests([1 + seed % 16] * (1 + seed % 3), seed=seed) for seed in range(48)]

    def asked(feeds: dict[str, Any]) -> tuple[str, list[Any], list[Any]]:
        given = [
            {"name": name, "datatype": "INT64", "shape": list(array.shape), "data": array.ravel().tolist()}
            for name, array in feeds.items()
        ]
        status, headers, said = running.ask("POST", "/v2/models/exits/infer", {"inputs": given})
        assert status == 200, said
        found = {one["name"]: one["data"] for one in said["outputs"]}
        return headers["nestforge-exit"], found["logits"], found["entropy"]

    with serving(bundle) as running, ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(asked, each))
    with nestforge.load(bundle) as model:
        for feeds, (left, logits, entropy) in zip(each, answers, strict=True):
            alone = model(feeds)
            assert left == ",".join(map(str, alone.exits.layer))
            assert logits == alone.outputs["logits"].ravel().tolist()
            assert entropy == alone.outputs["entropy"].tolist()


GOOD = {"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]}
MASK = {"name": "attention_mask", "datatype": "INT64", "shape": [1, 2], "data": [1, 1]}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "body: not JSON"),
        (b'{"inputs": [], "inputs": []}', "body: not JSON"),
        (b"[" * 100_000, "body: not JSON"),
        (b"[]", "body: expected a JSON object, got list"),
        (b"\xff", "body: not JSON"),
        ({"inputs": [GOOD]}, "inputs input_ids: expected exactly attention_mask, input_ids"),
        ({"inputs": [GOOD, GOOD]}, "input input_ids: stands twice"),
        ({"inputs": [{**GOOD, "datatype": "FP99"}, MASK]}, "input input_ids: datatype 'FP99'; expected one of FP32, "),
        ({"inputs": [{**GOOD, "shape": [1, -2]}, MASK]}, "input input_ids: expected a shape of positive sizes"),
        ({"inputs": [{**GOOD, "shape": [1] * 33}, MASK]}, "expected a shape of positive sizes, 32 at most"),
        ({"inputs": [{**GOOD, "data": [1]}, MASK]}, "input input_ids: expected 2 values of int64 as data"),
        ({"inputs": [{**GOOD, "data": [1.5, 2]}, MASK]}, "input input_ids: expected 2 values of int64 as data"),
        ({"inputs": [{**GOOD, "data": [[1], [2, 3]]}, MASK]}, "input input_ids: expected 2 values of int64 as data"),
        ({"inputs": [{**GOOD, "data": [1, 99]}, MASK]}, "input input_ids: values 1..99, expected 0..15"),
        ({"inputs": [GOOD, MASK], "outputs": [{"name": "no"}]}, "output 'no': there is hidden, total"),
        (
            {"inputs": [GOOD, MASK], "outputs": [{"name": "total"}] * 1000},
            "outputs: 1000 names; expected each of hidden, total at most once",
        ),
        (
            {"inputs": [GOOD, MASK], "parameters": {"deadline_ms": -1}},
            "deadline_ms: expected a positive number, got -1",
        ),
        ({"inputs": [GOOD, MASK], "parameters": {"submodel": 3}}, "submodel: expected a name, got 3"),
        ({"inputs": [GOOD, MASK], "parameters": {"submodel": "no"}}, "no"),
        ({"inputs": [GOOD, MASK], "parameters": {"task": "no"}}, "no task 'no'"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_one_line(server: Running, body: Any, said: str) -> None:
    status, _, found = server.ask("POST", "/v2/models/tiny/infer", body)
    assert status == 400, found
    assert said in found["error"]
    assert server.ask("POST", "/v2/models/tiny/infer", {"inputs": [GOOD, MASK]})[0] == 200


def test_binary_tensors_that_do_not_add_up_are_refused(server: Running) -> None:
    raw = np.array([[1, 1]], np.int64).tobytes()
    one = {"datatype": "INT64", "shape": [1, 2], "parameters": {"binary_data_size": 16}}
    head = json.dumps({"inputs": [{"name": "input_ids", **one}, {"name": "attention_mask", **one}]}).encode()
    length = {"Inference-Header-Content-Length": str(len(head))}
    for tail, status in ((raw * 2, 200), (raw, 400), (raw * 3, 400), (b"", 400)):
        assert server.ask("POST", "/v2/models/tiny/infer", head + tail, **length)[0] == status
    for wrong in ("x", "-1", "99999999", "9" * 5000):
        assert server.ask("POST", "/v2/models/tiny/infer", head, **{"Inference-Header-Content-Length": wrong})[0] == 400


def test_sizes_names_versions_and_encodings_have_the_protocols_errors(server: Running) -> None:
    assert server.ask("POST", "/v2/models/tiny/infer", b" " * (2 << 20))[0] == 413
    assert server.ask("GET", "/v2/models/no")[0] == 404
    assert server.ask("GET", "/v2/models/tiny/versions/2")[0] == 404
    assert server.ask("GET", "/nowhere")[::2] == (404, {"error": "no route GET /nowhere", "error_type": "validation"})
    assert server.ask("GET", "/v2/models/tiny/config")[::2] == (404, {"error": "no route GET /v2/models/tiny/config"})
    assert server.ask("GET", "/v1/files")[2]["error"]["message"] == "no route GET /v1/files"
    assert server.ask("DELETE", "/v2/models/tiny/infer")[0] == 405
    assert server.ask("POST", "/embed", b"{}", content_encoding="gzip")[0] == 415
    body = {"inputs": [GOOD, MASK], "parameters": {"submodel": "S"}}
    status, _, said = server.ask("POST", "/v2/models/tiny/infer", body, nestforge_submodel="XL")
    assert (status, said["error"]) == (400, "submodel: stands in a header and in the body; expected once")
    status, headers, _ = server.ask("POST", "/embed", {"inputs": "a"}, nestforge_budget="edge")
    assert (status, headers["nestforge-submodel"]) == (200, "ffn16")


def test_a_deadline_that_cannot_be_kept_is_refused_with_the_time_that_it_would_need(server: Running) -> None:
    status, headers, said = server.ask("POST", "/embed", {"inputs": "a", "deadline_ms": 1e-9})
    assert status == 429
    assert said["error_type"] == "overloaded"
    assert float(headers["nestforge-needs-ms"]) > 0
    assert headers["retry-after"] == "1"


def test_slow_and_silent_clients_keep_nobody_out(server: Running) -> None:
    with ExitStack() as opened:

        def connected(sent: bytes) -> socket.socket:
            one = opened.enter_context(socket.create_connection((server.host, server.port), timeout=30))
            one.sendall(sent)
            return one

        silent = [connected(b"") for _ in range(100)]
        slow = connected(b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")
        endless = connected(b"GET /info HTTP/1.1\r\nx: ")
        assert server.ask("POST", "/embed", {"inputs": "a"})[0] == 200
        assert slow.recv(100).startswith(b"HTTP/1.1 408")
        for one in (*silent, endless):
            assert one.recv(1) == b""
        large = connected(b"GET / HTTP/1.1\r\n")
        with pytest.raises(OSError, match=r"Broken pipe|reset by peer"):
            large.sendall(b"".join(b"x: " + b"y" * 4096 + b"\r\n" for _ in range(10_000)))
    assert server.ask("POST", "/embed", {"inputs": "a"})[0] == 200


def test_a_client_that_reads_nothing_loses_its_answer(tiny_bundle: Path) -> None:
    body = json.dumps({"inputs": "a nest " * 60_000}).encode()
    asked = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    with serving(tiny_bundle, write_s=0.2) as own, socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect((own.host, own.port))
        silent.sendall(asked + body)
        while b'protocol="tei",status="200"' not in own.ask("GET", "/metrics")[2]:
            sleep(0.1)
        sleep(0.5)
        found = b""
        with suppress(ConnectionResetError):
            while part := silent.recv(1 << 20):
                found += part
    length = re.search(rb"content-length: (\d+)", found)
    assert length
    assert 0 < len(found) < int(length[1])


def test_a_client_that_goes_away_leaves_the_queue(server: Running) -> None:
    for _ in range(20):
        with socket.create_connection((server.host, server.port)) as gone:
            gone.sendall(b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n" + b'{"inputs": "a"}')
    assert server.ask("POST", "/embed", {"inputs": "a"})[0] == 200
    assert "nestforge_waiting 0.0" in server.ask("GET", "/metrics")[2].decode()


def test_requests_together_get_their_own_answers_and_are_counted(server: Running, tiny_bundle: Path) -> None:
    each = [arrays(1, 1 + n % 8) for n in range(64)]

    def ask(feeds: dict[str, Any]) -> Any:
        given = [{"name": n, "datatype": "INT64", "shape": list(a.shape), "data": a.tolist()} for n, a in feeds.items()]
        body = {"inputs": given, "parameters": {"deadline_ms": 60_000}}
        return server.ask("POST", "/v2/models/tiny/infer", body)

    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(ask, each))
    for feeds, (status, _, said) in zip(each, found, strict=True):
        assert status == 200
        width = int(said["parameters"]["submodel"][3:])
        hidden, total = (np.reshape(one["data"], one["shape"]) for one in said["outputs"])
        expected = reference(width, feeds["input_ids"], feeds["attention_mask"])
        np.testing.assert_allclose(hidden, expected["hidden"], atol=1e-4, rtol=1e-5)
        np.testing.assert_allclose(total, expected["total"], atol=1e-4, rtol=1e-5)
    text = server.ask("GET", "/metrics")[2].decode()
    assert 'nestforge_answers_total{model="tiny",submodel="ffn32"}' in text
    assert "nestforge_waiting 0.0" in text
    assert "nestforge_running 0.0" in text


def test_texts_of_megabytes_stop_nobody(tiny_bundle: Path) -> None:
    with serving(tiny_bundle, body_bytes=64 << 20, read_s=60.0) as own, ThreadPoolExecutor(1) as threads:
        for text, status, said in (
            ("a nest " * (9 << 20), 413, "body: expected at most 8388608 bytes"),
            ("a nest " * (1 << 20), 413, "input: 7340032 letters; expected at most 1048576 in a request"),
            ("a nest " * 140_000, 422, "text 0: 280002 tokens, the largest bucket takes 16"),
        ):
            body, longest = json.dumps({"inputs": text}).encode(), 0.0
            started = perf_counter()
            large = threads.submit(own.ask, "POST", "/embed", body)
            while not large.done():
                asked = perf_counter()
                assert own.ask("GET", "/v2/health/live")[0] == 200
                longest = max(longest, perf_counter() - asked)
            assert large.result()[0] == status
            assert said in large.result()[2]["error"]
            # What is refused unread is refused within one of them.
            assert status == 413 or longest < (perf_counter() - started) / 2, "it waited for the text"


def test_a_list_of_many_rows_lets_others_between_its_runs(server: Running, tiny_bundle: Path) -> None:
    texts = [" ".join(["nest"] * (1 + n % 14)) for n in range(2000)]
    with nestforge.load(tiny_bundle) as model:
        expected = model(texts[:100])["total"]
    with ThreadPoolExecutor(1) as threads:
        for stated in ({}, {"deadline_ms": 60_000}):
            many = threads.submit(server.ask, "POST", "/embed", {"inputs": texts, "normalize": False, **stated})
            while "nestforge_running 0.0" in server.ask("GET", "/metrics")[2].decode():
                assert not many.done()
            for _ in range(3):
                assert server.ask("POST", "/embed", {"inputs": "a", "deadline_ms": 20_000})[0] == 200
            assert not many.done()
            status, headers, vectors = many.result()
            assert (status, headers["nestforge-submodel"]) == (200, "ffn32")
            np.testing.assert_allclose(vectors[:100], expected, atol=1e-4, rtol=1e-5)
            assert len(vectors) == 2000


def test_a_token_is_wanted_where_there_is_one(tiny_bundle: Path) -> None:
    with serving(tiny_bundle, token=TOKEN) as own:
        assert own.ask("GET", "/v2/health/ready")[0] == 200
        assert own.ask("GET", "/v2")[::2] == (401, {"error": "expected the token as Authorization: Bearer TOKEN"})
        assert own.ask("GET", "/v1/models")[2]["error"]["code"] == "invalid_api_key"
        assert own.ask("GET", "/health")[0] == 200
        assert own.ask("GET", "/v2", authorization="Bearer other")[0] == 401
        assert own.ask("GET", "/v2", authorization=f"Bearer {TOKEN}")[0] == 200


def test_a_client_that_fills_the_server_leaves_a_part_to_others_and_to_health(tiny_bundle: Path) -> None:
    head = b"POST /embed HTTP/1.1\r\nhost: x\r\nnestforge-client: flood\r\ncontent-length: 5\r\n\r\n"
    with serving(tiny_bundle, read_s=30.0) as own, ExitStack() as opened:
        for _ in range(300):  # whose bodies do not come
            one = opened.enter_context(socket.create_connection((own.host, own.port)))
            one.sendall(head)
        status, headers, said = own.ask("POST", "/v1/embeddings", {"model": "tiny"}, nestforge_client="flood")
        assert (status, headers["retry-after"], said["error"]["code"]) == (429, "1", "overloaded")
        assert own.ask("POST", "/v2/models/tiny/infer", b"", nestforge_client="flood")[0] == 503
        assert own.ask("POST", "/embed", {"inputs": "a"}, nestforge_client="other")[0] == 200
        assert own.ask("GET", "/v2/health/live", nestforge_client="flood")[0] == 200


def test_a_signal_stops_it_cleanly_and_the_log_is_json(tiny_bundle: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with serving(tiny_bundle) as own:
            assert own.ask("POST", "/embed", {"inputs": "a"})[0] == 200
            own.process.send_signal(number)
            out, said = own.process.communicate(timeout=60)
            assert (own.process.returncode, said) == (0, "")
            (line,) = map(json.loads, out.splitlines())
            assert (line["path"], line["status"], line["submodel"]) == ("/embed", 200, "ffn32")


def test_a_bundle_that_is_written_to_is_refused_and_others_go_on(own_bundle: Path, exits_bundle: Path) -> None:
    with serving(own_bundle, exits_bundle) as running:
        weights = own_bundle / "weights.safetensors"
        weights.write_bytes(b"\0" * weights.stat().st_size)
        status, _, said = running.ask("POST", "/models/own/embed", {"inputs": "a"})
        assert (status, said["error"]) == (424, "model own cannot answer; the server's log says why")
        assert running.ask("GET", "/v2/models/own/ready")[0] == 503
        assert running.ask("GET", "/v2/models/exits/ready")[0] == 200


def test_a_bundle_that_is_replaced_goes_on_from_what_was_opened(tiny_bundle: Path, own_bundle: Path) -> None:
    with serving(own_bundle, tiny_bundle) as running:
        shutil.rmtree(own_bundle)  # before any request
        shutil.copytree(tiny_bundle, own_bundle)
        status, _, vectors = running.ask("POST", "/models/own/embed", {"inputs": "a"})
        assert (status, vectors) == (200, running.ask("POST", "/models/tiny/embed", {"inputs": "a"})[2])


def test_a_port_in_use_and_names_that_clash_are_one_line(tiny_bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert error_of("serve", tiny_bundle, "--port", port) == (
            f"127.0.0.1:{port}: cannot be bound (Address already in use); choose another `--host` or `--port`"
        )
    assert "a model's name is its folder's" in error_of("serve", tiny_bundle, tiny_bundle)
    for option, value in (("--patience-ms", "inf"), ("--stop-s", "nan")):
        line = usage_of("serve", tiny_bundle, option, value)
        assert f"Invalid value for '{option}': {value} is not a finite number" in line


def test_a_log_that_nobody_reads_stops_no_request(tiny_bundle: Path) -> None:
    with serving(tiny_bundle) as own:
        path = "/v2/health/live?" + "x" * 150  # more than a pipe and the lines that wait hold
        connection = HTTPConnection(own.host, own.port, timeout=60)
        for _ in range(6000):
            connection.request("GET", path)
            assert connection.getresponse().read() == b""
        connection.close()


def test_what_is_bound_says_that_it_is_tcp_so_that_answers_are_not_delayed() -> None:
    with bound_to("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP


@pytest.mark.parametrize(
    ("address", "name", "client"),
    [("127.0.0.1", "a", "a"), ("::1", "a", "a"), ("127.0.0.1", "", "127.0.0.1"), ("10.0.0.7", "a", "10.0.0.7")],
)
def test_a_client_is_called_by_a_name_from_this_host_alone(address: str, name: str, client: str) -> None:
    assert client_of({"type": "http", "client": (address, 1)}, name) == client


class Sent:
    """A transport that keeps what each of its calls sent."""

    def __init__(self) -> None:
        self.calls: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.calls.append(data)

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.calls.append(b"".join(parts))

    def close(self) -> None:
        self.calls.append("closed")


def test_the_head_of_an_answer_leaves_with_its_body_and_nothing_waits_for_company() -> None:
    async def sent(*turns: Sequence[bytes | None]) -> list[bytes | str]:
        """What is sent where ``turns`` of the loop write these, or close for None."""
        transport = Sent()
        joined = JoinedWrites(transport, asyncio.get_running_loop())
        for turn in turns:
            for data in turn:
                joined.close() if data is None else joined.write(data)
            await asyncio.sleep(0)
        return transport.calls

    assert asyncio.run(sent([b"head", b"body"])) == [b"headbody"]
    assert asyncio.run(sent([b"head"], [b"part"], [b"", b"end", b"!"])) == [b"head", b"part", b"end!"]
    assert asyncio.run(sent([b"1", b"2", b"3"], [b"4", b"5"])) == [b"12", b"3", b"45"]
    assert asyncio.run(sent([b"head", None])) == [b"head", "closed"]
