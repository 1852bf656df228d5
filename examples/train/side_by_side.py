"""Trainings side by side: each takes one thread, so it gives the same weights on any number of cores."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeVar

import torch

R = TypeVar("R", bound=Hashable)
T = TypeVar("T")


def side_by_side(work: Callable[[R], T], runs: Sequence[R], jobs: int, on_done: Callable[[R, T], None]) -> None:
    """Does ``work`` for all ``runs``, ``jobs`` at a time, each in a process of its own; in this process for one job."""
    if jobs == 1:
        for run in runs:
            on_done(run, work(run))
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        pending = {pool.submit(work, run): run for run in runs}
        try:
            for done in as_completed(pending):
                on_done(pending[done], done.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread for as long as the block lasts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
