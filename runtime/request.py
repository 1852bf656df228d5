"""A request: its limits and inputs, texts as the bundle's tokenizer makes inputs of them; and an embedding cut to
its first numbers, which of a Matryoshka model are an embedding themselves (Kusupati et al. 2022, arXiv:2205.13147,
section 3)."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from time import perf_counter
from typing import Literal, NamedTuple

import numpy as np

from ..argument_types import positive_limit, require_types
from ..bucket import Bucket
from ..bundle.entries.tensor_spec import TensorSpec
from ..bundle.manifest import Manifest, SubmodelEntry, TextEntry
from ..bundle.open_bundle import Bundle
from ..bundle.roles import embedding_of, embedding_output
from ..errors import InputError, SelectionError
from ..ownership import Owner
from .exits.choice import RequestedExits
from .graphs.task_tensors import TaskTensors
from .inputs.arrays import Array
from .inputs.text import Encoded, Text, TextEncoder

# The least that torch.nn.functional.normalize divides by.
_LEAST_LENGTH = 1e-12


class Cut(NamedTuple):
    """The first ``dimensions`` numbers of ``output``, brought to length 1 where the model does that to all of them."""

    output: TensorSpec
    dimensions: int

    def applied(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """``outputs`` with the embedding cut; all other arrays as they are."""
        kept = np.ascontiguousarray(outputs[self.output.name][:, : self.dimensions])
        return {**outputs, self.output.name: kept if self.output.normalisation is None else normalized(kept)}


def cut_to(manifest: Manifest, dimensions: int) -> Cut:
    """The cut that a request asks for. Raises InputError for a model without an embedding, and for ``dimensions`` to
    which it is not cut."""
    output = embedding_output(manifest)
    return Cut(output, required(output, dimensions))


def paired(manifest: Manifest) -> dict[int, frozenset[str]]:
    """Submodels by the dimensions that they have, where a model was trained in pairs of layers and dimensions."""
    output = embedding_of(manifest)
    pairs = () if output is None or output.pairs is None else output.pairs
    return {
        number: frozenset(one.id for one in manifest.submodels if (one.depth, number) in pairs) for _, number in pairs
    }


def required(
    output: TensorSpec, dimensions: int, name: str = "dimensions", submodel: SubmodelEntry | None = None
) -> int:
    """``dimensions``, which messages call ``name``. Raises InputError for those to which ``output`` is not cut, or not
    that of ``submodel``."""
    if may_be_cut(output, dimensions):
        pairs, width = output.pairs, output.dims[1]
        if submodel is None or pairs is None or dimensions == width or (submodel.depth, dimensions) in pairs:
            return dimensions
        of_own, depth = [f"{number}" for layers, number in pairs if layers == submodel.depth], submodel.depth
        others = [f"{layers}" for layers, number in pairs if number == dimensions]
        raise InputError(
            f"{name}: {dimensions} was trained with {', '.join(others)} layers, submodel {submodel.id} has {depth}, "
            f"which go with {', '.join(of_own) or width}; ask for a submodel of those layers, or for {width}, all"
        )
    allowed = f"1 to {output.dims[1]}" if output.dimensions is None else f"one of {listed(output.dimensions)}"
    why = "" if output.dimensions is None else ", which the model lists; compile with `dimensions` to list others"
    raise InputError(f"{name}: expected {allowed}, got {dimensions!r:.80}{why}")


def may_be_cut(output: TensorSpec, dimensions: int) -> bool:
    """Whether ``output`` is an embedding that may be cut to ``dimensions`` numbers: to those that its model lists, or
    to any, as sentence-transformers has it, where it lists none."""
    if not output.is_vector or type(dimensions) is not int:
        return False
    return dimensions in (range(1, int(output.dims[1]) + 1) if output.dimensions is None else output.dimensions)


def listed(dimensions: Sequence[int]) -> str:
    """``768, 512, 256``."""
    return ", ".join(map(str, dimensions))


def normalized(vectors: Array) -> Array:
    """``vectors`` ``[N, D]`` at length 1, as ``torch.nn.functional.normalize`` has it."""
    lengths = np.linalg.norm(vectors.astype(np.float32, copy=False), axis=1, keepdims=True)
    return (vectors / np.maximum(lengths, _LEAST_LENGTH)).astype(vectors.dtype, copy=False)


# Texts whose tokens are counted at a time.
_COUNTED_AT_ONCE = 256


class Request(NamedTuple):
    """Limits of a request: a named budget, or one submodel, or limits (all must hold); nothing asks for the
    largest submodel. ``memory_mb`` limits what the engine needs for itself: weights, private initializers, activations.
    A limit in time is one of two: ``latency_ms`` for the run alone, or ``deadline_ms`` for the run among the
    requests that are in flight.
    """

    budget: str | None = None
    submodel: str | None = None
    latency_ms: float | None = None
    memory_mb: float | None = None
    deadline_ms: float | None = None

    @property
    def is_timed(self) -> bool:
        """Whether it has a limit in time."""
        return self.latency_ms is not None or self.deadline_ms is not None

    def limit(self, name: Literal["latency_ms", "memory_mb", "deadline_ms"]) -> float:
        """Infinite where there is none. Raises SelectionError for one that is no positive number."""
        limit: float | None = getattr(self, name)
        return math.inf if limit is None else positive_limit(name, limit)

    def check_one_selector(self) -> bool:
        """Whether limits are given. Raises InputError for a name that is none, SelectionError for a request that asks
        in several ways."""
        if self.budget is not None or self.submodel is not None:
            require_types(Request, {"budget": self.budget, "submodel": self.submodel})
        limits = any(limit is not None for limit in (self.latency_ms, self.memory_mb, self.deadline_ms))
        if (self.budget is not None) + (self.submodel is not None) + limits > 1:
            given = ", ".join(name for name, value in self._asdict().items() if value is not None)
            raise SelectionError(f"request with {given}: expected a budget, or a submodel, or limits, not several")
        if self.latency_ms is not None and self.deadline_ms is not None:
            raise SelectionError(
                "request with `latency_ms`, `deadline_ms`: expected one; the first limits the run alone, the second "
                "counts the requests in flight too"
            )
        return limits


class RequestContext(NamedTuple):
    """A request with its inputs as arrays of ``shape``, and what its answer repeats of it.

    ``exits`` and ``routing`` are what was requested. ``truncated`` are the texts that were cut, ``prompt`` stood
    before each; ``task`` answers, or the base. The call began at ``started`` and had its arrays at ``encoded``
    (``perf_counter``, seconds); it may be in flight until ``owner`` is over. ``lengths`` are the steps of each row of
    texts without their padding, None for arrays. The embedding is ``cut``, or returned whole.
    """

    request: Request
    exits: RequestedExits | None
    routing: bool
    feeds: Mapping[str, Array]
    shape: Bucket
    truncated: tuple[int, ...]
    prompt: str
    started: float
    encoded: float
    owner: Owner
    task: TaskTensors | None = None
    lengths: Sequence[int] | None = None
    cut: Cut | None = None

    @property
    def task_name(self) -> str | None:
        """The task that answers, None for the base."""
        return None if self.task is None else self.task.name

    @property
    def chooses(self) -> tuple[Request, str | None, Cut | None]:
        """Arguments that say among which submodels it chooses."""
        return self.request, self.task_name, self.cut

    @property
    def is_late(self) -> bool:
        """Whether its deadline has passed."""
        deadline_ms = self.request.deadline_ms
        return deadline_ms is not None and 1e3 * (perf_counter() - self.started) > deadline_ms


class Texts:
    """Thread-safe. All of it raises InputError where the bundle has no tokenizer."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._lock = threading.Lock()

    def prompt(self, prompt: str | None, prompt_name: str | None) -> str:
        """Prompt before a text of a request with these arguments; empty for nothing. Raises InputError."""
        return self._entry().prompt(prompt, prompt_name)

    def token_counts(self, texts: Sequence[str], prompt: str | None) -> list[int]:
        """How many tokens each of ``texts`` has behind ``prompt``, with those that the tokenizer adds."""
        encoder = self.encoder()
        counts: list[int] = []
        for start in range(0, len(texts), _COUNTED_AT_ONCE):
            counts += encoder.lengths(texts[start : start + _COUNTED_AT_ONCE], prompt)
        return counts

    def encode(
        self,
        inputs: str | Sequence[Text],
        longest: Callable[[int], int],
        truncate: bool,
        prompt: str | None,
        prompt_name: str | None,
    ) -> tuple[Encoded, str]:
        """Texts as inputs, and the prompt before them; ``longest(rows)`` is the longest sequence for so many rows."""
        if not isinstance(inputs, (str, Sequence)):
            raise InputError(f"inputs: expected arrays by name, a text or texts, got {type(inputs).__name__}")
        texts = [inputs] if isinstance(inputs, str) else inputs
        encoder = self.encoder()
        before = encoder.entry.prompt(prompt, prompt_name)
        return encoder.encode(texts, longest(max(1, len(texts))), truncate, before), before

    def encoder(self) -> TextEncoder:
        """The tokenizer as the bundle uses it."""
        with self._lock:
            return self._opened

    @cached_property
    def _opened(self) -> TextEncoder:
        text = self._entry()
        self._bundle.require_hashes(text.file)
        with self._bundle.held(text.file):
            return TextEncoder(self._bundle.file(text.file), text, self._bundle.manifest.inputs)

    def _entry(self) -> TextEntry:
        text = self._bundle.manifest.text
        if text is None:
            raise InputError(f"bundle {self._bundle.path}: has no tokenizer; pass arrays by input name instead of text")
        return text
