"""A request: its limits and inputs, texts as the bundle's tokenizer makes inputs of them."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from time import perf_counter
from typing import Literal, NamedTuple

from ..argument_types import positive_limit, require_types
from ..bucket import Bucket
from ..bundle.manifest import TextEntry
from ..bundle.open_bundle import Bundle
from ..errors import InputError, SelectionError
from ..ownership import Owner
from .dimensions import Cut
from .exits.choice import RequestedExits
from .graphs.task_tensors import TaskTensors
from .inputs.arrays import Array
from .inputs.text import Encoded, Text, TextEncoder

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
