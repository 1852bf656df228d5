"""Generation: tokens a second against other runtimes, and what a step costs beside its engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

import numpy as np
import torch

from .. import load
from ..bucket import Bucket
from ..bundle.entries.generation_entry import GenerationEntry
from ..compiler.compile import compile_bundle
from ..exporters.checkpoints.own_folder import save_model
from ..exporters.families.mhe.config import PRESETS, MheDecoderConfig
from ..exporters.families.mhe.model import MheDecoder
from ..profiles.budget import BudgetSpec
from ..profiles.precision import Precision
from ..runtime.generation.cache import Cache
from ..runtime.generation.cached_engine import CachedEngine
from ..runtime.generation.row import DraftedTokens, GeneratedRow
from ..runtime.model import ElasticModel
from .harness import CACHE, Row, benchmark, milliseconds
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
from .subjects import CORES, elsewhere

_GEN_ROUNDS, _GEN_PAUSE = 7, 0.3
_GEN_PROMPT, _GEN_NEW = 64, 64
_LONG_PROMPT = 256
_ROWS = 32
_CAPACITIES, _VALID = (256, 4096), 100
_STEPS = 60
_BESIDE_US, _CHANGE_US = 60, 50
# Another program: computes for so many seconds, sleeps for so many, again and again.
_PROGRAM = """
import sys, time
burst, pause = map(float, sys.argv[1:])
while True:
    end = time.perf_counter() + burst
    while time.perf_counter() < end:
        pass
    time.sleep(pause)
"""
_PROGRAMS = {"keeps one core busy": (0.1, 0.0), "computes 3 of every 9 ms": (0.003, 0.006)}


@benchmark
def bench_generate() -> list[Row]:
    """Tokens a second of one row and of many, against others; what a step costs beside the engine, and by capacity."""
    others = {"transformers": transformers(llama_folder())}
    peer = openvino(llama_folder())
    if peer is not None:
        others["OpenVINO"] = peer
    rows = [*_against_others("fp32", others), *_on_a_busy_host()]
    rows += _against_others("int4", {})
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


def _on_a_busy_host() -> list[Row]:
    """Ours over ONNX Runtime GenAI while another program wants the cores, and how far apart the calls of each are."""
    peer = genai(llama_folder(), "fp32")
    if peer is None:
        return []
    rows = []
    with load(llama_bundle("fp32"), threads=CORES) as model:
        calls: dict[str, Generate] = {"ours": lambda ids, tokens: _generated(model, ids, tokens), "theirs": peer}
        for name, (burst, pause) in _PROGRAMS.items():
            with _another_program(burst, pause):
                times = _in_turns(calls, _ids(_GEN_PROMPT), _GEN_NEW)
            ours, theirs = ([1e3 / median(timed.step_ms) for timed in times[who]] for who in ("ours", "theirs"))
            rate = median(a / b for a, b in zip(ours, theirs, strict=True))
            spread, other = ((max(rates) - min(rates)) / median(rates) for rates in (ours, theirs))
            how = f"{_GEN_ROUNDS} rounds in turn, medians, {CORES} threads, Llama shape of 100 M parameters, fp32"
            beside = f"while another program {name}"
            figure = f"tokens per second over onnxruntime-genai {beside}"
            rows.append(Row(figure, f"{rate:.2f}x ({median(ours):.1f} tokens/s)", ">= 1.00x", rate >= 1, how))
            figure = f"spread of the rounds {beside}, (max - min) / median"
            rows.append(Row(figure, f"{spread:.0%} (genai {other:.0%})", "<= genai's", spread <= other, how))
    return rows


@contextmanager
def _another_program(burst_s: float, pause_s: float) -> Iterator[None]:
    program = subprocess.Popen([sys.executable, "-c", _PROGRAM, str(burst_s), str(pause_s)])
    try:
        yield
    finally:
        program.kill()
        program.wait()


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


_WAYS: dict[str, dict[str, Any]] = {
    "ffn1024, 2 a run": {"draft": "ffn1024", "drafted": 2},
    "n-gram, 4 a run": {"draft": "n-gram", "drafted": 4},
    "auto": {"draft": "auto"},
}
# Least speed of `auto`: the cost of turning itself off.
_LEAST_OF_AUTO = 0.95


@benchmark
def bench_draft() -> list[Row]:
    """Tokens a second of one row with drafts over those without, on random weights: what a draft and its checks take is
    real, how much of it is accepted says nothing of a trained model."""
    ids = _ids(_GEN_PROMPT)
    with load(llama_halves_bundle(), threads=CORES) as model:
        rounds = [_round(model, ids) for _ in range(_GEN_ROUNDS + 1)][1:]  # the first opens and warms everything
    rows = []
    for way in _WAYS:
        how = (
            f"{_GEN_ROUNDS} rounds in turn, {_GEN_NEW} greedy tokens, {CORES} threads, Llama of 100 M parameters, "
            f"random weights; last round: {_accepted(rounds[-1][way].drafts)}"
        )
        ratio = median(_rate(found[way]) / _rate(found[""]) for found in rounds)
        same = all(found[way].tokens == found[""].tokens for found in rounds)
        bar, reached = ("same text", same)
        if way == "auto":
            bar, reached = f"same text, >= {_LEAST_OF_AUTO}x", same and ratio >= _LEAST_OF_AUTO
        rows.append(Row(f"tokens per second drafted by {way}, over none", f"{ratio:.2f}x", bar, reached, how))
    return rows


def _round(model: ElasticModel, ids: list[int]) -> dict[str, GeneratedRow]:
    """One text in each way; without a draft it is called "" ."""
    found = {}
    for way, options in {"": {}, **_WAYS}.items():
        sleep(_GEN_PAUSE)
        found[way] = model.generate(ids, max_tokens=_GEN_NEW, stop=[], **options).rows[0]
    return found


def _rate(row: GeneratedRow) -> float:
    assert row.tokens_per_second is not None
    return row.tokens_per_second


def _accepted(drafts: tuple[DraftedTokens, ...]) -> str:
    each = [f"{one.accepted} of {one.drafted} tokens of {one.draft} in {one.runs} runs" for one in drafts]
    return ", ".join(each) or "nothing drafted"


_LONG_VALID, _LONG_NEW, _POSITIONS = 2048, 32, 2304
_LONG_ROUNDS = 5
_LONG_FASTER = 1.5


@benchmark
def bench_mhe_decode() -> list[Row]:
    """Tokens a second behind a long text: a decoder with MHE attention against one with ordinary heads."""
    with load(_mhe_bundle("mhe-mul"), threads=CORES) as ours, load(_mhe_bundle("mha"), threads=CORES) as other:
        steps = [(_long_step_ms(ours), _long_step_ms(other)) for _ in range(_LONG_ROUNDS)]
    speed = median(theirs / own for own, theirs in steps)
    rates = [1e3 / median(each) for each in zip(*steps, strict=True)]
    return [
        Row(
            f"tokens per second of mhe_mul over mha, {_LONG_VALID} valid tokens",
            f"{speed:.2f}x ({rates[0]:.1f} against {rates[1]:.1f} tokens/s)",
            f">= {_LONG_FASTER}x",
            speed >= _LONG_FASTER,
            f"{_LONG_ROUNDS} rounds in turn, medians of {_LONG_NEW} greedy tokens, decoders of base shape, "
            f"random weights, {CORES} threads",
        )
    ]


def _long_step_ms(model: ElasticModel) -> float:
    sleep(_GEN_PAUSE)
    prompt = np.random.default_rng(0).integers(3, 50_000, _LONG_VALID).tolist()
    return median(model.generate(prompt, max_tokens=_LONG_NEW, stop=[]).rows[0].token_ms)


def _mhe_bundle(kind: str) -> Path:
    path, folder = CACHE / f"{kind}-decoder.bundle", CACHE / f"{kind}-decoder-checkpoint"
    if not folder.exists():
        preset = PRESETS[f"{kind}-decoder-base"]
        assert isinstance(preset, MheDecoderConfig)
        config = replace(preset, max_position_embeddings=_POSITIONS, elastic_heads=False)
        torch.manual_seed(0)
        save_model(MheDecoder(config), config, folder)
    if not path.exists():
        device = replace(elsewhere(), buckets=(Bucket(1, 16),), budgets={"full": BudgetSpec()})
        compile_bundle(folder, device, path, include="budgets", generate=True)
    return path
