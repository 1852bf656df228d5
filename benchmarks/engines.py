"""Engines: speed, memory and opening, against plain exports, default sessions and PyTorch eager."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import exp
from pathlib import Path
from statistics import median
from time import sleep

import numpy as np
from torch.export import Dim

from ..bucket import Bucket
from ..bundle.open_bundle import Bundle, open_bundle
from ..compiler.compile import compile_bundle
from ..compiler.examples.corpus import read_corpus
from ..examples.encoder.corpus import demo_checkpoint, write_corpus
from ..examples.matformer.fit import Run, train
from ..examples.matformer.train import TASKS
from ..exporters.source import open_source
from ..exporters.universal import load_universal
from ..profiles.budget import BudgetSpec
from ..profiles.precision import Precision
from ..runtime.consistency.measure import consistency
from ..runtime.engines.measure import memory_use
from ..runtime.engines.runner import runner_for
from ..runtime.inputs.arrays import Array
from ..runtime.load import load
from .harness import CACHE, Row, benchmark, interleaved, milliseconds, speed_row
from .subjects import (
    BUCKET,
    CORES,
    Subject,
    bert_base,
    bert_base_bundle,
    default_session,
    eager_call,
    elsewhere,
    export_plain,
    minilm,
    minilm_bundle,
    minilm_range_bundle,
    packed,
)


@benchmark
def bench_packed() -> list[Row]:
    """Our packed engine against the plain export of the same submodel in a default session."""
    return [
        _packed_row(bert_base(), bert_base_bundle(), "ffn3072-heads12", rounds=15),
        _packed_row(bert_base(), bert_base_bundle(), "ffn1536-heads6", rounds=20),
        _packed_row(minilm(), minilm_bundle(), "ffn1536-heads12", rounds=40),
        _packed_row(minilm(), minilm_bundle(), "ffn768-heads6", rounds=60),
    ]


def _packed_row(subject: Subject, bundle: Path, submodel: str, rounds: int) -> Row:
    plain = default_session(subject.plain(submodel))
    with packed(bundle, submodel) as ours:
        calls = {"plain": lambda: plain.run(None, ours.feeds), "ours": lambda: ours.runner.run(ours.feeds)}
        times = interleaved(calls, rounds)
    how = f"median ratio of {rounds} interleaved rounds, 1x128, {CORES} threads"
    return speed_row(f"packed {subject.name} {submodel}, over its plain export", times, "plain", "ours", 0.98, how)


@benchmark
def bench_eager() -> list[Row]:
    """Our packed engine against PyTorch eager."""
    return [_eager_row(bert_base(), bert_base_bundle(), rounds=12), _eager_row(minilm(), minilm_bundle(), rounds=30)]


def _eager_row(subject: Subject, bundle: Path, rounds: int) -> Row:
    eager = eager_call(subject.model.module, subject.feeds())
    with packed(bundle, subject.model.spec.universal().id) as ours:
        times = interleaved({"eager": eager, "ours": lambda: ours.runner.run(ours.feeds)}, rounds)
    how = f"median ratio of {rounds} interleaved rounds, batch 1, 128 tokens, {CORES} threads each"
    return speed_row(f"engine against PyTorch eager, {subject.name}", times, "eager", "ours", 1.8, how)


_BUCKETS = (Bucket(1, 32), Bucket(1, 128), Bucket(8, 128))
# 4 bits are for memory, and must cost no time.
_SPEED: Mapping[Precision, float] = {"int8": 1.3, "int8-dynamic": 1.3, "int4": 1.0}
_ROUNDS = 25


@benchmark
def bench_precision() -> list[Row]:
    """Integer engines of the real MiniLM against its fp32 engine: time, bytes of weights, and what is lost on texts;
    and what 4 bits cost a language model."""
    rows: list[Row] = []
    for precision in _SPEED:
        bundle = open_bundle(_bundle(precision))
        rows += [_speed(bundle, precision, bucket) for bucket in _BUCKETS]
        rows.append(_weight(bundle, precision))
    return [*rows, _against_eager(), _perplexity()]


def _bundle(precision: Precision) -> Path:
    """The universal model in fp32 and in ``precision``, calibrated and judged on docstrings of Python."""
    path, texts = CACHE / f"minilm-{precision}.bundle", CACHE / "docstrings.txt"
    if not path.exists():
        if not texts.exists():
            write_corpus(texts)
        profile = replace(elsewhere(), buckets=_BUCKETS, budgets={"full": BudgetSpec()})
        levels = dict.fromkeys(open_source(demo_checkpoint()).spec.kinds, (1.0,))
        compile_bundle(demo_checkpoint(), profile, path, text=texts, levels=levels, precisions=("fp32", precision))
    return path


def _pair(bundle: Bundle) -> tuple[str, str]:
    """The ids of the narrow and of the wide submodel."""
    narrow, wide = sorted(bundle.manifest.submodels, key=lambda entry: entry.weight_bytes)
    return narrow.id, wide.id


def _speed(bundle: Bundle, precision: Precision, bucket: Bucket) -> Row:
    narrow, wide = _pair(bundle)
    with ExitStack() as stack:
        runners = {name: stack.enter_context(packed(bundle.path, name, bucket)) for name in (narrow, wide)}
        calls = {name: (lambda one=one: one.runner.run(one.feeds)) for name, one in runners.items()}
        times = interleaved(calls, _ROUNDS)
    how = f"median ratio of {_ROUNDS} interleaved rounds, both packed, {CORES} threads"
    figure = f"MiniLM in {precision} against fp32, {bucket.batch} x {bucket.sequence}"
    return speed_row(figure, times, wide, narrow, _SPEED[precision], how)


def _weight(bundle: Bundle, precision: str) -> Row:
    narrow, wide = (bundle.manifest.submodel(name) for name in _pair(bundle))
    share = narrow.weight_bytes / wide.weight_bytes
    quality = narrow.quality
    assert quality is not None, "the bundle was compiled with texts"
    shown = ", ".join(f"{name} {value:.4f}" for name, value in quality.figures.items())
    return Row(
        f"weights of MiniLM in {precision}",
        f"{share:.3f}x ({narrow.weight_bytes / 1e6:.1f} of {wide.weight_bytes / 1e6:.1f} MB); {shown}",
        "<= 0.5x",
        share <= 0.5,
        f"bytes that engines read; agreement with fp32 on {quality.samples} held-out docstrings",
    )


def _against_eager() -> Row:
    bundle, bucket = open_bundle(_bundle("int8-dynamic")), Bucket(1, 128)
    model = load_universal(open_source(demo_checkpoint()))
    with packed(bundle.path, _pair(bundle)[0], bucket) as ours:
        calls = {"eager": eager_call(model.module, ours.feeds), "ours": lambda: ours.runner.run(ours.feeds)}
        times = interleaved(calls, _ROUNDS)
    how = f"median ratio of {_ROUNDS} interleaved rounds, {CORES} threads each"
    figure = "MiniLM in int8-dynamic against PyTorch eager in fp32, 1 x 128"
    return speed_row(figure, times, "eager", "ours", 2, how)


def _perplexity() -> Row:
    """A model that `make demo-matformer` trains (some minutes), at one width: 4 bits as its texts choose them, and as
    they are without."""
    folder, file = CACHE / "writer", CACHE / "writer.txt"
    if not file.exists():
        task = next(task for task in TASKS if task.name == "writer")
        train(task, Run(0, None, folder))
        file.write_bytes(task.held_out_file(task.data()))
    held_out, nats = read_corpus(file).held_out, dict[str, float]()
    for kind, text in (("chosen", file), ("plain", None)):
        path = CACHE / f"writer-{kind}.bundle"
        if not path.exists():
            profile = replace(elsewhere(), buckets=(BUCKET,), budgets={"full": BudgetSpec()})
            compile_bundle(folder, profile, path, text=text, levels={"ffn": (1.0,)}, precisions=("fp32", "int4"))
        for one in consistency(open_bundle(path), text=held_out, threads=CORES).submodels:
            nats[kind if one.submodel.endswith("int4") else "fp32"] = one.figures["loss"]
    chosen, plain = (exp(nats[kind] - nats["fp32"]) for kind in ("chosen", "plain"))
    return Row(
        "perplexity of a language model in int4 over fp32, weights chosen on texts",
        f"{chosen:.4f}x (plainly rounded {plain:.4f}x; fp32 {exp(nats['fp32']):.3f} a byte)",
        "<= plainly rounded",
        chosen <= plain,
        f"MatLM of 13 M parameters, bytes of Python; {len(held_out)} held-out lines",
    )


_TEXTS = 300
_BAND = 16  # tokens
_ROWS = 32
_PASSES = 8
# Default sessions spin on for a while after a run, on the cores that the next one needs.
_PAUSE = 0.2

Feeds = dict[str, Array]


@benchmark
def bench_lengths() -> list[Row]:
    """Texts of many lengths on one engine of a range, against a plain export of the same model with free dimensions."""
    subject, texts = minilm(), _texts()
    encoder = subject.model.source.encoder
    longest = subject.model.source.signature.max_sequence
    assert encoder is not None
    assert longest is not None
    single: list[Feeds] = [dict(encoder.encode([text], longest).feeds) for text in texts]
    lengths = np.array([feeds["input_ids"].shape[1] for feeds in single])
    ordered = [texts[row] for row in np.argsort(lengths)]
    together = [
        dict(encoder.encode(ordered[start : start + _ROWS], longest).feeds) for start in range(0, len(texts), _ROWS)
    ]
    plain = default_session(_plain(subject))
    with load(minilm_range_bundle(), residency="packed", threads=CORES) as model:
        calls: list[Callable[[Feeds], object]] = [model, lambda feeds: plain.run(None, feeds)]
        ours, theirs = _times(calls, single)
        ours_together, theirs_together = _times(calls, together)
    places = (lengths - 1) // _BAND
    bands = [float(ours[places == band].mean() / theirs[places == band].mean()) for band in np.unique(places)]
    whole, rate = float(ours.mean() / theirs.mean()), float(theirs_together.sum() / ours_together.sum())
    figures = (
        ("texts one by one, MiniLM packed, time over a plain dynamic export", whole, "<= 1.00x", whole <= 1.0),
        (f"the same, worst of {len(bands)} bands of {_BAND} tokens", max(bands), "<= 1.03x", max(bands) <= 1.03),
        (f"the same in sorted batches of {_ROWS}, texts per second", rate, ">= 1.00x", rate >= 1.0),
    )
    how = (
        f"medians of {_PASSES} passes in turn over {_TEXTS} docstrings, median {median(lengths.tolist()):g} tokens, "
        f"{CORES} threads"
    )
    return [Row(figure, f"{measured:.3f}x", bar, reached, how) for figure, measured, bar, reached in figures]


def _times(calls: Sequence[Callable[[Feeds], object]], requests: Sequence[Feeds]) -> list[Array]:
    """Median milliseconds of each request, by call; each pass runs one call on all requests."""
    passes: list[list[list[float]]] = [[] for _ in calls]
    for _ in range(_PASSES):
        for call, times in zip(calls, passes, strict=True):
            sleep(_PAUSE)
            call(requests[0])
            times.append([milliseconds(partial(call, feeds)) for feeds in requests])
    return [np.median(np.array(times), axis=0) for times in passes]


def _texts() -> list[str]:
    path = CACHE / "corpus.txt"
    if not path.exists():
        write_corpus(path)
    return path.read_text(encoding="utf-8").splitlines()[:_TEXTS]


def _plain(subject: Subject) -> Path:
    """The export of ``torch.onnx.export`` for the whole model with batch and sequence free."""
    path = subject.folder / "dynamic.onnx"
    if not path.exists():
        longest = subject.model.source.signature.max_sequence
        free = {0: Dim("batch", min=1, max=_ROWS), 1: Dim("sequence", min=1, max=longest)}
        export_plain(subject, subject.model.spec.universal().id, path, free)
    return path


_ALONE = """
import json, sys
from pathlib import Path
from nestforge.runtime.engines.measure import _memory_of_this_process
from nestforge.benchmarks.subjects import default_session
from nestforge.bundle.open_bundle import open_bundle
from nestforge.runtime.inputs.arrays import random_feeds
from nestforge.benchmarks.subjects import BUCKET
feeds = random_feeds(open_bundle(sys.argv[2]).manifest.inputs, BUCKET)
before = _memory_of_this_process()
session = default_session(Path(sys.argv[1]))
session.run(None, feeds)
after = _memory_of_this_process()
print(json.dumps([a - b for a, b in zip(after, before)]))
"""


@benchmark
def bench_memory() -> list[Row]:
    """Memory of eight engines at once, against the largest alone as most people load it."""
    bundle = open_bundle(bert_base_bundle())
    largest = bundle.manifest.submodels[-1].id
    eight = [engine.id for engine in bundle.manifest.engines[-1::-8]][:8]
    together = memory_use(bundle.path, eight, "shared", CORES)
    command = [sys.executable, "-c", _ALONE, str(bert_base().plain(largest)), str(bundle.path)]
    private, resident = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return [
        Row(
            "eight engines resident, BERT-base shape",
            f"{together.resident / resident:.2f}x ({together.resident / 1e6:.0f} MB resident, "
            f"{together.private / 1e6:.0f} of them private, against {resident / 1e6:.0f} and {private / 1e6:.0f} MB)",
            "<= 1.3x",
            together.resident <= 1.3 * resident,
            f"{len(eight)} shared engines, run once, against the largest as a default session of a plain export; "
            "growth of resident memory (a page mapped several times counts once), a process each",
        )
    ]


@benchmark
def bench_open() -> list[Row]:
    """Opening one more engine over the shared store, against a default session."""
    bundle = open_bundle(bert_base_bundle())
    engines = bundle.manifest.engines[-1::-6][:10]

    def open_shared(index: int) -> None:
        with runner_for(bundle, engines[index], "shared", CORES):
            pass

    plain = bert_base().plain(engines[0].submodel)
    open_shared(0)  # the bundle's first engine also warms the file cache
    default_session(plain)
    ours, alone = [], []
    for index in range(1, len(engines)):  # in turn, so that a slow minute slows both
        ours.append(milliseconds(lambda: open_shared(index)))  # noqa: B023  (called at once)
        alone.append(milliseconds(lambda: default_session(plain)))
    faster = median(a / b for a, b in zip(alone, ours, strict=True))
    return [
        Row(
            "open one more engine, BERT-base shape",
            f"{median(ours):.1f} ms, {faster:.0f}x faster (default session {median(alone):.0f} ms)",
            "< 50 ms and >= 10x",
            median(ours) < 50 and faster >= 10,
            f"{len(ours)} shared engines, each in turn with a default session of a plain export; medians",
        )
    ]


_ANSWER = """
import sys, numpy, nestforge.runtime, nestforge
with nestforge.load(sys.argv[1], residency=sys.argv[2]) as model:
    feeds = {spec.name: numpy.ones((1, 16), spec.dtype) for spec in model.bundle.manifest.inputs}
    model(feeds)
"""


@benchmark
def bench_startup() -> list[Row]:
    """A new process: import the runtime, open a bundle, answer once."""
    return [
        _startup_row("MiniLM", minilm_bundle(), "auto"),
        _startup_row("MiniLM", minilm_bundle(), "shared"),
        _startup_row("BERT-base shape", bert_base_bundle(), "shared"),
    ]


def _startup_row(name: str, bundle: Path, residency: str) -> Row:
    command = [sys.executable, "-c", _ANSWER, str(bundle), residency]
    times = [milliseconds(lambda: subprocess.run(command, check=True)) for _ in range(6)][1:]
    return Row(
        f"start, open, first answer: {name}, {residency}",
        f"{median(times) / 1e3:.2f} s",
        "< 1 s",
        median(times) < 1000,
        "whole process, median of 5 after one to warm the disk",
    )
