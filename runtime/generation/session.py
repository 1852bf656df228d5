"""A cache that stays between turns, with the tokens whose keys and values it holds.

A prompt's beginning that the session has already is not computed again: only the tokens behind it are, and they
overwrite what lay at their places. The keys of a token are those of the submodel that computed it; another submodel
continues them where it has no more heads in any layer, of one size, of which it then reads the first. For layers with a
window the cache has the last tokens alone: a text that is continued far before its end is computed again, and so is one
of a model with recurrent states that does not go on from all that they have read.

The tokens are valid only once the run that computed their keys has ended, so that a generation may be interrupted at
any point: what was under way is computed again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any

import numpy as np

from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.entries.generation_entry import GenerationEntry
from ...errors import InputError
from ...ownership import Owner
from ..engines.runner import Runner
from ..inputs.arrays import Array
from .cache import AnyCache, Cache
from .cache_memory import CacheMemory
from .cached_engine import CachedEngine
from .sampling import Ids

_MEND = "finish or close its generation, or open a session for each thread"


class Session:
    """Rows with room for ``capacity`` tokens each. One generation at a time uses it: that of another thread is refused,
    and a later one of the same thread ends it, which it then says. Within a generation a row lies at a place of the
    cache: rows that still continue at the first ones, so that they step together. A caller sees rows alone.
    """

    def __init__(
        self,
        entry: GenerationEntry,
        opened: Callable[[EngineEntry], Runner],
        rows: int,
        capacity: int,
        memory: CacheMemory,
        owner: Owner,
        task: str | None = None,
    ) -> None:
        """``opened`` gives the open runner of an engine, with the tensors of ``task`` or of the base; ``rows`` and
        ``capacity`` are what its engines take, ``memory`` has room for them, which is closed once the session is
        closed, or collected; it is closed when ``owner`` is over, too. Raises as ``CacheMemory.empty``."""
        self._entry, self._opened, self._memory = entry, opened, memory
        self.capacity, self.task = capacity, task
        self._whole: AnyCache[Any] = memory.empty()
        self._cache = self._whole
        self._tokens = CachedTokens(rows, capacity)
        self._row_at = list(range(rows))
        # By the id of the requested engine, bound to the first so many rows of the cache as it is laid out;
        # what is bound for another number, or layout, is not kept.
        self._engines: dict[str, CachedEngine] = {}
        self._bound_rows = 0
        # A generation that is collected while another one takes the session gives it back in the same thread.
        self._lock = threading.RLock()
        self._held_by = threading.current_thread()
        self._holder: Callable[[], Owner | None] = _nobody
        self._pieces: Callable[[], Generator[Any, None, None] | None] = _nobody
        self._owner, self._given_back = owner, weakref.finalize(self, memory.close)

    @property
    def rows(self) -> int:
        return len(self._row_at)

    @property
    def bytes(self) -> int:
        """Bytes of the cache by now, once every token is computed."""
        return self._cache.bytes

    def is_of(self, entry: GenerationEntry) -> bool:
        """Whether it is for the engines of ``entry``, as one loaded model has them."""
        return self._entry is entry

    def tokens(self, row: int = 0) -> tuple[int, ...]:
        """Those whose keys and values row ``row`` holds. Raises InputError for a row that there is not, or once it is
        closed."""
        self._require_open()
        if row not in self._row_at:
            raise InputError(f"session: expected a row from 0 to {self.rows - 1}, got {row!r:.80}")
        return self._tokens.at(self._row_at.index(row))

    def take(self, owner: Owner, pieces: Generator[Any, None, None] | None = None) -> None:
        """Takes the session for one generation, which ``pieces`` runs, until ``owner`` is over. Where the thread that
        has it, or another since that one has ended, takes it again, as after an interruption, the former owner is over.

        Raises InputError while another thread has it, or a run of it is under way, or once it is closed.
        """
        with self._lock:
            self._require_open()
            before, inside = self._holder(), self._pieces()
            if before is not None and not before.is_over:
                holder = self._held_by
                if holder is not threading.current_thread() and holder.is_alive():
                    raise InputError(f"session: in use by another thread, {holder.name}; {_MEND}")
                if inside is not None and getgeneratorstate(inside) == GEN_RUNNING:
                    raise InputError(f"session: in use by a generation that is under way; {_MEND}")
                before.is_over = True
            self._unbind()
            self._held_by = threading.current_thread()
            self._pieces = _nobody if pieces is None else weakref.ref(pieces)
            self._holder = weakref.ref(owner)

    def hold(self) -> None:
        """Says that the calling thread continues the generation that has it, whichever began it."""
        self._held_by = threading.current_thread()

    def give_back(self, owner: Owner) -> None:
        """Lets go of what was bound for ``owner``, which is over; the tokens stay."""
        with self._lock:
            if self._holder() is owner:
                self._unbind()

    def close(self) -> None:
        """Gives its memory back; it cannot be used afterwards. Raises InputError while a generation has it."""
        closing = Owner()
        if not self._owner.is_over:
            self.take(closing)
            self._owner.is_over = True
        self._whole = self._cache = Cache.empty(self._entry.layers, 0, self.capacity, states=self._entry.states)
        self._tokens.clear()
        self._given_back()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def arrange(self, rows: int, tokens: int) -> None:
        """Brings each of the first ``rows`` rows to the place of its number, and has room for ``tokens`` in each."""
        self._make_room(min(tokens, self.capacity))
        for row in range(rows):
            self._swap(self._row_at.index(row), row)

    def unknown(self, tokens: Ids, engine: EngineEntry, source: Array | None = None) -> int:
        """How many of ``tokens``, as all that a row has, ``engine`` would compute; of a ``source``, which an encoder
        reads, all."""
        if source is not None:
            assert self._entry.encoder is not None
            return self._entry.encoder.tokens_of(source)
        return len(tokens) - max(self._usable(tokens, engine))

    def prefill(
        self,
        place: int,
        tokens: Ids,
        engine: EngineEntry,
        rows: int,
        own: bool = False,
        source: Array | None = None,
    ) -> tuple[Array, int]:
        """The logits ``[V]`` behind ``tokens`` as all that the row at ``place`` has, of ``rows`` that are used, and how
        many of them were there already; with ``own`` none whose keys another engine computed. At least one is computed,
        which is what logits come from. Behind an encoder, which reads ``source``, all are."""
        self._make_room(len(tokens))
        kept, cached = 0, self._engine(engine, rows)
        if source is not None:
            self._read(place, source, engine, rows)
        else:
            kept = self._reuse(place, tokens, engine, own)
        self._tokens.lengths[place] = kept
        logits = cached.extend(place, tokens[kept:], kept, [len(tokens) - kept - 1])
        self._tokens.put(place, kept, tokens[kept:], engine)
        self._tokens.lengths[place] = len(tokens)
        return logits[0], kept

    def step(self, tokens: Sequence[int], engine: EngineEntry) -> Array:
        """One more token for each of the first rows ``[n]``, and the logits ``[n, V]`` behind them, which the next step
        overwrites."""
        self._make_room(1 + max(self._tokens.lengths[: len(tokens)]))
        logits = self._engine(engine, len(tokens)).step(tokens, self._tokens.lengths[: len(tokens)])
        self._tokens.extend(tokens, engine)
        return logits

    def draft(self, token: int, ahead: int, engine: EngineEntry) -> Array:
        """The logits ``[V]`` behind ``token``, ``ahead`` places behind what the first row has, which the next draft
        overwrites. Its keys are not valid: ``check`` overwrites them."""
        self._make_room(self._tokens.lengths[0] + ahead + 1, ahead)
        return self._engine(engine, 1).step([token], [self._tokens.lengths[0] + ahead], ahead)[0]

    def check(self, tokens: Sequence[int], engine: EngineEntry) -> Array:
        """The logits ``[n, V]`` behind each of ``tokens``, the first row's next ones; the next check overwrites them.
        Their keys are ``engine``'s then, and are valid as far as ``accept`` says."""
        start = self._tokens.lengths[0]
        self._make_room(start + len(tokens))
        logits = self._engine(engine, 1).check(tokens, start)
        self._tokens.put(0, start, tokens, engine)
        return logits

    def accept(self, tokens: int) -> None:
        """Makes so many of the checked tokens the first row's."""
        self._tokens.lengths[0] += tokens

    def leave(self, place: int, rows: int) -> None:
        """The row at ``place``, one of the first ``rows``, continues no more; the last of those takes its place."""
        self._swap(place, rows - 1)

    def bind(self, engine: EngineEntry, rows: int, reads_prompts: bool = True) -> None:
        """Opens ``engine`` for steps of ``rows`` rows, and what reads its prompts if it does, so that nothing waits for
        that. Where the cache is laid out for another, it stays so until this one runs."""
        own = self._entry.of(engine)
        if self._cache.fits(own.heads, own.sizes, rows):
            self._engine(engine, rows)
        else:
            self._opened(self._entry.at_capacity(engine, self._cache.capacity))
        encoder = self._entry.encoder_of(engine)
        if encoder is not None and reads_prompts:
            self._opened(encoder)

    def _require_open(self) -> None:
        if self._owner.is_over:
            raise InputError("session: closed; open another one")

    def _engine(self, engine: EngineEntry, rows: int) -> CachedEngine:
        if rows != self._bound_rows:
            self._unbind()
            self._bound_rows = rows
        bound = self._engines.get(engine.id)  # at every token: what follows takes as long as picking one
        if bound is None:
            sibling = self._entry.at_capacity(engine, self._cache.capacity)
            own = self._entry.of(sibling)
            self._lay_out(own, rows)
            bound = CachedEngine(self._opened(sibling), sibling, own, self._cache.part(0, rows))
            self._engines[engine.id] = bound
        return bound

    def _unbind(self) -> None:
        """Nothing is bound to the cache any more."""
        while self._engines:
            self._engines.popitem()[1].close()

    def _make_room(self, tokens: int, ahead: int = 0) -> None:
        """Room for ``tokens`` in each row: what is there, with ``ahead`` tokens behind that are not valid, moves to
        a larger cache where this one has too little."""
        if tokens > self._cache.capacity:
            self._unbind()
            before, kept = self._cache, max(self._tokens.lengths) + ahead
            self._whole = self._memory.grown(before, tokens, min(kept, before.capacity))
            self._cache = self._whole.laid_out(before.heads, before.sizes)
            self._memory.release_others(self._whole)

    def _lay_out(self, own: GenerationEntry, rows: int) -> None:
        """Lays the cache out for an engine, with the heads of several rows close behind each other, and of one row with
        all that there are. Where that changes it nothing is valid any more, so that what can be reused is looked up
        behind it."""
        if not self._cache.fits(own.heads, own.sizes, rows):
            self._tokens.forget()
            self._unbind()
            self._cache = self._whole.laid_out(self._whole.heads if rows == 1 else own.heads, own.sizes)

    def _read(self, place: int, source: Array, engine: EngineEntry, rows: int) -> None:
        """Gives the row at ``place``, of ``rows`` that are used, what the encoder of ``engine`` makes of its prompt."""
        encoder, own = self._entry.encoder_of(engine), self._entry.of(engine)
        target = self._cache.part(0, rows).laid_out(own.heads, own.sizes).source
        assert encoder is not None
        assert target is not None
        self._tokens.lengths[place] = 0
        target.read(place, self._opened(encoder), own, source)

    def _reuse(self, place: int, tokens: Ids, engine: EngineEntry, own: bool) -> int:
        """How many of ``tokens`` need not be computed: what they have in common with what is at ``place``, or with
        another row's, whose keys are then copied, as far as ``engine`` can read it, or with ``own`` computed it."""
        usable = self._usable(tokens, engine, own)
        most = max(usable)
        if most > usable[place]:
            source = usable.index(most)
            self._tokens.lengths[place] = 0
            self._cache.copy_row(source, place, most)
            self._tokens.copy(source, place, most)
        return most

    def _usable(self, tokens: Ids, engine: EngineEntry, own: bool = False) -> list[int]:
        """How many of the first ``tokens`` need not be computed where each place is continued; the last one always is,
        which is what logits come from."""
        common = self._tokens.common(tokens, engine, own)
        return [self._cache.usable(place, min(found, len(tokens) - 1)) for place, found in enumerate(common)]

    def _swap(self, place: int, other: int) -> None:
        if place == other:
            return
        lengths = self._tokens.lengths
        mine, theirs = lengths[place], lengths[other]
        lengths[place] = lengths[other] = 0  # until both are moved
        self._cache.swap_rows(place, other, max(mine, theirs))
        self._tokens.swap(place, other)
        row_at = list(self._row_at)
        row_at[place], row_at[other] = row_at[other], row_at[place]
        self._row_at = row_at
        lengths[place], lengths[other] = theirs, mine


def _nobody() -> None:
    """Who has a session that nobody has."""


class CachedTokens:
    """The tokens whose keys the ``places`` of a cache hold, with room for ``capacity`` each, and their engines. The
    first ``lengths[place]`` are valid; what is behind them may be half computed."""

    def __init__(self, places: int, capacity: int) -> None:
        self.lengths = [0] * places
        self._tokens: Ids = np.zeros((places, capacity), np.int64)
        self._by = np.zeros((places, capacity), np.int16)  # numbers of engines
        self._engines: list[EngineEntry] = []  # by number
        self._numbers: dict[str, int] = {}

    def at(self, place: int) -> tuple[int, ...]:
        """The tokens that ``place`` holds."""
        return tuple(self._tokens[place, : self.lengths[place]].tolist())

    def put(self, place: int, start: int, tokens: Sequence[int] | Ids, engine: EngineEntry) -> None:
        """``engine`` has computed the keys of ``tokens`` from place ``start`` of a text on; not valid yet."""
        self._tokens[place, start : start + len(tokens)] = tokens
        self._by[place, start : start + len(tokens)] = self._number(engine)

    def extend(self, tokens: Sequence[int], engine: EngineEntry) -> None:
        """``engine`` has computed one more of ``tokens`` at each of the first places, which is valid."""
        number = self._number(engine)
        for place, token in enumerate(tokens):  # in numpy's terms one row would take longer
            at = self.lengths[place]
            self._tokens[place, at], self._by[place, at] = token, number
            self.lengths[place] = at + 1

    def common(self, tokens: Ids, engine: EngineEntry, own: bool = False) -> list[int]:
        """With how many of ``tokens`` each place begins whose keys ``engine`` can read, or with ``own`` computed."""
        found = [_common(self._tokens[place, :length], tokens) for place, length in enumerate(self.lengths)]
        readable = [other.id == engine.id if own else engine.can_continue(other) for other in self._engines]
        if all(readable):
            return found
        unread = ~np.array(readable)
        others = [np.flatnonzero(unread[self._by[place, :length]]) for place, length in enumerate(found)]
        return [int(other[0]) if len(other) else length for other, length in zip(others, found, strict=True)]

    def forget(self) -> None:
        """Nothing is valid any more."""
        self.lengths = [0] * len(self.lengths)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Place ``target`` has the first ``tokens`` of ``source``; not valid yet."""
        self._tokens[target, :tokens] = self._tokens[source, :tokens]
        self._by[target, :tokens] = self._by[source, :tokens]

    def swap(self, place: int, other: int) -> None:
        """Exchanges what two places hold, but for how much of it is valid."""
        self._tokens[[place, other]] = self._tokens[[other, place]]
        self._by[[place, other]] = self._by[[other, place]]

    def clear(self) -> None:
        """Gives its memory back."""
        self._tokens, self._by = self._tokens[:0].copy(), self._by[:0].copy()

    def _number(self, engine: EngineEntry) -> int:
        number = self._numbers.setdefault(engine.id, len(self._engines))
        if number == len(self._engines):
            self._engines.append(engine)
        return number


def _common(there: Ids, wanted: Ids) -> int:
    """How many tokens two rows begin with together."""
    shorter = min(len(there), len(wanted))
    differing = np.flatnonzero(there[:shorter] != wanted[:shorter])
    return int(differing[0]) if len(differing) else shorter
