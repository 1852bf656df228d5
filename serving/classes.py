"""Texts to classes as text-embeddings-inference has it: ``/predict``, of texts or of pairs, and ``/rerank``, of a model
that scores a query and a text together; and ``/``, which its clients ask without saying what the model does, and
``/info``, which says it."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..bundle.roles import embedding_of
from ..errors import InputError
from ..integrations.text_classifier import SCORES, checked_labels, class_output
from ..runtime.inputs.arrays import Array
from ..runtime.inputs.text import Text
from .app import Handler, Service
from .embeddings import MOST_TEXTS, flag, named, output_of, tei_embed, texts_of
from .served import Served


async def predict(service: Service, request: Request) -> Response:
    document = await service.document(request)
    served, inputs = named(service, request), document.get("inputs")
    is_batch = isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], list)
    texts = [_text(one) for one in texts_of("inputs", inputs, list)] if is_batch else [_text(inputs)]
    scores = await _scores(service, request, served, document, texts)
    labels = checked_labels(None, scores.shape[1])

    def shown() -> Response:
        found = [
            sorted(
                ({"score": score, "label": label} for score, label in zip(row, labels, strict=True)),
                key=lambda one: -one["score"],
            )
            for row in scores.tolist()
        ]
        return JSONResponse(found if is_batch else found[0])

    return await service.desk.aside(scores.size, shown)


async def info(service: Service, request: Request) -> Response:
    """The first model, with its kind as text-embeddings-inference says it."""
    served, limits = named(service, request), service.limits
    return JSONResponse(
        {
            "model_id": served.name,
            "model_dtype": ", ".join(served.model.precisions),
            "model_type": _kind(served),
            "max_concurrent_requests": limits.requests,
            "max_input_length": served.model.longest_sequence(1),
            "max_client_batch_size": MOST_TEXTS,
            "submodels": [one.id for one in served.model.submodels],
        }
    )


def _kind(served: Served) -> dict[str, Any]:
    """An embedding model, a reranker (of one class) or a classifier; none of them is empty."""
    manifest = served.model.bundle.manifest
    if embedding_of(manifest) is not None:
        return {"embedding": {"pooling": manifest.text.embedding if manifest.text else None}}
    try:
        classes = _classes(served)
    except InputError:
        return {}
    labels = dict(enumerate(checked_labels(None, classes)))
    maps = {"id2label": labels, "label2id": {label: number for number, label in labels.items()}}
    return {"reranker" if classes == 1 else "classifier": maps}


async def root(service: Service, request: Request) -> Response:
    """The model's task: vectors, else scores of texts beside a query, else classes."""
    served = named(service, request)
    if embedding_of(served.model.bundle.manifest) is not None:
        return await tei_embed(service, request)
    return await (rerank if _classes(served) == 1 else predict)(service, request)


async def rerank(service: Service, request: Request) -> Response:
    document = await service.document(request)
    served, query = named(service, request), document.get("query")
    if not isinstance(query, str):
        raise InputError(f"query: expected a text, got {query!r:.80}")
    texts, shows = texts_of("texts", document.get("texts")), flag(document, "return_text", False)
    if (classes := _classes(served)) != 1:
        raise InputError(f"model {served.name}: scores {classes} classes; a model that reranks scores one")
    scores = (await _scores(service, request, served, document, [(query, text) for text in texts]))[:, 0].tolist()
    found = [{"index": at, "score": scores[at]} for at in sorted(range(len(texts)), key=lambda at: -scores[at])]
    return JSONResponse([{**one, "text": texts[one["index"]]} if shows else one for one in found])


def _classes(served: Served) -> int:
    """Raises InputError for a model that does not classify."""
    return int(class_output(served.model.bundle.manifest, f"model {served.name}").dims[1])


def _text(given: Any) -> Text:
    """A text, or a pair of them."""
    parts = [given] if isinstance(given, str) else given
    if not isinstance(parts, list) or len(parts) not in (1, 2) or not all(isinstance(one, str) for one in parts):
        raise InputError(
            f"inputs: expected a text, a list of one text or of a pair, or a list of such lists, got {given!r:.80}"
        )
    return parts[0] if len(parts) == 1 else (parts[0], parts[1])


async def _scores(
    service: Service, request: Request, served: Served, document: Mapping[str, Any], texts: list[Text]
) -> Array:
    """``[N, C]``: of one class its probability, of several theirs, or logits where the request wants them raw. Raises
    InputError for a model that does not classify."""
    output = class_output(served.model.bundle.manifest, f"model {served.name}").name
    logits, _ = await output_of(service, request, served, document, texts, output)
    if flag(document, "raw_scores", False):
        return logits
    return SCORES["sigmoid" if logits.shape[1] == 1 else "softmax"](logits)


ROUTES: list[tuple[str, str, Handler]] = [
    ("POST", "", root),
    ("GET", "/info", info),
    ("POST", "/predict", predict),
    ("POST", "/rerank", rerank),
]
