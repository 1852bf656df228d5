"""A KV-cache engine on its cache: new tokens in, logits out, keys and values added in place."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.entries.generation_entry import GenerationEntry
from ...errors import InputError
from ..engines.runner import Runner
from ..inputs.arrays import Array
from .cache import AnyCache, BoundCall

# Numbers of drafted tokens whose checks stay bound; a named draft varies them at the end of a row alone.
_CHECKS_BOUND = 16


class _Run(NamedTuple):
    """A bound run of new tokens of one row, and its arrays."""

    ids: Array
    positions: Array
    places: Array
    logits: Array
    bound: BoundCall

    def call(self, tokens: Sequence[int] | Array, position: int, places: Array) -> None:
        """Runs ``tokens`` from ``position`` of the text on; ``places`` are those of layers with a window."""
        self.ids[0] = tokens
        self.positions[0] = np.arange(position, position + len(tokens))
        self.places[:] = places
        self.bound.call()


class CachedEngine:
    """One engine on one cache, of which it reads the first heads. Its arrays are its own, so that one thread at a time
    may use it.

    The call of one new token for each row is bound once, and a check of drafted tokens once for each number of them,
    all with the logits of the largest; a chunk of a prompt is bound for its run.
    """

    def __init__(self, runner: Runner, engine: EngineEntry, entry: GenerationEntry, cache: AnyCache[Any]) -> None:
        """``runner`` is the open one of ``engine``. Raises InputError for more rows than it takes."""
        self._runner, self._engine, self._entry, self._cache = runner, engine, entry, cache
        if cache.rows > engine.bucket.batch:
            raise InputError(f"engine {engine.id}: {cache.rows} rows at once; expected at most {engine.bucket.batch}")
        self._read = cache.laid_out(entry.heads, entry.sizes)
        self._longest_run = min(engine.bucket.sequence, cache.longest_run)
        self._step_ids = np.zeros((cache.rows, 1), np.int64)
        self._step_positions = np.zeros((cache.rows, 1), np.int64)
        self._step_places = np.zeros(cache.rows, np.int64)
        self._step_logits = np.zeros((cache.rows, 1, entry.vocabulary), np.float32)
        self._step = self._bound(
            self._read, self._step_ids, self._step_positions, self._step_places, [0], self._step_logits
        )
        self._checks: dict[int, _Run] = {}  # by number of tokens
        self._check_logits = np.zeros((1, 0, entry.vocabulary), np.float32)

    def step(self, tokens: Sequence[int] | Array, positions: Sequence[int] | Array, drafted: int = 0) -> Array:
        """One new token for each row at its position: ``[rows]`` each to logits ``[rows, vocabulary]`` float32.

        The next call overwrites them. ``drafted`` tokens before the new one may be refused. Raises InputError for a
        position that the cache has no room for.
        """
        self._step_ids[:, 0] = tokens
        self._step_positions[:, 0] = positions
        self._require_room(int(max(positions)) + 1)
        if self._cache.window is not None:
            for row, position in enumerate(positions):
                self._cache.make_room(row, position, 1, drafted)
            np.subtract(positions, self._cache.window.starts, out=self._step_places)
        self._step.call()
        return self._step_logits[:, 0]

    def extend(self, row: int, tokens: Sequence[int] | Array, position: int, logits_at: Sequence[int]) -> Array:
        """New ``tokens`` of one row from ``position`` on, in as many runs as the engine needs, to logits
        ``[len(logits_at), vocabulary]`` behind those of them that ``logits_at`` counts, in rising order.

        Raises as ``step``.
        """
        self._require_room(position + len(tokens))
        found = []
        cache = self._read.part(row, row + 1)
        run: _Run | None = None
        try:
            for start in range(0, len(tokens), self._longest_run):
                chunk = tokens[start : start + self._longest_run]
                wanted = [at - start for at in logits_at if start <= at < start + len(chunk)]
                if run is None or run.ids.shape[1] > 1 or len(chunk) > 1:  # one of a single token serves the next
                    if run is not None:
                        run.bound.close()
                    # An engine computes the logits of one token at least.
                    logits = np.empty((1, max(1, len(wanted)), self._entry.vocabulary), np.float32)
                    run = self._bound_run(cache, len(chunk), wanted or [0], logits)
                self._cache.make_room(row, position + start, len(chunk))
                run.call(chunk, position + start, self._places(row, position + start))
                own = logits[0, : len(wanted)]
                found.append(own if len(chunk) > 1 else own.copy())
        finally:
            if run is not None:
                run.bound.close()
        return found[0] if len(found) == 1 else np.concatenate(found)

    def check(self, tokens: Sequence[int], position: int) -> Array:
        """New ``tokens`` ``[n]`` of the first row from ``position`` on, in one run, to the logits ``[n, vocabulary]``
        behind each of them. The next check overwrites them.

        Raises as ``step``.
        """
        count = len(tokens)
        self._require_room(position + count)
        check = self._checks.get(count)
        if check is None:
            check = self._checks[count] = self._bound_check(count)
        self._cache.make_room(0, position, count)
        check.call(tokens, position, self._places(0, position))
        return check.logits[0]

    def close(self) -> None:
        """Gives back what its bound runs keep; it cannot be used afterwards."""
        self._step.close()
        self._forget_checks()

    def _bound_check(self, count: int) -> _Run:
        """A run of ``count`` tokens, bound to the logits that all such runs have in common."""
        if count > self._check_logits.shape[1]:
            self._forget_checks()
            self._check_logits = np.zeros((1, count, self._entry.vocabulary), np.float32)
        elif len(self._checks) == _CHECKS_BOUND:
            self._forget_checks()
        return self._bound_run(self._read.part(0, 1), count, range(count), self._check_logits[:, :count])

    def _bound_run(self, cache: AnyCache[Any], count: int, logits_at: Sequence[int], logits: Array) -> _Run:
        """A run of ``count`` tokens of the one row of ``cache``, bound to ``logits``."""
        ids, positions, places = (np.zeros(shape, np.int64) for shape in ((1, count), (1, count), 1))
        return _Run(ids, positions, places, logits, self._bound(cache, ids, positions, places, logits_at, logits))

    def _forget_checks(self) -> None:
        for check in self._checks.values():
            check.bound.close()
        self._checks.clear()

    def _places(self, row: int, position: int) -> Array:
        """The place ``[1]`` of ``position`` of the text of a row in buffers of layers with a window."""
        window = self._cache.window
        return np.array([position if window is None else position - window.starts[row]], np.int64)

    def _require_room(self, tokens: int) -> None:
        """The operator writes wherever a position says."""
        if tokens > self._cache.capacity:
            raise InputError(
                f"engine {self._engine.id}: {tokens} tokens, the cache has room for {self._cache.capacity}; "
                "ask for a larger capacity"
            )

    def _bound(
        self,
        cache: AnyCache[Any],
        ids: Array,
        positions: Array,
        places: Array,
        logits_at: Sequence[int],
        logits: Array,
    ) -> BoundCall:
        feeds = {"input_ids": ids, "position_ids": positions, "logits_at": np.asarray(logits_at, np.int64)}
        if cache.window is not None:
            feeds["window_places"] = places
        return cache.bind(self._runner, feeds, {"logits": logits})
