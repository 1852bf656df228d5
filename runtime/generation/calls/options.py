"""What a caller asks of a generation, checked as a whole before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from ....errors import CapacityError, InputError, SelectionError
from ....strict import nearest
from ...inputs.limits import positive_limit
from ..sampling import Sampling
from ..stops import Stops
from .pace import Promise

_DEFAULT_TOKENS = 256
_MOST_LOGPROBS = 100


@dataclass(frozen=True)
class Options:
    """``max_tokens``: by default as many as the capacity holds, at most 256. ``temperature``, ``top_k``, ``top_p``,
    ``min_p``, ``repetition_penalty`` and ``seed``: see Sampling; by default as the model's folder says, else greedy.
    ``stop``: a string or a token id, or several of them, that end a row beside the model's own end tokens.
    ``logprobs``: log-probabilities of the tokens, and of so many of the most likely ones.

    Who writes: at most one of a named ``budget``; a ``submodel`` by id or label; limits (``memory_mb``, which an engine
    needs for itself with the cache, and ``tokens_per_second`` or ``deadline_ms``, see Promise). Without any, the
    largest submodel. ``capacity``: tokens that a row has room for, by default what the request needs.

    ``draft``: who proposes tokens of one row, which the submodel that writes checks several at a time: a smaller
    submodel, by id or label, or "n-gram", the text itself where it repeats what it had; or "auto", in every run what
    is expected to write fastest, none where nothing is faster than steps. The text is the same as without, and where
    tokens are drawn their distribution is. ``drafted``: so many a run, by default 4; with "auto" the most, by default
    8. Not with limits, by which it changes who writes. ``task``: the one whose tensors all of them have, by default
    the base's. Raises InputError, SelectionError.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | int | Sequence[str | int] = ()
    logprobs: int | None = None
    budget: str | None = None
    submodel: str | None = None
    memory_mb: float | None = None
    tokens_per_second: float | None = None
    deadline_ms: float | None = None
    capacity: int | None = None
    draft: str | None = None
    drafted: int | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 1), ("logprobs", 0), ("capacity", 2), ("drafted", 1)):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, whole_number(name, value, least))
        if self.logprobs is not None and self.logprobs > _MOST_LOGPROBS:
            raise InputError(f"logprobs: expected at most {_MOST_LOGPROBS}, got {self.logprobs}")
        if not isinstance(self.task, str | None):
            raise InputError(f"task: expected a name, got {self.task!r:.80}")
        for name in ("budget", "submodel", "draft"):
            if not isinstance(getattr(self, name), str | None):
                raise SelectionError(f"{name}: expected a name, got {getattr(self, name)!r:.80}")
        limits = ("memory_mb", "tokens_per_second", "deadline_ms")
        asked = [name for name in ("budget", "submodel", *limits) if getattr(self, name) is not None]
        if len(asked) > 1 and not set(asked) <= set(limits):
            raise SelectionError(f"generate with {', '.join(asked)}: expected a budget, or a submodel, or limits")
        if self.draft is None and self.drafted is not None:
            raise InputError(f"drafted {self.drafted}: by no draft; name one with `draft`")
        if self.draft is not None and set(asked) & set(limits):
            raise SelectionError(
                f"generate with draft, {', '.join(asked)}: limits may change who writes at every token, a draft is "
                "checked by one submodel; ask for either"
            )
        if self.memory_mb is not None:
            object.__setattr__(self, "memory_mb", positive_limit("memory_mb", self.memory_mb))
        _ = self.sampling({}), self.promise, self.stops_beside(())  # they check themselves

    @staticmethod
    def of(options: dict[str, Any]) -> Options:
        """From keywords. Raises InputError for one that does not exist."""
        known = [field.name for field in fields(Options)]
        for name in options:
            if name not in known:
                raise InputError(f"generate: no option {name!r:.80}{nearest(name[:80], known)}")
        return Options(**options)

    def sampling(self, own: Mapping[str, float]) -> Sampling:
        """As asked for; what was not, as in the model's ``own`` settings."""
        found: dict[str, Any] = {}
        for name in (field.name for field in fields(Sampling)):
            asked = getattr(self, name)
            if asked is not None:
                found[name] = asked
            elif name in own:
                value = own[name]  # a manifest has no whole numbers here
                found[name] = int(value) if name in ("top_k", "seed") and value == value // 1 else value
        return Sampling(**found)

    @property
    def promise(self) -> Promise:
        return Promise(self.tokens_per_second, self.deadline_ms)

    def stops_beside(self, end_ids: Iterable[int]) -> Stops:
        """The stops asked for and ``end_ids``."""
        asked = [self.stop] if isinstance(self.stop, str | Integral) else self.stop
        if not isinstance(asked, Sequence) or isinstance(asked, bytes | bytearray | memoryview):
            raise InputError(f"stop: expected a text or a token id, or a list of them, got {asked!r:.80}")
        strings = tuple(stop for stop in asked if isinstance(stop, str))
        ids: list[Any] = [stop for stop in asked if not isinstance(stop, str)]
        return Stops(frozenset([*end_ids, *Stops(ids).ids]), strings)  # type: ignore[arg-type]  # Stops checks them

    def tokens_for(self, longest: int, capacity: int, limit: str) -> int:
        """How many tokens a row may get behind a prompt of ``longest`` tokens. Raises CapacityError for more than there
        is room for by ``limit``, which has ``capacity``."""
        room = capacity - longest
        wanted = self.max_tokens or max(1, min(_DEFAULT_TOKENS, room))
        if wanted > room:
            raise CapacityError(
                f"prompt: {longest} tokens and `max_tokens={wanted}` are more than {limit}; shorten the prompt or ask "
                "for fewer tokens"
            )
        return wanted


def whole_number(name: str, value: object, least: int) -> int:
    """``value``, numpy's numbers too. Raises InputError unless it is whole and at least ``least``."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise InputError(f"{name}: expected a whole number, {least} or above, got {value!r:.80}")
    return int(value)
