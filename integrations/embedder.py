"""One submodel of a bundle that makes vectors of texts, and of their tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError
from ..optional import needed
from ..runtime.answer import Answer
from ..runtime.exits.choice import OFF
from ..runtime.inputs.arrays import Array
from ..runtime.inputs.text import Encoded
from ..runtime.model import ElasticModel
from ..runtime.retrieval.identity import embedding_output
from ..runtime.texts import Texts
from .embeddings import SENTENCE_EMBEDDING, TOKEN_EMBEDDINGS, OutputValue, rows_of_tokens
from .text_model import TextModel, listed

# The least that torch.nn.functional.normalize divides by.
_LEAST_LENGTH = 1e-12


class Asked(NamedTuple):
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
        self._texts = Texts(self.model.bundle)
        self._pooled = None if manifest.text is None else manifest.text.pooled
        self.truncate_dim = truncate_dim
        try:
            self._output = embedding_output(manifest)
            self._width(None)
        except InputError:
            self.close()
            raise

    def inferred(self, texts: list[Any], asked: Asked, show_progress: bool = False) -> Any:
        """The answer to what is ``asked``: vectors ``[N, width]`` float32, or the tokens ``[tokens, T]`` of each text,
        or a dict of arrays for each. Raises InputError."""
        vectors, rows = np.empty((len(texts), asked.width), np.float32), list[Any]([None] * len(texts))
        tokens = None if asked.output_value == SENTENCE_EMBEDDING else self._token_output()
        for part, answer in self._batches(texts, asked, show_progress):
            vectors[part] = answer[self._output.name][:, : asked.width]
            if tokens is not None:
                read = self._encoded([texts[number] for number in part], answer.prompt)
                for number, row in zip(part, rows_of_tokens(answer[tokens], read, self._pooled), strict=True):
                    rows[number] = {**row, **self._stated(answer.prompt)}
        if tokens is None:
            if asked.normalized:
                vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), _LEAST_LENGTH)
            return vectors
        if asked.output_value == TOKEN_EMBEDDINGS:
            return [row[TOKEN_EMBEDDINGS] for row in rows]
        return [{**row, SENTENCE_EMBEDDING: vector} for row, vector in zip(rows, vectors, strict=True)]

    def _batches(self, texts: list[Any], asked: Asked, show_progress: bool) -> Iterator[tuple[Array, Answer]]:
        if texts:
            yield from self._answers(
                texts,
                truncate=True,
                batch_size=asked.batch_size,
                show_progress=show_progress,
                prompt=asked.prompt,
                prompt_name=asked.prompt_name,
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
        full = int(self._output.dims[1])
        truncate_dim = self.truncate_dim if truncate_dim is None else truncate_dim
        if truncate_dim is None:
            return full
        if type(truncate_dim) is not int or not 0 < truncate_dim <= full:
            raise InputError(f"truncate_dim: expected 1 to {full}, got {truncate_dim!r:.80}")
        return truncate_dim
