"""One submodel of a bundle that makes vectors of texts, and of their tokens."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ..bundle.roles import embedding_output
from ..errors import InputError
from ..optional import needed
from ..runtime.answer import Answer
from ..runtime.dimensions import normalized, required
from ..runtime.exits.choice import OFF
from ..runtime.inputs.arrays import Array
from ..runtime.inputs.text import Encoded
from ..runtime.model import ElasticModel
from .text_model import TextModel, listed


class TextRequest(NamedTuple):
    """A request for texts: vectors of ``width`` numbers, ``normalized`` to length 1 or not, or another
    ``output_value``; in batches of at most ``batch_size`` texts behind a prompt, as in a call of the model."""

    output_value: OutputValue | None
    width: int
    normalized: bool = False
    batch_size: int | None = None
    prompt: str | None = None
    prompt_name: str | None = None


class Embedder(TextModel):
    """``bundle``, ``budget`` and ``submodel`` are those of ``TextModel``; vectors have their first ``truncate_dim``
    numbers, None: all. Raises InputError for a bundle without an embedding."""

    def __init__(
        self,
        bundle: str | os.PathLike[str] | ElasticModel,
        *,
        budget: str | None = None,
        submodel: str | None = None,
        truncate_dim: int | None = None,
    ) -> None:
        super().__init__(bundle, budget=budget, submodel=submodel)
        manifest = self.model.bundle.manifest
        self._texts = self.model.texts
        self._pooled = None if manifest.text is None else manifest.text.pooled
        self.truncate_dim = truncate_dim
        try:
            self._output = embedding_output(manifest)
            self._width(None)
        except InputError:
            self.close()
            raise

    def inferred(self, texts: list[Any], request: TextRequest, show_progress: bool = False) -> Any:
        """The answer to what is requested: vectors ``[N, width]`` float32, or the tokens ``[tokens, T]`` of each text,
        or a dict of arrays for each. Raises InputError."""
        vectors, rows = np.empty((len(texts), request.width), np.float32), list[Any]([None] * len(texts))
        tokens = None if request.output_value == SENTENCE_EMBEDDING else self._token_output()
        for part, answer in self._batches(texts, request, show_progress):
            vectors[part] = answer[self._output.name][:, : request.width]
            if tokens is not None:
                read = self._encoded([texts[number] for number in part], answer.prompt)
                for number, row in zip(part, rows_of_tokens(answer[tokens], read, self._pooled), strict=True):
                    rows[number] = {**row, **self._stated(answer.prompt)}
        if tokens is None:
            return normalized(vectors) if request.normalized else vectors
        if request.output_value == TOKEN_EMBEDDINGS:
            return [row[TOKEN_EMBEDDINGS] for row in rows]
        return [{**row, SENTENCE_EMBEDDING: vector} for row, vector in zip(rows, vectors, strict=True)]

    def _batches(self, texts: list[Any], request: TextRequest, show_progress: bool) -> Iterator[tuple[Array, Answer]]:
        if texts:
            yield from self._answers(
                texts,
                truncate=True,
                batch_size=request.batch_size,
                show_progress=show_progress,
                prompt=request.prompt,
                prompt_name=request.prompt_name,
                exits=OFF,
            )

    def preprocess(self, inputs: list[str], prompt: str | None = None) -> dict[str, Any]:
        """The engines' inputs for texts, tensors ``[texts, longest text]``, behind ``prompt`` or behind none."""
        texts, single = listed(inputs)
        if single:
            raise InputError("inputs: expected a list of texts, got a text")
        if not texts:
            return {}
        torch = needed("torch", "preprocess", "torch", "ask the model for texts")
        feeds = self._encoded(texts, prompt or "").feeds
        tensors = {name: torch.from_numpy(array) for name, array in feeds.items() if name != self._pooled}
        return {**tensors, **self._stated(prompt or "")}

    def tokenize(self, texts: list[str]) -> dict[str, Any]:
        """The older name of ``preprocess``."""
        return self.preprocess(texts)

    @contextmanager
    def truncate_embeddings(self, truncate_dim: int | None) -> Iterator[None]:
        """Within it vectors have their first ``truncate_dim`` numbers."""
        before, self.truncate_dim = self.truncate_dim, truncate_dim
        try:
            yield
        finally:
            self.truncate_dim = before

    @contextmanager
    def truncate_sentence_embeddings(self, truncate_dim: int | None) -> Iterator[None]:
        """The older name of ``truncate_embeddings``."""
        with self.truncate_embeddings(truncate_dim):
            yield

    def _token_output(self) -> str:
        """The output that has the tokens as they are pooled. Raises InputError where there is none."""
        specs = self.model.bundle.manifest.outputs
        found = {spec.name for spec in specs if spec.dims[:2] == ("batch", "sequence")}
        for name in (TOKEN_EMBEDDINGS, "last_hidden_state"):
            if name in found:
                return name
        known = ", ".join(f"{spec.name} {list(spec.dims)}" for spec in specs)
        raise InputError(f"output_value: the bundle has no tokens among its outputs, which are {known}")

    def _encoded(self, texts: list[str], prompt: str) -> Encoded:
        return self._texts.encode(texts, lambda _: self.max_seq_length, True, prompt, None)[0]

    def _stated(self, prompt: str) -> dict[str, Any]:
        """Facts that the library gives beside arrays: the kind of input, and the tokens of a prompt."""
        length = {"prompt_length": self._texts.encoder().tokens_of(prompt)} if prompt else {}
        return {"modality": "text", **length}

    def _width(self, truncate_dim: int | None) -> int:
        cut = self.truncate_dim if truncate_dim is None else truncate_dim
        if cut is None:
            return int(self._output.dims[1])
        return required(self._output, cut, "truncate_dim", self.model.bundle.manifest.submodel(self.submodel))


OutputValue = Literal["sentence_embedding", "token_embeddings"]
OUTPUT_VALUES: tuple[OutputValue, ...] = get_args(OutputValue)
SENTENCE_EMBEDDING, TOKEN_EMBEDDINGS = OUTPUT_VALUES


def converted(vectors: Array, single: bool, to_numpy: bool, to_tensor: bool) -> Any:
    """``vectors`` as ``encode`` is asked to return them. Raises InputError where torch is needed and missing."""
    if to_numpy and not to_tensor:
        return vectors[0] if single else vectors
    torch = needed("torch", "convert_to_tensor, or not convert_to_numpy", "torch", "take numpy arrays")
    tensor = torch.from_numpy(vectors)
    if single:
        return tensor[0]
    return tensor if to_tensor else list(tensor)


def rows_of_tokens(tokens: Array, read: Encoded, left_out: str | None) -> Iterator[dict[str, Any]]:
    """A dict for each row of ``tokens`` ``[B, S, T]``, without padding: its tokens, and the inputs that were ``read``
    but the one called ``left_out``."""
    for row, length in enumerate(read.lengths):
        inputs = {name: array[row, :length].copy() for name, array in read.feeds.items() if name != left_out}
        yield {**inputs, TOKEN_EMBEDDINGS: tokens[row, :length].copy()}


def of_each_text(found: Sequence[Any], precision: Precision | None) -> list[Any]:
    """Tokens ``[tokens, T]`` of each text, or a dict of arrays, as the library returns them: tensors, and arrays of
    tokens that are quantised, by ranges of all of them. Raises InputError for a dict in another precision."""
    is_quantised = precision not in (None, "float32")
    if any(isinstance(row, Mapping) for row in found):
        if is_quantised:
            raise InputError(f"precision {precision!r}: expected None or 'float32' with the output_value None")
        torch = needed("torch", "output_value None", "torch", "ask for sentence_embedding")
        return [
            {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in row.items()}
            for row in found
        ]
    if is_quantised and found:
        ends = np.cumsum([len(row) for row in found])[:-1]
        return list(np.split(quantised(np.concatenate(found), precision), ends))
    torch = needed("torch", f"output_value {TOKEN_EMBEDDINGS!r}", "torch", f"ask for {SENTENCE_EMBEDDING}")
    return [torch.from_numpy(row) for row in found]


Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# Vectors below which the library warns that ranges taken from them are unsteady.
_FEW = 100
_STEPS = 255
_LOGGER = logging.getLogger("nestforge")


def quantised(vectors: Array, precision: Precision | None) -> Array:
    """``vectors`` ``[N, D]`` float32 in ``precision``, unchanged for float32 and None.

    In int8 and uint8, ``[N, D]``, each dimension is cut into 255 steps between the least and the largest number that it
    has in ``vectors``, which one line of the logger ``nestforge`` says of few. In binary (int8) and ubinary (uint8),
    ``[N, ceil(D / 8)]``, a bit says whether a number is above 0. Raises InputError for the range of a single vector.
    """
    if precision is None or precision == "float32":
        return vectors
    if precision in ("binary", "ubinary"):
        bits: Array = np.packbits(vectors > 0, axis=-1)
        return bits if precision == "ubinary" else (bits - np.uint8(128)).view(np.int8)
    if len(vectors) == 1:
        raise InputError(
            f"precision {precision!r}: a single vector has no ranges; encode several at once, or give ranges of your "
            "own to sentence_transformers.util.quantize_embeddings"
        )
    if not len(vectors):
        return vectors.astype(precision)
    if len(vectors) < _FEW:
        _LOGGER.warning("precision %s: the ranges are those of %d vectors alone", precision, len(vectors))
    least = vectors.min(axis=0)
    step = (vectors.max(axis=0) - least) / _STEPS
    steps: Array = np.clip(np.floor((vectors - least) / np.where(step == 0, np.float32(1), step)), 0, _STEPS)
    return steps.astype(np.uint8) if precision == "uint8" else (steps - 128).astype(np.int8)
