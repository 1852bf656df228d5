"""Generation: tokens a second against other runtimes, and what a step costs beside its engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import sleep

import numpy as np

from .. import load
from ..bundle.entries.generation_entry import GenerationEntry
from ..profiles.precision import Precision
from ..runtime.generation.cache import Cache
from ..runtime.generation.cached_engine import CachedEngine
from ..runtime.model import ElasticModel
from .harness import Row, benchmark, milliseconds
from .peers import (
    Generate,
    Timed,
    genai,
    llama_bundle,
    llama_folder,
    llama_halves_bundle,
    openvino,
    tiny_llama_bundle,
    transformers,
)
from .subjects import CORES

_GEN_ROUNDS, _GEN_PAUSE = 7, 0.3
_GEN_PROMPT, _GEN_NEW = 64, 64
_LONG_PROMPT = 256
_ROWS = 32
_CAPACITIES, _VALID = (256, 4096), 100
_STEPS = 60
_BESIDE_US, _CHANGE_US = 60, 50


@benchmark
def bench_generate() -> list[Row]:
    """Tokens a second of one row and of many, against others; what a step costs beside the engine, and by capacity."""
    others = {"transformers": transformers(llama_folder())}
    peer = openvino(llama_folder())
    if peer is not None:
        others["OpenVINO"] = peer
    rows = [*_against_others("fp32", others), *_against_others("int4", {})]
    with load(llama_halves_bundle(), threads=CORES) as model:
        return [*rows, _many_rows(model), _by_capacity(model), _changing(model), _beside()]


def _against_others(precision: Precision, others: dict[str, Generate]) -> list[Row]:
    """Ours over each of the ``others`` and ONNX Runtime GenAI, in turns."""
    prompt = _ids(_LONG_PROMPT)
    peer = genai(llama_folder(), precision)
    if peer is not None:
        others = {**others, "onnxruntime-genai": peer}
    if not others:
        return []
    with load(llama_bundle(precision), threads=CORES) as model:
        calls: dict[str, Generate] = {"ours": lambda ids, tokens: _generated(model, ids, tokens), **others}
        times = _in_turns(calls, prompt[:_GEN_PROMPT], _GEN_NEW)
        firsts = _in_turns(calls, prompt, 2)
    how = f"{_GEN_ROUNDS} rounds in turn, medians, {CORES} threads, Llama shape of 100 M parameters, {precision}"
    rows = []
    for name in others:
        steps = [median(b.step_ms) / median(a.step_ms) for a, b in zip(times["ours"], times[name], strict=True)]
        first = [b.first_ms / a.first_ms for a, b in zip(firsts["ours"], firsts[name], strict=True)]
        ours = median(median(timed.step_ms) for timed in times["ours"])
        rows += [
            Row(
                f"tokens per second over {name}, {precision}, prompt of {_GEN_PROMPT}",
                f"{median(steps):.2f}x ({1e3 / ours:.1f} tokens/s)",
                ">= 1.00x",
                median(steps) >= 1,
                how,
            ),
            Row(
                f"time to the first token of {_LONG_PROMPT}, {name} over ours, {precision}",
                f"{median(first):.2f}x",
                ">= 1.00x",
                median(first) >= 1,
                how,
            ),
        ]
    return rows


def _many_rows(model: ElasticModel) -> Row:
    one, many = [], []
    for _ in range(_GEN_ROUNDS):
        one.append(median(_generated(model, _ids(_GEN_PROMPT), _STEPS).step_ms))
        found = model.generate([_ids(_GEN_PROMPT, row) for row in range(_ROWS)], max_tokens=_STEPS, stop=[])
        many.append(median(found.rows[0].token_ms))
    rate = median(_ROWS * a / b for a, b in zip(one, many, strict=True))
    how = f"{_GEN_ROUNDS} rounds in turn, medians of {_STEPS} steps"
    return Row(f"tokens per second of {_ROWS} rows together, over one row", f"{rate:.1f}x", ">= 6x", rate >= 6, how)


def _by_capacity(model: ElasticModel) -> Row:
    small, large = (_engine(model, capacity) for capacity in _CAPACITIES)
    ratios = _ratios(lambda: small.step([5], [_VALID]), lambda: large.step([5], [_VALID]))
    figure = f"a step at capacity {_CAPACITIES[1]}, {_VALID} valid tokens, over capacity {_CAPACITIES[0]}"
    how = f"medians of {_STEPS} steps, {_GEN_ROUNDS} rounds in turn"
    return Row(figure, f"{ratios:.3f}x", "<= 1.05x", ratios <= 1.05, how)


def _beside() -> Row:
    """Time of ``generate`` for a token beyond the engine's own step at the same places."""
    differences = []
    with load(tiny_llama_bundle(), threads=1) as model:
        engine, ids = _engine(model, 256, "ffn64"), _ids(_GEN_PROMPT)
        for _ in range(_GEN_ROUNDS):
            sleep(_GEN_PAUSE)
            whole = _generated(model, ids, _STEPS).step_ms
            engine.extend(0, ids, 0, [])
            alone = [milliseconds(partial(engine.step, [5], [at])) for at in range(_GEN_PROMPT, _GEN_PROMPT + _STEPS)]
            differences.append(1e3 * (median(whole) - median(alone)))
    beside = median(differences)
    how = (
        f"medians of {_STEPS} tokens, {_GEN_ROUNDS} rounds in turn; greedy, one layer of 64 and 32,000 tokens, 1 thread"
    )
    return Row("work beside the engine per token", f"{beside:.0f} us", "<= 60 us", beside <= _BESIDE_US, how)


def _changing(model: ElasticModel) -> Row:
    """Two submodels on one cache, each twice and then the other: the first step of the two over the second."""
    cache = Cache.empty(_entry(model).layers, 1, 256)
    engines = [_engine(model, 256, submodel, cache) for submodel in ("ffn2048", "ffn1024")]
    rounds = []
    for _ in range(_GEN_ROUNDS):
        sleep(_GEN_PAUSE)
        differences = []
        for _ in range(_STEPS):
            for engine in engines:
                changed, same = (milliseconds(partial(engine.step, [5], [_VALID])) for _ in range(2))
                differences.append(1e3 * (changed - same))
        rounds.append(median(differences))
    change = median(rounds)
    how = f"{_GEN_ROUNDS} rounds, each the median of {2 * _STEPS} differences between steps that follow each other"
    figure = "changing the submodel between two tokens, over not changing it"
    measured = f"{change:.0f} us ({min(rounds):.0f} to {max(rounds):.0f})"
    return Row(figure, measured, f"<= {_CHANGE_US} us", change <= _CHANGE_US, how)


def _in_turns(calls: dict[str, Generate], prompt: Sequence[int], tokens: int) -> dict[str, list[Timed]]:
    times: dict[str, list[Timed]] = {name: [] for name in calls}
    for round_number in range(_GEN_ROUNDS + 1):
        for name, call in calls.items():
            sleep(_GEN_PAUSE)
            timed = call(prompt, tokens)
            if round_number:  # the first warms everything up
                times[name].append(timed)
    return times


def _generated(model: ElasticModel, prompt: Sequence[int], tokens: int) -> Timed:
    row = model.generate(list(prompt), max_tokens=tokens, stop=[]).rows[0]
    return Timed(row.prompt_ms, list(row.token_ms))


def _ratios(ours: Callable[[], object], theirs: Callable[[], object]) -> float:
    found = []
    for _ in range(_GEN_ROUNDS):
        sleep(_GEN_PAUSE)
        base, other = (median(milliseconds(call) for _ in range(_STEPS)) for call in (ours, theirs))
        found.append(other / base)
    return median(found)


def _entry(model: ElasticModel) -> GenerationEntry:
    entry = model.bundle.manifest.generation
    assert entry is not None
    return entry


def _engine(model: ElasticModel, capacity: int, submodel: str = "ffn2048", cache: Cache | None = None) -> CachedEngine:
    """The very session that generates, on a cache whose first tokens are written."""
    entry = _entry(model)
    model.generate(_ids(_GEN_PROMPT), max_tokens=2, submodel=submodel)
    engine = next(engine for engine in entry.engines if engine.submodel == submodel)
    runner = model.generate._engines.get(engine)
    cached = CachedEngine(runner, engine, entry, cache or Cache.empty(entry.layers, 1, capacity))
    cached.extend(0, _ids(_VALID), 0, [])
    return cached


def _ids(count: int, seed: int = 0) -> list[int]:
    return [int(number) for number in np.random.default_rng(seed).integers(3, 32_000, count)]
