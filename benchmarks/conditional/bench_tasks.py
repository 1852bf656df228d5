"""Ten tasks on one CODA encoder of base width: what they weigh over the base, and what another task costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from statistics import median
from time import thread_time

import torch

from ...bucket import Bucket
from ...bundle.open_bundle import open_bundle
from ...compiler.compile import compile_bundle
from ...exporters.checkpoints.own_folder import save_model, save_tensors
from ...exporters.families.coda.config import CodaConfig
from ...exporters.families.coda.family import PRESETS
from ...exporters.families.coda.model import CodaEncoder, load_model
from ...exporters.families.coda.ops import is_of_task
from ...exporters.families.coda.tasks import CodaTaskConfig
from ...exporters.tasks.task_form import hash_of
from ...runtime.inputs.feeds import random_feeds
from ...runtime.load import load
from ..harness import Row, interleaved, ratio
from ..kept import CACHE
from ..subjects import CORES, elsewhere, packed
from .task_memory import resident_bytes

_TASKS, _LAYERS, _WORDS, _REDUCTION = 10, 4, 1000, 4
_BUCKET = Bucket(1, 128)
_ROUNDS, _SWITCHES = 12, 600
_WEIGHT, _SWITCH_US, _SPEED = 1.02, 50.0, 0.95


def run() -> list[Row]:
    return [_bytes(), _memory(), _switch(), _speed()]


def _config() -> CodaConfig:
    preset = PRESETS["coda-t5-base-k-to-all"]
    return replace(preset, num_hidden_layers=_LAYERS, vocab_size=_WORDS, reduction=_REDUCTION, reductions=(_REDUCTION,))


def _base() -> Path:
    folder = CACHE / "tasks-base"
    if not folder.exists():
        torch.manual_seed(0)
        save_model(CodaEncoder(_config()).eval(), _config(), folder)
    return folder


@cache
def _tasks() -> dict[str, Path]:
    """Folders of tasks whose every tensor differs from the base's."""
    model, folders = load_model(_base()), {f"task{number}": CACHE / f"tasks-{number}" for number in range(_TASKS)}
    parameters = dict(model.named_parameters())
    digest = hash_of({name: value.numpy() for name, value in parameters.items() if not is_of_task(name)})
    config = _config()
    for number, folder in enumerate(folders.values()):
        if not folder.exists():
            torch.manual_seed(number)
            trained = {name: value for name, value in parameters.items() if is_of_task(name)}
            own = {name: value + 0.02 * torch.randn_like(value) for name, value in trained.items()}
            stated = CodaTaskConfig(
                base_sha256=digest, reduction=_REDUCTION, reductions=(_REDUCTION,), soft_top_k=config.soft_top_k
            )
            save_tensors(own, stated, folder)
    return folders


def _bundle(with_tasks: bool) -> Path:
    path = CACHE / f"tasks-{'ten' if with_tasks else 'none'}.bundle"
    if not path.exists():
        tasks = _tasks() if with_tasks else {}
        compile_bundle(_base(), elsewhere(), path, buckets=[_BUCKET], include="budgets", measure=False, tasks=tasks)
    return path


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def _deltas() -> int:
    """Bytes of the tensors of all tasks, as their own folders hold them."""
    return sum((folder / "model.safetensors").stat().st_size for folder in _tasks().values())


def _over(what: str, ten: int, base: int, how: str) -> Row:
    found = ten / (base + _deltas())
    return Row(
        f"{_TASKS} tasks over the base without any, {what}",
        f"{found:.4f}x of base and deltas ({ten / 1e6:.1f} MB over {base / 1e6:.1f} + {_deltas() / 1e6:.1f} MB)",
        f"<= {_WEIGHT}x",
        found <= _WEIGHT,
        f"{how}; CODA, {_LAYERS} layers of base width, reduction {_REDUCTION}",
    )


def _bytes() -> Row:
    return _over("bytes of the bundle", _size(_bundle(True)), _size(_bundle(False)), "all files")


def _memory() -> Row:
    ten, none = (resident_bytes(_bundle(with_tasks)) for with_tasks in (True, False))
    return _over("resident memory with all answering", ten, none, "a packed engine in a process of its own, 1 thread")


def _switch() -> Row:
    """Requests in pairs: a task's, and the same task's again; the next pair is another task's. In processor time, since
    50 us are less than what other programs take of a run of 20 ms."""
    with load(_bundle(True), residency="packed", threads=1) as model:
        feeds = random_feeds(model.bundle.manifest.inputs, _BUCKET)
        calls = [partial(model, feeds, task=name) for name in model.tasks.entries]
        for call in calls:
            call()
        other, again = [], []
        for _, call in zip(range(_SWITCHES), cycle(calls), strict=False):
            other.append(_thread_ms(call))
            again.append(_thread_ms(call))
    found = 1e3 * median(one - same for one, same in zip(other, again, strict=True))
    return Row(
        "another task for the next request, over the same again",
        f"{found:.0f} us ({median(other):.2f} over {median(again):.2f} ms)",
        f"<= {_SWITCH_US:.0f} us",
        found <= _SWITCH_US,
        f"median difference of {_SWITCHES} pairs through the runtime, 1 x 128, packed, processor time of 1 thread",
    )


def _thread_ms(call: Callable[[], object]) -> float:
    began = thread_time()
    call()
    return 1e3 * (thread_time() - began)


def _speed() -> Row:
    """The same model: its task tensors as inputs, and as initializers of an ordinary compile."""
    submodel = open_bundle(_bundle(True)).manifest.submodels[0].id
    with packed(_bundle(True), submodel, _BUCKET) as ours, packed(_bundle(False), submodel, _BUCKET) as plain:
        calls = {"plain": lambda: plain.runner.run(plain.feeds), "ours": lambda: ours.runner.run(ours.feeds)}
        times = interleaved(calls, _ROUNDS)
    speed = ratio(times, "plain", "ours")
    return Row(
        "an engine that takes tasks, over the same compiled without",
        f"{speed:.2f}x (best {min(times['ours']):.2f} against {min(times['plain']):.2f} ms)",
        f">= {_SPEED}x",
        speed >= _SPEED,
        f"median ratio of {_ROUNDS} interleaved rounds, 1 x 128, packed, {CORES} threads",
    )
