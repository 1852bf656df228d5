"""Conditional adapters and tasks: reductions against the dense model, and what a task weighs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from statistics import median
from time import thread_time

import torch

from ..bucket import Bucket
from ..bundle.open_bundle import open_bundle
from ..compiler.compile import compile_bundle
from ..exporters.architecture import hash_of
from ..exporters.checkpoints.own_folder import save_model, save_tensors
from ..exporters.families.coda.config import REDUCTION, CodaConfig, Router
from ..exporters.families.coda.family import PRESETS
from ..exporters.families.coda.model import CodaEncoder, load_model
from ..exporters.families.coda.ops import is_of_task
from ..exporters.families.coda.tasks import CodaTaskConfig
from ..runtime.inputs.arrays import random_feeds
from ..runtime.load import load
from .harness import CACHE, Row, benchmark, interleaved, ratio, speed_row
from .subjects import CORES, eager_call, elsewhere, packed
from .task_memory import resident_bytes

BUCKET = Bucket(1, 512)
# Fewer than the preset's twelve equal layers: time per layer is compared, and a small vocabulary leaves layers alone.
LAYERS, WORDS = 4, 1000
OFFERED = (8, 4, 2, 1)


def coda_config(keys: str, router: Router = "soft_top_k") -> CodaConfig:
    """Configuration of T5 base whose layers read ``keys``: ``k-to-k`` or ``k-to-all``."""
    preset = PRESETS[f"coda-t5-base-{keys}"]
    return replace(
        preset,
        num_hidden_layers=LAYERS,
        vocab_size=WORDS,
        router=router,
        soft_top_k=preset.soft_top_k if router == "soft_top_k" else None,
        reduction=4,
        reductions=OFFERED,
        reduction_of_one="dense",
    )


def coda_folder(config: CodaConfig) -> Path:
    """The model as a checkpoint."""
    folder = CACHE / f"coda-{config.keys_of}-{config.router}-checkpoint"
    if not folder.exists():
        torch.manual_seed(0)
        save_model(CodaEncoder(config).eval(), config, folder)
    return folder


def coda_bundle(config: CodaConfig, reductions: tuple[int, ...]) -> Path:
    """The model compiled at ``reductions``, once."""
    path = CACHE / f"coda-{config.keys_of}-{config.router}-{'-'.join(map(str, reductions))}.bundle"
    if not path.exists():
        submodels = [coda_submodel(config, reduction) for reduction in reductions]
        folder = coda_folder(config)
        compile_bundle(
            folder, elsewhere(), path, buckets=[BUCKET], submodels=submodels, include="budgets", measure=False
        )
    return path


def coda_submodel(config: CodaConfig, reduction: int) -> str:
    """The id of the whole width at ``reduction``."""
    return f"ffn{config.intermediate_size}-{REDUCTION}{reduction}"


_KEYS = ("k-to-k", "k-to-all")
_CODA_ROUNDS = 12
_REDUCTIONS = (4, 1)
_OF_PREDICTED, _ROUTER_SHARE = 0.85, 0.06


@benchmark
def bench_coda() -> list[Row]:
    """CODA encoders of base width: a reduction of 4 against the dense adapter model, the router's share, eager."""
    return [row for keys in _KEYS for row in (_against_dense(keys), _router(keys), _against_eager(keys))]


def predicted_ratio(config: CodaConfig, tokens: int, selected: int) -> float:
    """Multiplications of a dense layer with an adapter over those of a conditional one (docs/coda.md, section 3)."""
    d, n, k = config.hidden_size, tokens, selected
    inner = config.num_attention_heads * config.head_size
    shared, adapter = config.key_value_heads * config.head_size, 2 * n * d * config.adapter_size
    read = k if config.keys_of == "selected" else n

    def layer(asking: int, reads: int) -> int:
        attention = 2 * asking * d * inner + 2 * reads * d * shared + 2 * asking * reads * inner
        return attention + 3 * asking * d * config.intermediate_size

    return (layer(n, n) + adapter) / (layer(k, read) + adapter + n * d)


def _times(engines: dict[str, tuple[Path, str]]) -> dict[str, list[float]]:
    """Milliseconds of packed engines in turns; all tokens count."""
    with ExitStack() as stack:
        opened = {name: stack.enter_context(packed(*engine, BUCKET)) for name, engine in engines.items()}
        for one in opened.values():
            one.feeds["attention_mask"][:] = 1
        calls = {name: (lambda one=one: one.runner.run(one.feeds)) for name, one in opened.items()}
        return interleaved(calls, _CODA_ROUNDS, 3)


def _how() -> str:
    return f"median ratio of {_CODA_ROUNDS} rounds, {LAYERS} layers of base width, 1 x 512, packed, {CORES} threads"


def _against_dense(keys: str) -> Row:
    config = coda_config(keys)
    bundle = coda_bundle(config, _REDUCTIONS)
    times = _times({"dense": (bundle, coda_submodel(config, 1)), "quarter": (bundle, coda_submodel(config, 4))})
    speed, predicted = ratio(times, "dense", "quarter"), predicted_ratio(config, 512, 128)
    return Row(
        f"CODA {keys}: reduction 4 over the dense adapter model of the same checkpoint",
        f"{speed:.2f}x, {speed / predicted:.2f} of the {predicted:.2f}x predicted by multiplications "
        f"(best {min(times['quarter']):.0f} against {min(times['dense']):.0f} ms)",
        f">= {_OF_PREDICTED} of it",
        speed >= _OF_PREDICTED * predicted,
        _how(),
    )


def _router(keys: str) -> Row:
    """Against the same layers that take the first k tokens: scores, rounds, gates and TopK together."""
    soft, first = coda_config(keys), coda_config(keys, "first_k")
    bundles = {"soft": coda_bundle(soft, _REDUCTIONS), "first": coda_bundle(first, (4,))}
    engines = {name: (bundle, coda_submodel(soft, 4)) for name, bundle in bundles.items()}
    share = 1 - 1 / ratio(_times(engines), "soft", "first")
    return Row(
        f"CODA {keys}: the router of {soft.soft_top_k.rounds if soft.soft_top_k else 0} rounds, of a layer's time",
        f"{100 * share:.1f} %",
        f"<= {100 * _ROUTER_SHARE:.0f} %",
        share <= _ROUTER_SHARE,
        f"over layers that take the first tokens; {_how()}",
    )


def _against_eager(keys: str) -> Row:
    config = coda_config(keys)
    model = load_model(coda_folder(config))
    model.reduction = 4
    with packed(coda_bundle(config, _REDUCTIONS), coda_submodel(config, 4), BUCKET) as ours:
        ours.feeds["attention_mask"][:] = 1
        calls = {"eager": eager_call(model, ours.feeds), "ours": lambda: ours.runner.run(ours.feeds)}
        times = interleaved(calls, _CODA_ROUNDS, 3)
    return speed_row(f"CODA {keys}: engine against PyTorch eager, reduction 4", times, "eager", "ours", 1, _how())


_TASKS, _REDUCTION = 10, 4
_BUCKET = Bucket(1, 128)
_TASKS_ROUNDS, _SWITCHES = 12, 600
_WEIGHT, _SWITCH_US, _SPEED = 1.02, 50.0, 0.95


@benchmark
def bench_tasks() -> list[Row]:
    """Ten tasks on one CODA encoder of base width: what they weigh over the base, and what another task costs."""
    return [_bytes(), _memory(), _switch(), _speed()]


def _config() -> CodaConfig:
    preset = PRESETS["coda-t5-base-k-to-all"]
    return replace(preset, num_hidden_layers=LAYERS, vocab_size=WORDS, reduction=_REDUCTION, reductions=(_REDUCTION,))


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


def _tasks_size(path: Path) -> int:
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
        f"{how}; CODA, {LAYERS} layers of base width, reduction {_REDUCTION}",
    )


def _bytes() -> Row:
    return _over("bytes of the bundle", _tasks_size(_bundle(True)), _tasks_size(_bundle(False)), "all files")


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
        times = interleaved(calls, _TASKS_ROUNDS)
    how = f"median ratio of {_TASKS_ROUNDS} interleaved rounds, 1 x 128, packed, {CORES} threads"
    figure = "an engine that takes tasks, over the same compiled without"
    return speed_row(figure, times, "plain", "ours", _SPEED, how)
