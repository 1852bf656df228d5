"""Early exits: the chain against whole engines and PyTorch, and calibrated budgets on texts never seen before."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch

from .. import load
from ..bucket import Bucket
from ..bundle.entries.engine_entry import EngineEntry
from ..bundle.open_bundle import Bundle, open_bundle
from ..compiler.compile import compile_bundle
from ..errors import CheckpointError
from ..examples.commands import is_made_from
from ..examples.cost_eff.texts import read_jsonl
from ..exporters.source import open_source
from ..exporters.universal import load_universal
from ..profiles.load_profile import load_profile
from ..runtime.answer import Answer
from ..runtime.calibrate.calibrate import calibrate
from ..runtime.calibrate.data import read_data, split
from ..runtime.calibrate.measure import measured_figure, spread, time_in_turns
from ..runtime.calibrate.simulate import parse_budget
from ..runtime.exits.calibration import CalibratedPolicy
from ..runtime.exits.choice import OFF, RequestedExits
from ..runtime.exits.policy import ExitPolicy, closed
from ..runtime.inputs.arrays import Array, random_feeds
from ..runtime.inputs.text import TextEncoder
from ..runtime.model import ElasticModel
from .harness import CACHE, Row, benchmark, interleaved, milliseconds, ratio
from .subjects import CORES

# Texts are cut to 64 tokens, as they were in training; published costs are of 128.
SEQUENCE, LONGEST = 64, 128
FOLDER = Path("demo/exits")  # where `make demo-exits` trains
BATCHES = (1, 8, 32)
EXITS = (2, 4, 6)
# Between the batches of requests stand those to which survivors shrink.
_BUCKETS = (
    *(Bucket(batch, sequence) for sequence in (32, SEQUENCE) for batch in (1, 2, 4, 8, 16, 32)),
    *(Bucket(batch, LONGEST) for batch in BATCHES),
)


def model_folder() -> Path:
    """The slender model of ``make demo-exits``. Raises CheckpointError if it was not trained yet."""
    folder = FOLDER / "slender"
    if not folder.exists():
        raise CheckpointError(f"{folder}: not trained yet; `make demo-exits` trains it (about 10 minutes, once)")
    return folder


@cache
def exits_bundle() -> Bundle:
    """The slender model cut at three exits, for every batch to which requests may shrink; once per training."""
    path = CACHE / "exits.bundle"
    if path.exists() and not is_made_from(path, model_folder()):
        shutil.rmtree(path)
    if not path.exists():
        profile = replace(load_profile("host-cpu"), buckets=_BUCKETS, budgets={})
        compile_bundle(model_folder(), profile, path, exits=EXITS, levels={"depth": (1.0,)}, include="budgets")
    return open_bundle(path)


def whole_engine(bundle: Bundle, bucket: Bucket) -> EngineEntry:
    """The engine without exits at ``bucket``."""
    return next(e for e in bundle.manifest.engines if e.segment is None and e.bucket == bucket)


def requests(bundle: Bundle, batch: int, count: int, source: str = "test") -> list[dict[str, Any]]:
    """Real texts as ``count`` requests of ``batch`` rows, cut to the bucket's length and padded to the longest row."""
    entry = bundle.manifest.text
    assert entry is not None
    encoder = TextEncoder(bundle.file(entry.file), entry, bundle.manifest.inputs)
    texts = [each.text for each in read_jsonl(FOLDER / f"{source}.jsonl")]
    picked = [texts[(start * batch) % (len(texts) - batch) :][:batch] for start in range(count)]
    return [dict(encoder.encode(part, SEQUENCE, truncate=True).feeds) for part in picked]


def unseen(bundle: Bundle) -> list[dict[str, Any]]:
    """Every text that neither training nor the search for thresholds saw, as requests of one row: the part of the
    calibration texts that is held out, and the test texts, which come from other modules."""
    whole = [
        read_data(FOLDER / f"{source}.jsonl", bundle, SEQUENCE, truncate=True) for source in ("calibration", "test")
    ]
    held_out = split(whole[0])[1]
    assert held_out is not None
    return [
        {name: array[[row], :length] for name, array in part.feeds.items()}
        for part in (held_out, whole[1])
        for row, length in enumerate(part.lengths)
    ]


def calibrated(bundle: Bundle, budget: str, batch: int = 1) -> CalibratedPolicy:
    """A policy for ``budget``, found on the calibration texts on this host."""
    data = FOLDER / "calibration.jsonl"
    return calibrate(bundle, data, parse_budget(budget), batch=batch, name="bench", truncate=True)


@cache
def half_the_flops() -> CalibratedPolicy:
    """The policy under which a text costs half of the FLOPs that the whole engine takes at the text's own bucket."""
    bundle = exits_bundle()
    lengths = [feeds["input_ids"].shape[1] for feeds in requests(bundle, 1, 500, "calibration")]
    whole = [whole_engine(bundle, Bucket(1, 32 if length <= 32 else SEQUENCE)).flops for length in lengths]
    return calibrated(bundle, f"mean_flops<={0.5 * mean(whole):.4g}")


_CHAIN_ROUNDS = {1: 60, 8: 30, 32: 15}


@benchmark
def bench_exit_chain() -> list[Row]:
    """The chain with every exit closed against the monolithic engine of the same model."""
    bundle = exits_bundle()
    with load(bundle.path, residency="packed") as model:
        return [_exit_chain_row(model, batch) for batch in BATCHES]


def _exit_chain_row(model: ElasticModel, batch: int) -> Row:
    feeds = random_feeds(model.bundle.manifest.inputs, Bucket(batch, LONGEST))
    feeds["attention_mask"][:] = 1
    policy = closed(len(EXITS))
    calls = {"whole": lambda: model(feeds, exits=OFF), "chain": lambda: model(feeds, exits=policy)}
    times = interleaved(calls, _CHAIN_ROUNDS[batch])
    slower = 1 / ratio(times, "whole", "chain")
    return Row(
        f"chain with exits closed over one engine, batch {batch}",
        f"{slower:.3f}x (best {min(times['chain']):.2f} against {min(times['whole']):.2f} ms)",
        "<= 1.03x",
        slower <= 1.03,
        f"median ratio of {_CHAIN_ROUNDS[batch]} rounds, slender MiniLM, {len(EXITS)} exits, {LONGEST} tokens",
    )


_SAVED_REQUESTS = {1: 200, 8: 60, 32: 25}
_SAVED_RUNS = 5


@benchmark
def bench_exit_saving() -> list[Row]:
    """Time that a calibrated chain saves against the FLOPs that it saves, on real texts."""
    bundle, policy = exits_bundle(), half_the_flops().policy()
    engines = {engine.id: engine for engine in bundle.manifest.engines}
    rows = []
    with load(bundle.path, residency="packed") as model:
        for batch in BATCHES:
            whole_ms = chain_ms = whole_flops = chain_flops = 0.0
            for feeds in requests(bundle, batch, _SAVED_REQUESTS[batch]):
                whole, chain = model(feeds, exits=OFF), model(feeds, exits=policy)
                assert chain.exits is not None
                chain_flops += float(chain.exits.flops.sum())
                whole_flops += batch * engines[whole.engine].flops / whole.bucket.batch
                calls = [partial(model, feeds, exits=way) for way in (OFF, policy)]
                pairs = [[milliseconds(call) for call in calls] for _ in range(_SAVED_RUNS)]
                whole_ms += median(pair[0] for pair in pairs)
                chain_ms += median(pair[1] for pair in pairs)
            time_saved, flops_saved = 1 - chain_ms / whole_ms, 1 - chain_flops / whole_flops
            rows.append(
                Row(
                    f"calibrated chain, batch {batch}: time saved over FLOPs saved",
                    f"{time_saved / flops_saved:.2f} ({time_saved:.1%} of the time, {flops_saved:.1%} of the FLOPs)",
                    ">= 0.9",
                    time_saved >= 0.9 * flops_saved,
                    f"{_SAVED_REQUESTS[batch]} requests of test texts at their own lengths, medians of {_SAVED_RUNS} "
                    "interleaved runs; thresholds calibrated to half of the FLOPs at batch 1",
                )
            )
    return rows


_LOOP_REQUESTS = {1: 100, 32: 10}
_LOOP_ROUNDS = 7


@benchmark
def bench_exit_eager() -> list[Row]:
    """The calibrated chain against an early-exit loop in PyTorch eager, at equal thresholds."""
    module: Any = load_universal(open_source(model_folder())).module.model
    torch.set_num_threads(CORES)
    with load(exits_bundle().path, residency="packed") as model:
        return [_exit_eager_row(model, module, batch) for batch in (1, 32)]


def _exit_eager_row(model: ElasticModel, module: Any, batch: int) -> Row:
    policy = half_the_flops().policy()
    asked = requests(model.bundle, batch, _LOOP_REQUESTS[batch])
    tensors = [[torch.from_numpy(array) for array in feeds.values()] for feeds in asked]
    eager = [partial(_eager, module, inputs, policy.thresholds) for inputs in tensors]
    chain = [partial(model, feeds, exits=policy) for feeds in asked]
    same = sum(_equal_layers(theirs(), ours()) for theirs, ours in zip(eager, chain, strict=True))
    # In blocks with a pause between, as every benchmark here: threads of one still spin when the other begins.
    times = interleaved({"eager": partial(_all, eager), "chain": partial(_all, chain)}, _LOOP_ROUNDS, runs=1)
    speed, rows = ratio(times, "eager", "chain"), batch * len(asked)
    return Row(
        f"calibrated chain against an eager early-exit loop, batch {batch}",
        f"{speed:.2f}x; {same} of {rows} rows leave at the same layer",
        ">= 2x" if batch == 1 else "works",
        speed >= 2 if batch == 1 else same >= 0.99 * rows,
        f"{len(asked)} requests of test texts at their own lengths, median of {_LOOP_ROUNDS} rounds in turns; the loop "
        f"drops rows that left; {CORES} threads each",
    )


def _all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _equal_layers(theirs: tuple[torch.Tensor, torch.Tensor], ours: Answer) -> int:
    assert ours.exits is not None
    return int((theirs[1].numpy() == ours.exits.layer).sum())


@torch.inference_mode()
def _eager(
    module: Any, tensors: list[torch.Tensor], thresholds: tuple[float, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``[B, C]`` and layers ``[B]``: what people write, one segment after the other, rows that left dropped."""
    ids, mask, types = tensors
    hidden = module.embeddings(ids, types)
    logits = torch.empty(len(ids), module.architecture.exits.classes)
    layers = torch.full((len(ids),), EXITS[-1])
    live = torch.arange(len(ids))
    for first, last, threshold in zip((0, *EXITS), EXITS, (*thresholds, float("inf")), strict=False):
        hidden = module.states_from(hidden, mask, first, last)[-1]
        found, entropy = module.answer(last, hidden, mask)
        leaves = entropy <= threshold
        logits[live[leaves]], layers[live[leaves]] = found[leaves], last
        if bool(leaves.all()):
            break
        if bool(leaves.any()):
            hidden, mask, live = hidden[~leaves], mask[~leaves], live[~leaves]
    return logits, layers


_SHARES = (0.5, 0.7)
_MEAN = "mean_latency_ms"


@benchmark
def bench_exit_budget() -> list[Row]:
    """Calibrated mean latency, measured anew on texts that the search never saw, against the share requested.

    The machine itself gets faster and slower by more than the bar between the two. So the budget is a share of the
    whole engine's latency, and both times the chain and the whole engine are timed in turns."""
    bundle = exits_bundle()
    texts = unseen(bundle)
    with load(bundle.path, residency="packed") as model:
        return [_exit_budget_row(model, bundle, texts, share) for share in _SHARES]


def _exit_budget_row(model: ElasticModel, bundle: Bundle, texts: Sequence[Mapping[str, Array]], share: float) -> Row:
    calibrated_to = calibrated(bundle, f"{_MEAN}<={100 * share:g}%")
    policy = calibrated_to.policy()
    timed = [texts[number] for number in _spread(model, texts, policy)]
    whole, chain = _times(model, timed, [OFF, policy])

    found = measured_figure(chain, _MEAN) / measured_figure(whole, _MEAN)
    off = found / share - 1
    fitted = calibrated_to.measured.costs.mean_latency_ms / calibrated_to.whole.costs.mean_latency_ms
    # Chance of texts drawn at random, as many as calibrated and as many as check.
    of_a_text = np.std(np.median(chain, axis=0) - found * np.median(whole, axis=0)) / np.median(whole, axis=0).mean()
    chance = of_a_text * np.sqrt(1 / calibrated_to.measured.rows + 1 / len(texts)) / share
    return Row(
        f"calibrated latency against a budget of {share:.0%} of the whole engine",
        f"{off:+.1%} ({found:.1%} of the whole engine)",
        "within 5 %",
        abs(off) <= 0.05,
        f"mean over {len(timed)} texts that stand for the {len(texts)} unseen, in turns, batch 1; thresholds found on "
        f"{calibrated_to.measured.rows} texts, measured there as {fitted:.1%}; by the draw of texts alone "
        f"a standard deviation of {chance:.1%}",
    )


def _spread(model: ElasticModel, texts: Sequence[Mapping[str, Array]], policy: ExitPolicy) -> Array:
    """The numbers of texts that leave where all do, at the lengths that all have."""
    answers = [model(feeds, exits=policy) for feeds in texts]
    lengths = [answer.bucket.sequence for answer in answers]
    exits = [answer.exits.index[0] if answer.exits else -1 for answer in answers]
    return spread(np.array(exits), np.array(lengths))


def _times(model: ElasticModel, texts: Sequence[Mapping[str, Array]], ways: Sequence[RequestedExits]) -> list[Array]:
    """Milliseconds ``[rounds, texts]`` of each way, in turns."""
    calls = [[partial(model, feeds, exits=way) for feeds in texts] for way in ways]
    return time_in_turns(calls, lambda *_: None, "")
