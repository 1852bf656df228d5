"""The protocol over gRPC, asked by tritonclient's client of it, beside the model in this process."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.errors import InputError
from nestforge.serving.server import ServeRequest, serve
from support.servers import Running, serving
from support.small_bundle import HIDDEN, reference

pytest.importorskip("grpc")  # which `serve` does without
triton = pytest.importorskip("tritonclient.grpc")

TOKEN = {"authorization": "Bearer known-to-both"}


@pytest.fixture(scope="module")
def server(tiny_bundle: Path, exits_bundle: Path) -> Iterator[Running]:
    with serving(tiny_bundle, exits_bundle, grpc_port=0) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with triton.InferenceServerClient(server.rpc) as found:
        yield found


def arrays(rows: int, steps: int) -> dict[str, Any]:
    ids = np.random.default_rng(rows * steps).integers(0, 16, (rows, steps))
    return {"input_ids": ids, "attention_mask": np.ones((rows, steps), np.int64)}


def tensors(feeds: dict[str, Any]) -> list[Any]:
    found = []
    for name, array in feeds.items():
        found.append(triton.InferInput(name, list(array.shape), "INT64"))
        found[-1].set_data_from_numpy(array)
    return found


def test_it_says_what_it_is(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny", "1")
    assert client.get_server_metadata().extensions == ["binary_tensor_data"]
    metadata = client.get_model_metadata("tiny")
    assert (metadata.name, metadata.versions, metadata.platform) == ("tiny", ["1"], "nestforge")
    assert (metadata.inputs[0].name, metadata.inputs[0].datatype, metadata.inputs[0].shape) == (
        "input_ids",
        "INT64",
        [-1, -1],
    )
    assert (metadata.outputs[1].name, metadata.outputs[1].shape) == ("total", [-1, HIDDEN])


def test_the_models_answers(client: Any) -> None:
    for rows, steps in ((1, 5), (2, 16), (5, 3)):
        feeds = arrays(rows, steps)
        for options, width in (
            ({}, 32),
            ({"parameters": {"submodel": "S"}}, 16),
            ({"headers": {"nestforge-submodel": "S"}}, 16),
            ({"parameters": {"deadline_ms": 10_000}}, 32),
        ):
            result = client.infer("tiny", tensors(feeds), request_id="7", **options)
            expected = reference(width, feeds["input_ids"], feeds["attention_mask"])
            for name in ("total", "hidden"):
                np.testing.assert_allclose(result.as_numpy(name), expected[name], atol=1e-4, rtol=1e-5)
            response = result.get_response()
            assert (response.id, response.model_name, response.model_version) == ("7", "tiny", "1")
            assert response.parameters["submodel"].string_param == f"ffn{width}"
            assert response.parameters["reason"].string_param
    only = client.infer("tiny", tensors(feeds), outputs=[triton.InferRequestedOutput("total")]).get_response()
    assert [one.name for one in only.outputs] == ["total"]


def test_values_in_place_of_bytes(server: Running) -> None:
    import grpc
    from tritonclient.grpc import service_pb2 as pb
    from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

    feeds = arrays(1, 4)
    given = [
        pb.ModelInferRequest.InferInputTensor(
            name=name, datatype="INT64", shape=[1, 4], contents=pb.InferTensorContents(int64_contents=array[0])
        )
        for name, array in feeds.items()
    ]
    with grpc.insecure_channel(server.rpc) as channel:
        found = GRPCInferenceServiceStub(channel).ModelInfer(pb.ModelInferRequest(model_name="tiny", inputs=given))
    expected = reference(32, feeds["input_ids"], feeds["attention_mask"])["total"]
    total = next(raw for one, raw in zip(found.outputs, found.raw_output_contents, strict=True) if one.name == "total")
    np.testing.assert_allclose(np.frombuffer(total, np.float32), expected[0], atol=1e-4, rtol=1e-5)
    unset = pb.ModelInferRequest(model_name="tiny", inputs=given, parameters={"deadline_ms": pb.InferParameter()})
    with grpc.insecure_channel(server.rpc) as channel, pytest.raises(grpc.RpcError) as refusal:
        GRPCInferenceServiceStub(channel).ModelInfer(unset)
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.value.details() == "parameter deadline_ms: expected a value, got none"
    for one in given:  # more in all, not in one of them
        one.contents.int64_contents.extend([1] * 2**15)
    with grpc.insecure_channel(server.rpc) as channel, pytest.raises(grpc.RpcError) as refusal:
        GRPCInferenceServiceStub(channel).ModelInfer(pb.ModelInferRequest(model_name="tiny", inputs=given))
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "65548 values and sizes; send more than 65536 values raw" in refusal.value.details()


@pytest.mark.parametrize(
    ("model", "version", "options", "code", "said"),
    [
        ("no", "", {}, "NOT_FOUND", "no model 'no'; there is tiny, exits"),
        ("tiny/infer", "", {}, "NOT_FOUND", "no model 'tiny%2Finfer'"),
        ("tiny", "2", {}, "NOT_FOUND", "model tiny: no version '2'; there is 1"),
        ("tiny", "", {"parameters": {"submodel": "no"}}, "INVALID_ARGUMENT", "no submodel 'no'"),
        ("tiny", "", {"headers": {"nestforge-deadline-ms": "1e-9"}}, "UNAVAILABLE", "no submodel answers"),
    ],
)
def test_what_does_not_fit_has_the_protocols_code_and_one_line(
    client: Any, model: str, version: str, options: dict[str, Any], code: str, said: str
) -> None:
    with pytest.raises(triton.InferenceServerException) as refusal:
        client.infer(model, tensors(arrays(1, 2)), model_version=version, **options)
    assert refusal.value.status() == f"StatusCode.{code}"
    assert said in refusal.value.message()


def test_a_message_that_is_none_is_refused_and_others_go_on(server: Running, client: Any) -> None:
    import grpc

    with grpc.insecure_channel(server.rpc) as channel:
        for method in ("ModelInfer", "ModelMetadata"):
            with pytest.raises(grpc.RpcError) as refusal:
                channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(b"\xff\xff\xff")
            assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert refusal.value.details() == ("message: expected protobuf's bytes of this call's request")
    assert client.is_server_ready()


def test_bytes_that_do_not_add_up_are_refused(client: Any) -> None:
    given = tensors(arrays(1, 2))
    given[0]._raw_content += b"\0" * 8
    with pytest.raises(triton.InferenceServerException, match="input input_ids: expected 16 bytes"):
        client.infer("tiny", given)


def test_token_limits_and_stop_are_those_of_http(tiny_bundle: Path) -> None:
    with serving(tiny_bundle, grpc_port=0, token="known-to-both") as own:  # noqa: S106  (of a server of this test)
        with triton.InferenceServerClient(own.rpc) as client:
            assert client.is_server_live()
            with pytest.raises(triton.InferenceServerException, match="expected the token") as refusal:
                client.infer("tiny", tensors(arrays(1, 2)))
            assert refusal.value.status() == "StatusCode.UNAUTHENTICATED"
            assert client.infer("tiny", tensors(arrays(1, 2)), headers=TOKEN).as_numpy("total") is not None
            with pytest.raises(triton.InferenceServerException):
                client.infer("tiny", tensors(arrays(8, 50_000)), headers=TOKEN)
        own.process.send_signal(signal.SIGTERM)
        out, said = own.process.communicate(timeout=60)
    assert (own.process.returncode, said) == (0, "")
    lines = list(map(json.loads, out.splitlines()))
    assert [line["status"] for line in lines if line["path"] == "/v2/models/tiny/infer"] == [200]
    assert [line["path"] for line in lines if line["status"] == 401] == [
        "/v2/inference.GRPCInferenceService/ModelInfer"
    ]


def test_a_port_in_use_is_one_line(server: Running, tiny_bundle: Path) -> None:
    with pytest.raises(InputError, match="cannot be bound; choose another `host` or `grpc_port`"):
        serve(ServeRequest([tiny_bundle], port=0, grpc_port=int(server.rpc.rpartition(":")[2])))
