"""The Open Inference Protocol over gRPC: each call is brought to the HTTP routes of ``kserve.py`` in this process, so
that token, limits, the queue, errors and the access log are theirs; tensors stay binary. The message of a call without
the token is not read."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError
from starlette.types import Message
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server

from ..errors import InputError
from .app import Guard
from .kserve import LENGTH

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
# The field of a tensor's contents where these are not raw bytes.
_CONTENTS = {
    "FP32": "fp32_contents",
    "INT64": "int64_contents",
    "INT32": "int_contents",
    "INT8": "int_contents",
    "UINT8": "uint_contents",
    "BOOL": "bool_contents",
}
# Beside a call's tensors: names, shapes, and what gRPC adds.
_HEAD_BYTES = 1 << 20
# Calls at once, and numbers of a call that are not raw: they become JSON.
_MOST_CALLS, _MOST_VALUES = 512, 1 << 16
# Methods that need no token.
_HEALTH = frozenset({"ServerLive", "ServerReady"})


class _Refused(Exception):
    def __init__(self, status: int, text: str, headers: dict[str, str]) -> None:
        super().__init__(text)
        self.status, self.headers = status, headers


class _Calls(GRPCInferenceServiceServicer):  # type: ignore[misc]  # generated code has no types
    """Each method is a call of the protocol; ``app`` has the routes."""

    def __init__(self, app: Guard) -> None:
        self._app = app

    async def ServerLive(self, _: Any, context: Any) -> Any:
        return pb.ServerLiveResponse(live=await self._is(context, "/v2/health/live"))

    async def ServerReady(self, _: Any, context: Any) -> Any:
        return pb.ServerReadyResponse(ready=await self._is(context, "/v2/health/ready"))

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return pb.ModelReadyResponse(ready=await self._is(context, f"{_model(request.name, request.version)}/ready"))

    async def ServerMetadata(self, _: Any, context: Any) -> Any:
        found, _ = await self._asked(context, "GET", "/v2")
        return pb.ServerMetadataResponse(**found)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        found, _ = await self._asked(context, "GET", _model(request.name, request.version))
        return pb.ModelMetadataResponse(**found)

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        path = f"{_model(request.model_name, request.model_version)}/infer"
        found, rest = await self._asked(context, "POST", path, request)
        outputs, raw, start = [], [], 0
        for tensor in found.pop("outputs"):
            size = tensor.pop("parameters")["binary_data_size"]
            raw.append(rest[start : start + size])
            outputs.append(tensor)
            start += size
        said = {name: pb.InferParameter(string_param=value) for name, value in found.pop("parameters").items()}
        return pb.ModelInferResponse(**found, parameters=said, outputs=outputs, raw_output_contents=raw)

    async def refuse(self, method: str, context: Any) -> None:
        """Ends a call without the token, which the routes refuse and note."""
        await self._asked(context, "POST", f"/v2{method}")

    async def _is(self, context: Any, path: str) -> bool:
        try:
            await self._call(context, "GET", path)
        except _Refused as refusal:
            if refusal.status != 503:
                await _abort(context, refusal)
            return False
        return True

    async def _asked(self, context: Any, method: str, path: str, request: Any = None) -> tuple[dict[str, Any], bytes]:
        """The JSON object of an answer, and the bytes behind it. Ends the call where it is refused."""
        try:
            body = [] if request is None else [json.dumps(_document(request)).encode(), *request.raw_input_contents]
            headers, found = await self._call(context, method, path, *body)
        except _Refused as refusal:
            await _abort(context, refusal)
            raise
        length = int(headers.get(LENGTH, len(found)))
        return json.loads(found[:length]), found[length:]

    async def _call(self, context: Any, method: str, path: str, *body: bytes) -> tuple[dict[str, str], bytes]:
        given = [(name, value) for name, value in context.invocation_metadata() if _is_passed(name)]
        if body:
            given.append((LENGTH, str(len(body[0]))))
        kind, _, address = context.peer().partition(":")
        host = unquote(address.rpartition(":")[0]).strip("[]") if kind.startswith("ip") else "127.0.0.1"
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(name.encode(), value.encode()) for name, value in given],
            "query_string": b"",
            "client": (host, 0),
        }
        sent = [b"".join(body)]
        status, headers, parts = 499, dict[str, str](), list[bytes]()

        async def receive() -> Message:
            if sent:
                return {"type": "http.request", "body": sent.pop(), "more_body": False}
            return await asyncio.Future[Message]()  # until the call is over, or its client gone

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers.update({name.decode(): value.decode() for name, value in message["headers"]})
            parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        found = b"".join(parts)
        if status != 200:
            raise _Refused(status, json.loads(found)["error"] if found else "not ready", headers)
        return headers, found


class _Messages(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Calls without the token end before their message is read, and those of no message with what was expected."""

    def __init__(self, app: Guard, calls: _Calls) -> None:
        self._app, self._calls = app, calls

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        given = dict(details.invocation_metadata).get("authorization", "")
        if details.method.rpartition("/")[2] in _HEALTH or self._app.knows(given.encode()):
            return _read_here(await continuation(details))

        async def refuse(_: Any, context: Any) -> None:
            await self._calls.refuse(details.method, context)

        return grpc.stream_unary_rpc_method_handler(refuse)  # as a stream, which waits for no message


def _read_here(call: Any) -> Any:
    """``call``, which reads its message itself: what gRPC answers to one that cannot be read names a class of Python's.
    None, and streams, which are not served, are left as they are."""
    if call is None or call.unary_unary is None:
        return call

    async def answered(raw: bytes, context: Any) -> Any:
        try:
            message = call.request_deserializer(raw)
        except DecodeError:
            await _abort(context, _Refused(400, "message: expected protobuf's bytes of this call's request", {}))
        return await call.unary_unary(message, context)

    return grpc.unary_unary_rpc_method_handler(answered, response_serializer=call.response_serializer)


def _is_passed(name: str) -> bool:
    return name == "authorization" or name.startswith("nestforge-")


async def _abort(context: Any, refusal: _Refused) -> None:
    told = tuple(
        (name, value) for name, value in refusal.headers.items() if name in ("retry-after", "nestforge-needs-ms")
    )
    await context.abort(_CODES.get(refusal.status, grpc.StatusCode.INTERNAL), str(refusal), told)


def _model(name: str, version: str) -> str:
    """The path of a model; no name that there is has a slash."""
    name, version = (part.replace("/", "%2F") for part in (name, version))
    return f"/v2/models/{name}" + (f"/versions/{version}" if version else "")


def _contents(tensor: Any) -> Any:
    return getattr(tensor.contents, _CONTENTS.get(tensor.datatype, "fp32_contents"))


def _document(request: Any) -> dict[str, Any]:
    """A call's head as HTTP has it. Tensors are raw bytes, or values for a request without any."""
    inputs, raw = [], request.raw_input_contents
    values = sum(len(tensor.shape) + (0 if raw else len(_contents(tensor))) for tensor in request.inputs)
    if values > _MOST_VALUES:
        raise _Refused(400, f"inputs: {values} values and sizes; send more than {_MOST_VALUES} values raw", {})
    for number, tensor in enumerate(request.inputs):
        found: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if raw:
            found["parameters"] = {"binary_data_size": len(raw[number]) if number < len(raw) else 0}
        else:
            found["data"] = list(_contents(tensor))
        inputs.append(found)
    parameters = {name: _value(name, one) for name, one in request.parameters.items()}
    outputs = [{"name": one.name} for one in request.outputs]
    document = {"inputs": inputs, "outputs": outputs, "parameters": {**parameters, "binary_data_output": True}}
    return {**document, "id": request.id} if request.id else document


def _value(name: str, parameter: Any) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None:
        raise _Refused(400, f"parameter {name:.80}: expected a value, got none", {})
    return getattr(parameter, choice)


async def start(app: Guard, host: str, port: int, body_bytes: int) -> tuple[int, Callable[[float], Awaitable[None]]]:
    """Binds ``port`` (0: any that is free) and answers calls by ``app``; gives back the port, and what ends it within
    so many seconds. Raises InputError for a port that is taken."""
    most = ("grpc.max_receive_message_length", body_bytes + _HEAD_BYTES)
    options = [most, ("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)]
    calls = _Calls(app)
    server = grpc.aio.server(interceptors=[_Messages(app, calls)], options=options, maximum_concurrent_rpcs=_MOST_CALLS)
    add_GRPCInferenceServiceServicer_to_server(calls, server)
    try:
        bound = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except RuntimeError as failure:
        raise InputError(f"{host}:{port}: cannot be bound; choose another `host` or `grpc_port`") from failure
    await server.start()
    return bound, server.stop
