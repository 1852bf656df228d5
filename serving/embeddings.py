"""Texts to vectors as two other services have them: OpenAI's ``/v1/embeddings``, and the routes of
text-embeddings-inference (``/embed``, ``/similarity``, ``/tokenize``)."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..errors import InputError
from ..runtime.dimensions import normalized
from ..runtime.inputs.arrays import Array
from ..runtime.inputs.text import Text
from .app import OWN_HEADERS, Handler, Protocol, Service
from .served import Served, Work, stated

MOST_TEXTS = 2048
# Numbers that are written in the time in which a letter is tokenised.
_NUMBERS = 4
_CODES = {"unknown": "model_not_found", "unauthorized": "invalid_api_key", "overloaded": "overloaded"}
OPENAI = Protocol(
    "openai",
    lambda kind, text, status: {
        "error": {
            "message": text,
            "type": "invalid_request_error" if status < 429 else "server_error",
            "param": None,
            "code": _CODES.get(kind),
        }
    },
    {"overloaded": 429},
)
TEI = Protocol(
    "tei",
    lambda kind, text, _status: {
        "error": text,
        "error_type": {"overloaded": "overloaded", "internal": "backend", "broken": "backend"}.get(kind, "validation"),
    },
    {"overloaded": 429, "invalid": 422, "broken": 424, "internal": 424},
)


async def openai_embeddings(service: Service, request: Request) -> Response:
    document = await service.document(request)
    served = service.model(document.get("model"))
    form = document.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise InputError(f"encoding_format: expected float or base64, got {form!r:.80}")
    vectors, tokens = await _vectors(service, request, served, document, "input", document.get("input"))

    def shown() -> Response:
        rows = [
            base64.b64encode(r.astype("<f4").tobytes()).decode() if form == "base64" else r.tolist() for r in vectors
        ]
        data = [{"object": "embedding", "index": at, "embedding": row} for at, row in enumerate(rows)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "model": served.name, "data": data, "usage": usage})

    return await service.desk.aside(vectors.size // _NUMBERS, shown)


async def openai_models(service: Service, request: Request) -> Response:
    name = request.path_params.get("model")
    found = [{"id": one, "object": "model", "created": 0, "owned_by": "nestforge"} for one in service.served]
    if name is not None:
        return JSONResponse(next(one for one in found if one["id"] == service.model(name).name))
    return JSONResponse({"object": "list", "data": found})


async def tei_embed(service: Service, request: Request) -> Response:
    document = await service.document(request)
    served = named(service, request)
    vectors, _ = await _vectors(service, request, served, document, "inputs", document.get("inputs"))
    if flag(document, "normalize", True):
        vectors = normalized(vectors)
    return await service.desk.aside(vectors.size // _NUMBERS, lambda: JSONResponse(vectors.tolist()))


async def tei_similarity(service: Service, request: Request) -> Response:
    document = await service.document(request)
    inputs = document.get("inputs")
    if not isinstance(inputs, dict) or not isinstance(inputs.get("source_sentence"), str):
        raise InputError("inputs: expected an object with source_sentence and sentences")
    texts = [inputs["source_sentence"], *texts_of("sentences", inputs.get("sentences"))]
    own = document.get("parameters") or {}
    if not isinstance(own, dict):
        raise InputError(f"parameters: expected an object, got {own!r:.80}")
    vectors, _ = await _vectors(service, request, named(service, request), {**own, **document}, "inputs", texts)
    unit = normalized(vectors)
    return JSONResponse((unit[1:] @ unit[0]).tolist())


async def tei_tokenize(service: Service, request: Request) -> Response:
    document = await service.document(request)
    served, texts = named(service, request), texts_of("inputs", document.get("inputs"))
    special = flag(document, "add_special_tokens", True)
    with service.counted(request, served):
        return await service.desk.aside(service.letters("inputs", texts), _tokens, served, texts, special)


def _tokens(served: Served, texts: list[str], special: bool) -> Response:
    return JSONResponse(
        [
            [
                {"id": number, "text": text, "special": bool(special), "start": start, "stop": stop}
                for number, text, special, (start, stop) in zip(
                    row.ids, row.tokens, row.special_tokens_mask, row.offsets, strict=True
                )
            ]
            for row in served.tokenized(texts, special)
        ]
    )


def named(service: Service, request: Request) -> Served:
    """The model that the path names, else the first one."""
    return service.model(request.path_params.get("model", next(iter(service.served))))


def texts_of(name: str, given: Any, kind: type = str) -> list[Any]:
    """A list of texts, or of another ``kind``; a text is a list of one."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(one, kind) for one in texts):
        raise InputError(
            f"{name}: expected a text or a list of texts, got {given!r:.80}; tokens are of this model's tokenizer alone"
        )
    if len(texts) > MOST_TEXTS:
        raise InputError(f"{name}: expected at most {MOST_TEXTS} texts, got {len(texts)}")
    return texts


def flag(document: Mapping[str, Any], name: str, default: bool) -> bool:
    value = document.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InputError(f"{name}: expected true or false, got {value!r:.80}")
    return value


async def _vectors(
    service: Service, request: Request, served: Served, document: Mapping[str, Any], field: str, given: Any
) -> tuple[Array, int]:
    """Embeddings ``[N, D]`` of texts by one submodel, and the tokens of all."""
    return await output_of(service, request, served, document, texts_of(field, given), served.embedding)


async def output_of(
    service: Service,
    request: Request,
    served: Served,
    document: Mapping[str, Any],
    texts: Sequence[Text],
    output: str,
) -> tuple[Array, int]:
    """Answers of the model as ``output`` to texts, ``[N, D]`` float32, by one submodel, and the tokens of all."""
    found, dimensions = stated(request.scope[OWN_HEADERS], document), document.get("dimensions")
    if dimensions is not None and type(dimensions) is not int:
        raise InputError(f"dimensions: expected a whole number, got {dimensions!r:.80}")
    prompt_name = document.get("prompt_name")
    if prompt_name is not None and not isinstance(prompt_name, str):
        raise InputError(f"prompt_name: expected a name, got {prompt_name!r:.80}")
    truncate, side = flag(document, "truncate", False), document.get("truncation_direction")
    if side is not None and str(side).lower() != "right":
        raise InputError(f"truncation_direction: expected right, for the end of a text is cut, got {side!r:.80}")
    letters = service.letters("input", ("".join(text) for text in texts))
    with service.counted(request, served):
        encoded = await service.desk.aside(letters, served.encoded, texts, found, truncate, prompt_name)
    work = Work(*served.choice(found, dimensions), encoded.feeds, encoded.lengths)
    reply = await service.reply(request, served, work)
    return np.asarray(reply.outputs[output], np.float32), sum(encoded.lengths)


OPENAI_ROUTES: list[tuple[str, str, Handler]] = [
    ("POST", "/v1/embeddings", openai_embeddings),
    ("GET", "/v1/models", openai_models),
    ("GET", "/v1/models/{model}", openai_models),
]
TEI_ROUTES: list[tuple[str, str, Handler]] = [
    ("POST", "/embed", tei_embed),
    ("POST", "/similarity", tei_similarity),
    ("POST", "/tokenize", tei_tokenize),
]
