"""The interface of sentence-transformers' ``SentenceTransformer`` over a compiled bundle, as version 6.2 has it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import numpy as np

from ..errors import InputError
from ..optional import needed
from ..runtime.exits.choice import OFF
from ..runtime.inputs.arrays import Array
from ..runtime.model import ElasticModel
from ..runtime.retrieval.identity import embedding_output
from ..strict import nearest
from .text_model import TextModel, listed

Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
# As in sentence-transformers, every model has these; the model's own take their place.
_PROMPTS = {"query": "", "document": ""}
# What torch.nn.functional.normalize divides by at least.
_LEAST_LENGTH = 1e-12


class SentenceEncoder(TextModel):
    """Texts to vectors, where a ``SentenceTransformer`` is expected: by its evaluators, or by code written for it.

    ``bundle``, ``budget`` and ``submodel`` are those of ``TextModel``: one submodel makes all vectors, so that they can
    be compared. ``similarity_fn_name`` is what ``similarity`` computes. Raises InputError for a bundle without an
    embedding.
    """

    def __init__(
        self,
        bundle: str | os.PathLike[str] | ElasticModel,
        *,
        budget: str | None = None,
        submodel: str | None = None,
        similarity_fn_name: Similarity = "cosine",
    ) -> None:
        known = get_args(Similarity)
        if similarity_fn_name not in known:
            raise InputError(
                f"similarity_fn_name {similarity_fn_name!r:.80}{nearest(str(similarity_fn_name)[:80], known)}"
            )
        super().__init__(bundle, budget=budget, submodel=submodel)
        self.similarity_fn_name = similarity_fn_name
        self.model_card_data = EvaluationResults()
        text = self.model.bundle.manifest.text
        self.prompts: Mapping[str, str] = {**_PROMPTS, **((text and text.prompts) or {})}
        try:
            self._output = embedding_output(self.model.bundle.manifest)
        except InputError:
            self.close()
            raise

    def encode(
        self,
        inputs: str | Iterable[str] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        output_value: str | None = "sentence_embedding",
        precision: str | None = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Any = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        *,
        sentences: str | Iterable[str] | None = None,
    ) -> Any:
        """The embeddings of texts, ``[N, D]`` float32 in their order, or ``[D]`` of a single text.

        Texts are sorted by their tokens into batches as large as the engines take, of at most ``batch_size`` texts. A
        text of more tokens than ``max_seq_length`` is cut there, as in sentence-transformers; here one line of the
        logger ``nestforge`` says how many were, and ``truncated`` counts them. ``prompt``, else the prompt called
        ``prompt_name``, else the model's default one stands before each. ``truncate_dim`` keeps the first numbers of
        each vector, ``normalize_embeddings`` then brings it to length 1. The result is an array; with
        ``convert_to_tensor`` a tensor, without ``convert_to_numpy`` a list of tensors, both on the processor.
        ``show_progress_bar`` draws a bar on stderr, by default where that logger's level is INFO or DEBUG.
        ``sentences`` is the older name of ``inputs``.

        Raises InputError for what is no text, for a ``precision`` other than float32, an ``output_value`` other than
        sentence_embedding, and a ``device`` other than cpu: where engines run is said when the bundle is loaded.
        """
        if (inputs is None) == (sentences is None):
            raise InputError("inputs: expected a text or texts, as inputs or by the older name sentences")
        texts, single = listed(sentences if inputs is None else inputs)
        width = self._width(truncate_dim)
        _require("output_value", output_value, ("sentence_embedding",), "engines return no other")
        quantise = "quantise the result with sentence_transformers.util.quantize_embeddings"
        _require("precision", precision, (None, "float32"), quantise)
        where = "the engines run where the bundle was loaded: nestforge.load(bundle, provider=...)"
        _require("device", device if device is None else str(device), (None, "cpu"), where)
        if show_progress_bar is None:
            show_progress_bar = logging.getLogger("nestforge").getEffectiveLevel() in (logging.INFO, logging.DEBUG)
        if prompt is None and prompt_name is not None:
            prompt = self.prompts.get(prompt_name)
        vectors = np.empty((len(texts), width), np.float32)
        if texts:
            for part, answer in self._answers(
                texts,
                truncate=True,
                batch_size=batch_size,
                show_progress=show_progress_bar,
                prompt=prompt,
                prompt_name=prompt_name if prompt is None else None,
                exits=OFF,
            ):
                vectors[part] = answer[self._output.name][:, :width]
        if normalize_embeddings:
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), _LEAST_LENGTH)
        return _converted(vectors, single, convert_to_numpy, convert_to_tensor)

    def encode_query(
        self,
        inputs: str | Iterable[str] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        **options: Any,
    ) -> Any:
        """As ``encode``, behind the prompt called ``query`` unless another is asked for."""
        if prompt is None and prompt_name is None:
            prompt_name = "query"
        return self.encode(inputs, prompt_name, prompt, **options)

    def encode_document(
        self,
        inputs: str | Iterable[str] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        **options: Any,
    ) -> Any:
        """As ``encode``, behind the prompt called ``document`` unless another is asked for."""
        if prompt is None and prompt_name is None:
            prompt_name = "document"
        return self.encode(inputs, prompt_name, prompt, **options)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """A tensor ``[N, M]``: every embedding of the first with every one of the second, by ``similarity_fn_name``.
        Raises InputError where sentence-transformers is not installed."""
        return self._similarity_function("to_similarity_fn")(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """A tensor ``[N]``: each embedding of the first with the same one of the second. Raises as ``similarity``."""
        return self._similarity_function("to_similarity_pairwise_fn")(embeddings1, embeddings2)

    def get_embedding_dimension(self) -> int:
        """How many numbers a vector has."""
        return self._width(None)

    def get_sentence_embedding_dimension(self) -> int:
        """The older name of ``get_embedding_dimension``."""
        return self._width(None)

    def _width(self, truncate_dim: int | None) -> int:
        full = int(self._output.dims[1])
        if truncate_dim is None:
            return full
        if type(truncate_dim) is not int or not 0 < truncate_dim <= full:
            raise InputError(f"truncate_dim: expected 1 to {full}, got {truncate_dim!r:.80}")
        return truncate_dim

    def _similarity_function(self, kind: str) -> Any:
        library = needed(
            "sentence_transformers.util", "similarity", "sentence-transformers", "compare the arrays with numpy"
        )
        return getattr(library.SimilarityFunction, kind)(self.similarity_fn_name)


class EvaluationResults:
    """What evaluators of sentence-transformers found: they hand their figures to a model's ``model_card_data``."""

    def __init__(self) -> None:
        self.eval_results_dict: dict[Any, dict[str, Any]] = {}

    def set_evaluation_metrics(self, evaluator: Any, metrics: Mapping[str, Any], epoch: int = 0, step: int = 0) -> None:
        """Keeps the latest figures of ``evaluator``; nothing is trained here, so ``epoch`` and ``step`` say nothing."""
        del epoch, step
        self.eval_results_dict[evaluator] = dict(metrics)


def _require(name: str, value: object, allowed: tuple[object, ...], why: str) -> None:
    if value not in allowed:
        expected = " or ".join(repr(each) for each in allowed)
        raise InputError(f"{name} {value!r:.80}: expected {expected}; {why}")


def _converted(vectors: Array, single: bool, to_numpy: bool, to_tensor: bool) -> Any:
    """``vectors`` as ``encode`` is asked to return them."""
    if to_numpy and not to_tensor:
        return vectors[0] if single else vectors
    torch = needed("torch", "convert_to_tensor, or not convert_to_numpy", "torch", "take numpy arrays")
    tensor = torch.from_numpy(vectors)
    if single:
        return tensor[0]
    return tensor if to_tensor else list(tensor)
