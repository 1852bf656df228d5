"""The interface of sentence-transformers' ``SentenceTransformer`` over a compiled bundle, as version 6.2 has it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..errors import InputError
from ..optional import needed
from ..outside import library_errors
from ..runtime.model import ElasticModel
from ..strict import nearest
from .embedder import (
    OUTPUT_VALUES,
    PRECISIONS,
    SENTENCE_EMBEDDING,
    Embedder,
    OutputValue,
    Precision,
    TextRequest,
    converted,
    of_each_text,
    quantised,
)
from .text_model import listed

Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
# As in sentence-transformers, every model has these; the model's own take their place.
_PROMPTS = {"query": "", "document": ""}


class SentenceEncoder(Embedder):
    """Texts to vectors, where a ``SentenceTransformer`` is expected: by its evaluators, or by code written for it.

    ``bundle``, ``budget``, ``submodel`` and ``truncate_dim`` are those of ``Embedder``: one submodel makes all vectors,
    so that they can be compared. ``similarity_fn_name`` is what ``similarity`` computes. Raises InputError for a bundle
    without an embedding.
    """

    # Where vectors are returned.
    device = "cpu"

    def __init__(
        self,
        bundle: str | os.PathLike[str] | ElasticModel,
        *,
        budget: str | None = None,
        submodel: str | None = None,
        similarity_fn_name: Similarity = "cosine",
        truncate_dim: int | None = None,
    ) -> None:
        known = get_args(Similarity)
        if similarity_fn_name not in known:
            raise InputError(
                f"similarity_fn_name {similarity_fn_name!r:.80}{nearest(str(similarity_fn_name)[:80], known)}"
            )
        super().__init__(bundle, budget=budget, submodel=submodel, truncate_dim=truncate_dim)
        self.similarity_fn_name = similarity_fn_name
        self.model_card_data = EvaluationResults()
        text = self.model.bundle.manifest.text
        self.prompts: Mapping[str, str] = {**_PROMPTS, **((text and text.prompts) or {})}
        self.default_prompt_name = text and text.default_prompt

    def encode(
        self,
        inputs: str | Iterable[str] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        output_value: OutputValue | None = "sentence_embedding",
        precision: Precision | None = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Any = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        pool: ThisProcess | None = None,
        chunk_size: int | None = None,  # noqa: ARG002  (as the library has it)
        *,
        sentences: str | Iterable[str] | None = None,
        **options: Any,
    ) -> Any:
        """The embeddings of texts, ``[N, D]`` float32 in their order, or ``[D]`` of a single text.

        Texts are sorted by their tokens into batches as large as the engines take, of at most ``batch_size`` texts. A
        text of more tokens than ``max_seq_length`` is cut there, as in sentence-transformers; here one line of the
        logger ``nestforge`` says how many were, and ``truncated`` counts them. ``prompt``, else the prompt called
        ``prompt_name``, else the model's default one stands before each. ``truncate_dim`` keeps the first numbers of
        each vector, ``normalize_embeddings`` then brings it to length 1, and ``precision`` makes integers or bits of
        its numbers (``quantised``). The result is an array; with ``convert_to_tensor`` a tensor, without
        ``convert_to_numpy`` a list of tensors, both on the processor. With the ``output_value`` token_embeddings it is
        a list of a tensor ``[tokens, T]`` for each text, with None a list of a dict of everything known of it.
        ``pool``, a list as ``device`` and ``chunk_size`` change nothing (``ThisProcess``).
        ``show_progress_bar`` draws a bar on stderr, by default where that logger's level is INFO or DEBUG.
        ``sentences`` is the older name of ``inputs``; of further ``options`` a ``task`` changes nothing.

        Raises InputError for what is no text, for an unknown option or value, and a ``device`` other than cpu:
        where engines run is said when the bundle is loaded.
        """
        if (inputs is None) == (sentences is None):
            raise InputError("inputs: expected a text or texts, as inputs or by the older name sentences")
        texts, single = listed(sentences if inputs is None else inputs)
        _require("output_value", output_value, (*OUTPUT_VALUES, None))
        _require("precision", precision, (*PRECISIONS, None))
        _require_here(device)
        if not isinstance(pool, ThisProcess | None):
            raise InputError(f"pool: expected one of start_multi_process_pool, got {type(pool).__name__}")
        _refuse_options(options)
        if show_progress_bar is None:
            show_progress_bar = logging.getLogger("nestforge").getEffectiveLevel() in (logging.INFO, logging.DEBUG)
        if prompt is None and prompt_name is not None:
            prompt = self.prompts.get(prompt_name)
        named = prompt_name if prompt is None else None
        width = self._width(truncate_dim)
        request = TextRequest(output_value, width, normalize_embeddings, batch_size, prompt, named)
        found = self.inferred(texts, request, show_progress_bar)
        if output_value == SENTENCE_EMBEDDING:
            return converted(quantised(found, precision), single, convert_to_numpy, convert_to_tensor)
        rows = of_each_text(found, precision)
        return rows[0] if single else rows

    def encode_query(
        self,
        inputs: str | Iterable[str] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        **options: Any,
    ) -> Any:
        """As ``encode``, behind the prompt called ``query`` unless another is requested."""
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
        """As ``encode``, behind the prompt called ``document`` unless another is requested."""
        if prompt is None and prompt_name is None:
            prompt_name = "document"
        return self.encode(inputs, prompt_name, prompt, **options)

    def encode_multi_process(
        self,
        sentences: list[str],
        pool: ThisProcess,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        chunk_size: int | None = None,
        **options: Any,
    ) -> Any:
        """The older name of ``encode`` with a ``pool``."""
        return self.encode(sentences, prompt_name, prompt, batch_size, pool=pool, chunk_size=chunk_size, **options)

    def start_multi_process_pool(self, target_devices: list[Any] | None = None) -> ThisProcess:
        """A pool for ``encode``, which starts no process. Raises InputError for one of ``target_devices`` that is not
        cpu."""
        _require_here(target_devices)
        return ThisProcess()

    @staticmethod
    def stop_multi_process_pool(pool: ThisProcess) -> None:
        """Nothing is to be stopped."""

    def evaluate(self, evaluator: Any, output_path: str | None = None) -> Any:
        """The figures of a sentence-transformers ``evaluator``, which it also writes to the folder ``output_path``."""
        if output_path is not None:
            os.makedirs(output_path, exist_ok=True)
        return evaluator(self, output_path)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """A tensor ``[N, M]``: every embedding of the first with every one of the second, by ``similarity_fn_name``.
        Raises InputError where sentence-transformers is not installed."""
        return self._similar("to_similarity_fn", embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """A tensor ``[N]``: each embedding of the first with the same one of the second. Raises as ``similarity``."""
        return self._similar("to_similarity_pairwise_fn", embeddings1, embeddings2)

    def get_max_seq_length(self) -> int:
        """The same as ``max_seq_length``."""
        return self.max_seq_length

    def get_embedding_dimension(self) -> int:
        """Width of a vector."""
        return self._width(None)

    def get_sentence_embedding_dimension(self) -> int:
        """The older name of ``get_embedding_dimension``."""
        return self._width(None)

    if not TYPE_CHECKING:  # an attribute that is not known stays an error of types

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(absent(type(self).__name__, name))

    def _similar(self, kind: str, embeddings1: Any, embeddings2: Any) -> Any:
        library = needed(
            "sentence_transformers.util", "similarity", "sentence-transformers", "compare the arrays with numpy"
        )
        function = getattr(library.SimilarityFunction, kind)(self.similarity_fn_name)
        with library_errors(lambda said: InputError(f"similarity: expected embeddings, rows of one width: {said}")):
            return function(embeddings1, embeddings2)


class ThisProcess:
    """The place of a pool of processes, by which sentence-transformers uses several devices. Engines use all cores that
    they are given, so that further processes, which share those, would gain nothing."""


class EvaluationResults:
    """Findings of evaluators of sentence-transformers: they hand their figures to a model's ``model_card_data``."""

    def __init__(self) -> None:
        self.eval_results_dict: dict[Any, dict[str, Any]] = {}

    def set_evaluation_metrics(self, evaluator: Any, metrics: Mapping[str, Any], epoch: int = 0, step: int = 0) -> None:
        """Keeps the latest figures of ``evaluator``; nothing is trained here, so ``epoch`` and ``step`` say nothing."""
        del epoch, step
        self.eval_results_dict[evaluator] = dict(metrics)


def _require(name: str, value: object, allowed: tuple[object, ...], why: str = "") -> None:
    if value not in allowed:
        expected = " or ".join(repr(each) for each in allowed)
        raise InputError(f"{name} {value!r:.80}: expected {expected}{why}")


def _require_here(device: Any) -> None:
    where = "; the engines run where the bundle was loaded: nestforge.load(bundle, provider=...)"
    for each in device if isinstance(device, list) else [device]:
        _require("device", each if each is None else str(each), (None, "cpu"), where)


def _refuse_options(options: Mapping[str, Any]) -> None:
    for name in options.keys() - {"task"}:
        raise InputError(f"{name[:80]}: is no option of encode here; a bundle prepares texts as it was compiled to")


_REASONS = {
    "nothing is trained or changed here": (
        *("fit", "old_fit", "train", "eval", "parameters", "state_dict", "merge", "append", "extend", "insert", "pop"),
        *("add_adapter", "load_adapter", "set_adapter", "enable_adapters", "disable_adapters", "delete_adapter"),
        *("active_adapter", "active_adapters", "get_adapter_state_dict", "has_peft_compatible_model"),
        *("check_peft_compatible_model", "gradient_checkpointing_enable", "set_pooling_include_prompt"),
        *("smart_batching_collate", "training"),
    ),
    "a bundle is a folder, which is copied as it is": ("save", "save_pretrained", "save_to_hub", "push_to_hub"),
    "the engines run where the bundle was loaded: nestforge.load(bundle, provider=...)": (
        *("to", "cpu", "cuda", "half", "float", "bfloat16", "share_memory", "compile"),
        *("backend", "get_backend", "clear_placement_cache", "is_hpu_graph_enabled"),
    ),
    "a bundle has no PyTorch modules; preprocess() makes inputs of texts": (
        *("forward", "modules", "module_kwargs", "transformers_model", "config", "dtype", "tokenizer", "processor"),
        *("get_sentence_features", "get_model_kwargs", "model_card_data_class"),
    ),
    "a bundle takes texts alone, and is opened by its folder": (
        *("load", "modalities", "supports", "is_singular_input", "model_type", "default_huggingface_organization"),
        *("trust_remote_code", "SUPPORTED_SIMILARITY_FN_NAMES"),
    ),
}
_REASON_OF = {name: reason for reason, names in _REASONS.items() for name in names}


def absent(kind: str, name: str) -> str:
    """The message for the attribute ``name`` that an object of class ``kind`` lacks."""
    reason = _REASON_OF.get(name)
    return f"{kind!r} object has no attribute {name!r}{'' if reason is None else f': {reason}'}"
