"""KServe v2, the Open Inference Protocol, over HTTP: health, metadata, and inference with JSON or binary tensors."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..errors import InputError
from ..runtime.inputs.arrays import Array
from .app import HEADERS, OWN_HEADERS, Handler, Problem, Protocol, Service, document_of
from .served import Asked, Reply, Served, Work, stated

PROTOCOL = Protocol("kserve", lambda _kind, text, _status: {"error": text})
VERSION = "1"
_TYPES = {
    "float32": "FP32",
    "float16": "FP16",
    "int64": "INT64",
    "int32": "INT32",
    "int8": "INT8",
    "uint8": "UINT8",
    "bool": "BOOL",
}
_DTYPES = {name: np.dtype(dtype) for dtype, name in _TYPES.items()}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_COMPACT = json.JSONEncoder(separators=(",", ":"))
# Bytes that are read, and numbers that are written, in the time in which a letter is tokenised.
_BYTES, _NUMBERS = 64, 16
# Dimensions of a shape: more than any model has. The product of as many as a body holds takes very long.
_MOST_SIZES = 32
# Heads of at most so many bytes are remembered.
_SHORT = 2048
_MOST_DIGITS = 20  # of a length
LENGTH = "inference-header-content-length"


async def live(_: Service, __: Request) -> Response:
    return Response()


async def ready(service: Service, request: Request) -> Response:
    """Readiness of the server, or of one model."""
    name = request.path_params.get("model")
    is_ready = service.is_ready and not (name is not None and _served(service, request).is_broken)
    return Response(status_code=200 if is_ready else 503)


async def server_metadata(_: Service, __: Request) -> Response:
    return JSONResponse({"name": "nestforge", "version": VERSION, "extensions": ["binary_tensor_data"]})


async def metadata(service: Service, request: Request) -> Response:
    served = _served(service, request)
    manifest = served.model.bundle.manifest
    inputs, outputs = (
        [
            {
                "name": spec.name,
                "datatype": _TYPES[spec.dtype],
                "shape": [dim if isinstance(dim, int) else -1 for dim in spec.dims],
            }
            for spec in specs
        ]
        for specs in (manifest.inputs, manifest.outputs)
    )
    return JSONResponse(
        {
            "name": served.name,
            "versions": [VERSION],
            "platform": "nestforge",
            "inputs": inputs,
            "outputs": outputs,
        }
    )


class _Tensor(NamedTuple):
    """An input as its request states it: ``size`` bytes behind the head, or ``data`` in it for None."""

    name: str
    dtype: np.dtype[Any]
    shape: list[int]
    numbers: int
    size: Any
    data: Any


class _Head(NamedTuple):
    """The head of a request, checked: ``wanted`` are outputs, and whether each goes behind the answer's head; ``own``
    is what the answer repeats."""

    tensors: Sequence[_Tensor]
    wanted: Sequence[tuple[str, bool]]
    choice: tuple[Asked, float | None]
    own: Mapping[str, Any]


async def infer(service: Service, request: Request) -> Response:
    served = _served(service, request)
    raw = await service.body(request)
    scope, text, rest = request.scope, raw, b""
    if (length := scope[HEADERS].get(LENGTH.encode())) is not None:
        if not length.isdigit() or len(length) > _MOST_DIGITS or int(length) > len(raw):
            shown = length.decode("latin-1")
            raise InputError(f"{LENGTH}: expected at most the body's {len(raw)} bytes, got {shown!r:.80}")
        text, rest = raw[: int(length)], raw[int(length) :]
    own = tuple(scope[OWN_HEADERS].items())
    head: _Head
    if len(text) <= _SHORT:  # clients ask in the same words, so what was read of them is remembered
        head = served.remembered(_short_head, text, own)
    else:
        head = await service.desk.aside(len(text) // _BYTES, _head, served, await service.parsed(text), own)
    feeds = await service.desk.aside(len(text) // _BYTES, _feeds, head.tensors, rest)
    reply = await service.reply(request, served, Work(*head.choice, feeds))
    numbers = sum(array.size for array in reply.outputs.values())
    return await service.desk.aside(numbers // _NUMBERS, _response, served, head, reply)


def _short_head(served: Served, text: bytes, own: tuple[tuple[str, str], ...]) -> _Head:
    return _head(served, document_of(text), own)


def _head(served: Served, document: Mapping[str, Any], own: Iterable[tuple[str, str]]) -> _Head:
    """Raises InputError."""
    parameters = _object(document, "parameters")
    choice = served.choice(stated(dict(own), parameters), parameters.get("dimensions"))
    is_binary = parameters.get("binary_data_output", False)
    wanted = [
        (one["name"], bool(_object(one, "parameters").get("binary_data", is_binary)))
        for one in _wanted(served, document)
    ]
    repeated = {"id": document["id"]} if "id" in document else {}
    return _Head(_tensors(document), wanted, choice, repeated)


def _served(service: Service, request: Request) -> Served:
    served, version = service.model(request.path_params["model"]), request.path_params.get("version", VERSION)
    if version != VERSION:
        raise Problem("unknown", f"model {served.name}: no version {version!r:.80}; there is {VERSION}")
    return served


def _object(holder: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = holder.get(name) or {}
    if not isinstance(found, dict):
        raise InputError(f"{name}: expected an object, got {type(found).__name__}")
    return found


def _list(holder: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = holder.get(name) or []
    if not isinstance(found, list) or not all(
        isinstance(one, dict) and isinstance(one.get("name"), str) for one in found
    ):
        raise InputError(f"{name}: expected a list of objects with a name")
    return found


def _tensors(document: Mapping[str, Any]) -> list[_Tensor]:
    """Raises InputError."""
    found: dict[str, _Tensor] = {}
    for tensor in _list(document, "inputs"):
        name, datatype, shape = tensor["name"][:80], tensor.get("datatype"), tensor.get("shape")
        if name in found:
            raise InputError(f"input {name}: stands twice")
        dtype = _DTYPES.get(datatype) if isinstance(datatype, str) else None
        if dtype is None:
            raise InputError(f"input {name}: datatype {datatype!r:.80}; expected one of {', '.join(_DTYPES)}")
        if not (
            isinstance(shape, list)
            and len(shape) <= _MOST_SIZES
            and all(type(size) is int and 0 < size < 2**31 for size in shape)
        ):
            raise InputError(
                f"input {name}: expected a shape of positive sizes, {_MOST_SIZES} at most, got {shape!r:.80}"
            )
        size = _object(tensor, "parameters").get("binary_data_size")
        found[name] = _Tensor(name, dtype, shape, math.prod(shape), size, tensor.get("data"))
    return [*found.values()]


def _feeds(tensors: Sequence[_Tensor], rest: bytes) -> dict[str, Array]:
    """The tensors of a request; those in binary form follow one another in ``rest``. Raises InputError."""
    feeds: dict[str, Array] = {}
    start = 0
    for name, dtype, shape, count, size, data in tensors:
        if size is None:
            feeds[name] = _from_json(name, data, dtype, shape)
            continue
        expected = count * dtype.itemsize
        if type(size) is not int or size != expected or start + size > len(rest):
            raise InputError(
                f"input {name}: expected {expected} bytes for {_NAMES[dtype]} {shape}, stated are {size!r:.80}, "
                f"{len(rest) - start} follow"
            )
        feeds[name] = np.frombuffer(rest, dtype, count, start).reshape(shape)
        start += size
    if start != len(rest):
        raise InputError(f"body: {len(rest) - start} bytes behind the last tensor; expected none")
    return feeds


def _from_json(name: str, data: Any, dtype: np.dtype[Any], shape: list[int]) -> Array:
    try:
        found = np.asarray(data)
    except (ValueError, OverflowError):
        found = np.asarray(None)
    kinds = {"f": "iuf", "i": "iu", "u": "iu", "b": "b"}[dtype.kind]
    if found.dtype.kind not in kinds or found.size != math.prod(shape):
        raise InputError(f"input {name}: expected {math.prod(shape)} values of {dtype} as data, got {data!r:.80}")
    if dtype.kind in "iu" and not (np.iinfo(dtype).min <= found.min() and found.max() <= np.iinfo(dtype).max):
        raise InputError(f"input {name}: values {found.min()}..{found.max()} do not fit {dtype}")
    return np.ascontiguousarray(found.astype(dtype).reshape(shape))


def _wanted(served: Served, document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The outputs that a request names, all where it names none. Raises InputError."""
    there = [spec.name for spec in served.model.bundle.manifest.outputs]
    found = _list(document, "outputs") or [{"name": name} for name in there]
    names = [one["name"] for one in found]
    for name in names:
        if name not in there:
            raise InputError(f"output {name!r:.80}: there is {', '.join(there)}")
    if len(set(names)) < len(names):
        raise InputError(f"outputs: {len(names)} names; expected each of {', '.join(there)} at most once")
    return found


def _response(served: Served, head: _Head, reply: Reply) -> Response:
    outputs, parts = [], []
    for name, is_binary in head.wanted:
        array = reply.outputs[name]
        tensor: dict[str, Any] = {"name": name, "datatype": _NAMES[array.dtype], "shape": list(array.shape)}
        if is_binary:
            parts.append(array.tobytes())
            tensor["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            tensor["data"] = [value if math.isfinite(value) else None for value in array.ravel().tolist()]
        outputs.append(tensor)
    said: dict[str, Any] = {"submodel": reply.submodel, "reason": reply.reason}
    if reply.exits is not None:
        said["exit"] = ",".join(map(str, reply.exits))
    answer: dict[str, Any] = {
        "model_name": served.name,
        "model_version": VERSION,
        "parameters": said,
        "outputs": outputs,
        **head.own,
    }
    text = _COMPACT.encode(answer).encode()
    if not parts:
        return Response(text, media_type="application/json")
    response = Response(b"".join([text, *parts]), media_type="application/octet-stream")
    response.raw_headers.append((LENGTH.encode(), str(len(text)).encode()))
    return response


# The one that comes most often first: routes are tried in turn.
ROUTES: list[tuple[str, str, Handler]] = [
    *(
        (method, f"/v2/models/{{model}}{version}{end}", handler)
        for version in ("", "/versions/{version}")
        for method, end, handler in (("POST", "/infer", infer), ("GET", "", metadata), ("GET", "/ready", ready))
    ),
    ("GET", "/v2", server_metadata),
    ("GET", "/v2/health/live", live),
    ("GET", "/v2/health/ready", ready),
]
