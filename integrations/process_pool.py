"""Texts encoded by several processes, each of which opens the bundle for itself, where sentence-transformers is asked
for a pool of processes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InputError
from ..runtime.device.threads import threads_or_default
from ..runtime.load import load
from ..runtime.model import ElasticModel

# As the library divides texts: so many parts for each process, each of at most so many texts.
_PARTS, _MOST_TEXTS = 10, 5000
_DEFAULT_PROCESSES = 4


class Part(NamedTuple):
    """A process's answer to some of the texts, ``found``, and how many of them it ``cut``."""

    found: Any
    cut: int


Opens = Callable[[ElasticModel], Any]  # of an ``Embedder``
_opened: Any = None  # it, in a process of a pool


class ProcessPool:
    """``devices`` names the processor once for each process; None: one for each core, at most 4. They share the cores
    and, mapped from the bundle's file, the weights.

    ``opens`` makes of the model what answers; it must be importable, and so must the program's main module: start a
    pool under ``if __name__ == "__main__"``. Raises InputError for another device.
    """

    def __init__(self, bundle: Path, opens: Opens, devices: Sequence[Any] | None = None) -> None:
        cores = threads_or_default(None)
        named = ["cpu"] * min(_DEFAULT_PROCESSES, cores) if devices is None else list(map(str, devices))
        if not named or set(named) != {"cpu"}:
            raise InputError(
                f"target_devices: expected 'cpu' once for each process, got {named!r:.80}; processes share no GPU"
            )
        self.processes = len(named)
        self._executor = ProcessPoolExecutor(
            self.processes,
            get_context("spawn"),
            initializer=_open,
            initargs=(bundle, opens, max(1, cores // self.processes)),
        )

    def parts(
        self, texts: list[Any], chunk_size: int | None, request: Any, advance: Callable[[int], None]
    ) -> Iterable[Part]:
        """The answers to parts of at most ``chunk_size`` texts, in order; ``advance`` is told of texts that are done.

        Raises what a process raises, and InputError for a pool that is stopped, or that lost a process.
        """
        if chunk_size is not None and (type(chunk_size) is not int or chunk_size < 1):
            raise InputError(f"chunk_size: expected a whole number of at least 1, got {chunk_size!r:.80}")
        size = chunk_size or max(1, min(math.ceil(len(texts) / self.processes / _PARTS), _MOST_TEXTS))
        try:
            waiting = [self._submit(texts[at : at + size], request) for at in range(0, len(texts), size)]
            for future in waiting:
                yield (part := future.result())
                advance(len(part.found))
        except BrokenExecutor as failure:
            raise InputError(
                "pool: one of its processes ended; stop it and start another, under `if __name__ == '__main__'`"
            ) from failure

    def _submit(self, texts: list[Any], request: Any) -> Future[Part]:
        try:
            return self._executor.submit(_infer, texts, request)
        except BrokenExecutor:
            raise
        except RuntimeError as failure:
            raise InputError("pool: is stopped; start another") from failure

    def stop(self) -> None:
        """Ends the processes; what they have not begun is dropped."""
        self._executor.shutdown(cancel_futures=True)


def _open(bundle: Path, opens: Opens, threads: int) -> None:
    global _opened  # a process of a pool has one
    logging.getLogger("nestforge").setLevel(logging.ERROR)  # what was cut is said once, where it was requested
    _opened = opens(load(bundle, threads=threads))


def _infer(texts: list[Any], request: Any) -> Part:
    assert _opened is not None
    before = _opened.truncated
    return Part(_opened.inferred(texts, request), _opened.truncated - before)
