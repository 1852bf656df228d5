"""Stages of a training: a finished one is not repeated.

``training.json`` holds a record of every finished stage with the key of what it was made from; a stage whose key and
files are there is kept. What a stage writes is written beside and renamed, so that what exists is whole.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn import functional

from ..bundle.files import to_json
from ..compiler.work.staging import write_synced
from ..progress import Progress
from ..strict import unstructure

Record = dict[str, Any]
R = TypeVar("R", bound=Hashable)
T = TypeVar("T")
RECORDS_NAME = "training.json"
_WARM_UP = 0.1  # of the steps
_CLIP = 1.0  # norm of all gradients


@dataclass(frozen=True)
class Stages:
    """The stages whose results lie in ``output``; ``progress`` hears which are kept."""

    output: Path
    progress: Progress

    def run(self, name: str, key: Record, files: Iterable[Path], seed: int, work: Callable[[], Record]) -> None:
        """Does ``work``, with torch seeded, unless the record with this key and all ``files`` are there."""
        if self.kept(name, key, files):
            return
        torch.manual_seed(seed)
        started = time.perf_counter()
        result = work()
        self.store(name, key, {**unstructure(result), "seconds": round(time.perf_counter() - started, 1)})

    def kept(self, name: str, key: Record, files: Iterable[Path]) -> bool:
        """Whether the stage is done; if it is not, what an interrupted one left is removed."""
        if self.records().get(name, {}).get("made_from") == unstructure(key) and all(file.exists() for file in files):
            self.progress(f"{name}: kept", 1, 1)
            return True
        for left in self.output.glob("*.writing"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        return False

    def store(self, name: str, key: Record, record: Record) -> None:
        """Adds the record of a finished stage, or replaces its older one."""
        record = {**unstructure(record), "made_from": unstructure(key)}
        replace_file(self.output / RECORDS_NAME, to_json({**self.records(), name: record}))

    def records(self) -> Record:
        """Every record by stage: what ``training.json`` holds."""
        path = self.output / RECORDS_NAME
        records: Record = json.loads(path.read_bytes()) if path.exists() else {}
        return records


def replace_file(path: Path, data: bytes) -> None:
    """Writes ``path`` beside and renames it."""
    beside = path.with_name(path.name + ".writing")
    write_synced(beside, data)
    beside.rename(path)


def replace_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Lets ``write`` make a folder beside ``folder``, then puts it in its place."""
    beside = folder.with_name(folder.name + ".writing")
    write(beside)
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)


class Stage(NamedTuple):
    """Identity of one run: its name among the records, the key of what it is made from, and the files that it
    leaves."""

    name: str
    key: Record
    files: Sequence[Path]


def train_missing(
    stages: Stages, work: Callable[[R], Record], runs: Mapping[R, Stage], jobs: int, what: str = "training"
) -> None:
    """Does ``work`` for all of ``runs`` that are not kept, ``jobs`` at a time; progress calls them ``what``."""
    left = [run for run, stage in runs.items() if not stages.kept(*stage)]
    finished: list[R] = []

    def on_done(run: R, record: Record) -> None:
        stages.store(runs[run].name, runs[run].key, record)
        finished.append(run)
        stages.progress(what, len(finished), len(left))

    if left:
        side_by_side(work, left, min(jobs, len(left)), on_done)


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


def seconds_of(model: torch.nn.Module, fit: Callable[[], None]) -> float:
    """Seconds of a core that ``fit`` takes to train ``model``, which then is in eval mode, without gradients."""
    model.train()
    started = time.process_time()
    fit()
    model.eval().requires_grad_(False)
    return round(time.process_time() - started, 1)


@torch.no_grad()
def quality_of(parts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Record:
    """``accuracy`` and ``loss`` (nats) of logits [N, ..., V] for targets [N, ...]."""
    nats, right, asked = 0.0, 0, 0
    for logits, targets in parts:
        nats += functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum").item()
        right += int((logits.argmax(-1) == targets).sum())
        asked += targets.numel()
    return {"accuracy": right / asked, "loss": nats / asked}


def decay_groups(named: Iterable[tuple[str, torch.nn.Parameter]], rate: float, decay: float) -> list[dict[str, Any]]:
    """Two parameter groups for an optimiser: matrices, which decay, and biases and norms, which do not."""
    parameters = list(named)
    groups: list[dict[str, Any]] = []
    for decays in (True, False):
        chosen = [p for name, p in parameters if _is_matrix(name, p) == decays]
        groups.append({"params": chosen, "lr": rate, "weight_decay": decay if decays else 0.0})
    return groups


def descend(
    groups: Sequence[dict[str, Any]],
    betas: tuple[float, float],
    losses: Iterable[Callable[[], torch.Tensor]],
    steps: int,
    on_step: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """``steps`` steps of AdamW on the parameters of ``groups``, one for each of ``losses``, whose gradients all
    together are clipped to norm 1."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    optimiser = torch.optim.AdamW(groups, betas=betas, fused=True)
    schedule = linear_schedule(optimiser, steps)
    for step, loss in enumerate(losses, start=1):
        optimiser.zero_grad()
        torch.autograd.backward(loss())
        torch.nn.utils.clip_grad_norm_(parameters, _CLIP)
        optimiser.step()
        schedule.step()
        on_step(step, steps)


def linear_schedule(optimiser: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate over ``steps`` steps: up over the first tenth, then down in a line towards 0."""
    warm_up = max(1, round(_WARM_UP * steps))
    return torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / warm_up, (steps - step) / max(1, steps - warm_up))
    )


def parameters_of(model: torch.nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def _is_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    return parameter.ndim > 1 and "LayerNorm" not in name and not name.endswith("bias")
