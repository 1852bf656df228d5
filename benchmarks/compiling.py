"""Compiling: what one more submodel, a bundle and a prediction cost."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

from ..bucket import Bucket
from ..bundle.build_record import Latency, LatencyPoint
from ..bundle.open_bundle import Bundle, open_bundle
from ..compiler.compile import compile_bundle
from ..compiler.engines.measure import rungs_to_measure
from ..compiler.planning.cost_model import fit_correction, predict
from ..examples.encoder.corpus import demo_checkpoint
from ..exporters.checkpoints.own_folder import save_model
from ..exporters.families.matformer.config import MatformerConfig
from ..exporters.families.matformer.model import MatformerLM
from ..exporters.source import open_source
from ..profiles.budget import BudgetSpec
from ..profiles.load_profile import load_profile
from ..profiles.probe_host import host_profile
from ..runtime.engines.latencies import latency_at
from ..runtime.engines.measure import Timed, best_of_rounds, measure, measured_shapes, with_measured
from ..runtime.engines.runner import runner_for
from ..runtime.inputs.arrays import random_feeds
from .harness import Row, benchmark, milliseconds
from .subjects import BUCKET, CORES, bert_base, bert_base_bundle, export_plain, minilm_bundle, minilm_range_bundle

_HALF = "ffn1536-heads6"


@benchmark
def bench_emit() -> list[Row]:
    """Emitting one more submodel, against tracing and saving it."""
    subject = bert_base()
    ours = median(milliseconds(lambda: subject.engine(_HALF)) for _ in range(50))
    path = subject.folder / "traced-again.onnx"
    plain = min(milliseconds(lambda: export_plain(subject, _HALF, path)) for _ in range(2))
    return [
        Row(
            "emit one more submodel, BERT-base shape",
            f"{plain / ours:,.0f}x ({ours:.2f} ms against {plain:,.0f} ms)",
            ">= 100x",
            plain / ours >= 100,
            "emit and write, median of 50, against torch.onnx.export and save, best of 2",
        )
    ]


_COMPILES = 3
_RANGE = "1x1..512"
# The same module, exported and saved as most people do it, with the same dimensions free.
_EXPORT = """
import sys, torch
from torch.export import Dim
from nestforge.bucket import Bucket
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
model, output, shapes = sys.argv[1:]
universal, bucket = load_universal(open_source(model)), Bucket.parse(shapes)
signature = universal.source.signature
dims = {1: Dim("sequence", min=1, max=bucket.sequence)}
program = torch.onnx.export(
    universal.module,
    tuple(torch.ones(1, 9, dtype=torch.int64) for _ in signature.inputs),
    dynamo=True,
    input_names=[spec.name for spec in signature.inputs],
    output_names=[spec.name for spec in signature.outputs],
    dynamic_shapes=(tuple(dict(dims) for _ in signature.inputs),),
    verbose=False,
)
program.save(output, external_data=True)
"""


@benchmark
def bench_compile() -> list[Row]:
    """CPU seconds of a compile of one submodel at one range, over those of ``torch.onnx.export`` alone."""
    host_profile()  # measured once and kept: no part of a compile
    commands = (_exported, _compiled, lambda output: [*_compiled(output), "--no-measure"])
    taken = [[_cpu_seconds(command) for command in commands] for _ in range(_COMPILES)]
    export = median(each[0] for each in taken)
    rows = []
    for place, what in ((1, ""), (2, ", --no-measure")):
        ratio = median(each[place] / each[0] for each in taken)
        ours = median(each[place] for each in taken)
        rows.append(
            Row(
                f"compile MiniLM, one submodel at {_RANGE}{what}: CPU seconds over torch.onnx.export's",
                f"{ratio:.2f}x ({ours:.0f} s against {export:.0f} s)",
                "<= 2x",
                ratio <= 2,
                f"user and system time of whole processes, in turns, median of {_COMPILES}",
            )
        )
    return rows


def _exported(output: Path) -> list[str]:
    return ["-c", _EXPORT, str(demo_checkpoint()), str(output), _RANGE]


def _compiled(output: Path) -> list[str]:
    one = ("--include", "budgets", "--budget", "parameters<=100 %", "--bucket", _RANGE)
    return ["-m", "nestforge", "compile", str(demo_checkpoint()), "--output", str(output), *one]


def _cpu_seconds(command: Callable[[Path], Sequence[str]]) -> float:
    """CPU seconds of one Python process that writes its output to a new path, all threads and its imports included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with TemporaryDirectory() as folder:
        arguments = [sys.executable, *command(Path(folder) / "output")]
        # As `nestforge compile` has it of itself: threads that spin would count against torch.onnx.export alone.
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        subprocess.run(arguments, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


@benchmark
def bench_bundle_size() -> list[Row]:
    """Bytes of a bundle of 64 submodels, against the bytes of its weights."""
    return [_size_row(open_bundle(bert_base_bundle()), 64, "BERT-base shape")]


def _size_row(bundle: Bundle, expected: int, model: str) -> Row:
    weights = sum(path.stat().st_size for path in bundle.weights)
    total = sum(path.stat().st_size for path in bundle.path.iterdir())
    count = len(bundle.manifest.submodels)
    return Row(
        f"bundle of {count} submodels, {model}",
        f"{total / weights:.4f}x ({total / 1e6:.2f} MB over {weights / 1e6:.2f} MB)",
        f"{expected} submodels, <= 1.05x",
        count == expected and total / weights <= 1.05,
        "all files of the bundle against the weight store",
    )


_RUNGS = 49
_MAX_SECONDS = 180
# The paper's smallest shape (78M) with bytes for a vocabulary. A rung's graph of 16 layers takes about 39 kB whatever
# its widths, so the share that 49 of them add falls with the width: at 128 it would be 16 %.
_CONFIG = MatformerConfig(
    vocab_size=256,
    hidden_size=256,
    num_hidden_layers=16,
    num_attention_heads=16,
    intermediate_size=1024,
    max_position_embeddings=256,
    activation="gelu",
    tie_word_embeddings=True,
    nested=True,
)


@benchmark
def bench_ladder() -> list[Row]:
    """A bundle of every rung of a 16-layer ladder: its bytes over those of its weights, and the seconds it takes."""
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        model = save_model(MatformerLM(_CONFIG), _CONFIG, Path(folder) / "matlm")
        budgets = {"half": BudgetSpec(ffn_parameters="50 %")}
        profile = replace(load_profile("host-cpu"), buckets=(BUCKET,), budgets=budgets)
        began = perf_counter()
        bundle = open_bundle(compile_bundle(model, profile, Path(folder) / "matlm.bundle", include="ladder"))
        seconds = perf_counter() - began
        size = _size_row(bundle, _RUNGS, f"MatLM 16 x {_CONFIG.hidden_size}")
        stages = sorted(bundle.build.seconds.items(), key=lambda stage: -stage[1])[:4]
    shown = ", ".join(f"{name} {taken:.0f} s" for name, taken in stages)
    return [
        size,
        Row(
            f"compile and verify {_RUNGS} rungs, MatLM 16 x {_CONFIG.hidden_size}",
            f"{seconds:.0f} s ({shown})",
            f"< {_MAX_SECONDS} s",
            seconds < _MAX_SECONDS,
            f"compile_bundle for this host, {BUCKET.label}, every engine measured; the longest stages",
        ),
    ]


_PREDICTION_ROUNDS = 5


@benchmark
def bench_prediction() -> list[Row]:
    """Rungs are measured and predicted in one run: a machine that changes its speed from hour to hour is no evidence
    about the model."""
    bundle, source, profile = open_bundle(minilm_bundle()), open_source(demo_checkpoint()), host_profile()
    measured = _measure(bundle)
    errors = []
    for bucket in dict.fromkeys(engine.bucket for engine in bundle.manifest.engines):
        engines = [engine for engine in bundle.manifest.engines if engine.bucket == bucket]
        costs = [predict(source.workload(source.spec.parse(e.submodel), bucket), profile) for e in engines]
        times = [measured[engine.id] for engine in engines]
        fitted = rungs_to_measure(len(engines))
        correction = fit_correction([costs[i] for i in fitted], [times[i] for i in fitted])
        errors += [
            abs(correction.corrected_ms(cost) / time - 1)
            for index, (cost, time) in enumerate(zip(costs, times, strict=True))
            if index not in fitted
        ]
    return [
        Row(
            f"predicted latency, {len(errors)} MiniLM engines",
            f"median {median(errors):.1%}, worst {max(errors):.1%} off",
            "median < 10 %, worst < 25 %",
            median(errors) < 0.10 and max(errors) < 0.25,
            f"every rung at every bucket but those fitted to, best median of {_PREDICTION_ROUNDS} interleaved rounds",
        )
    ]


def _measure(bundle: Bundle) -> dict[str, float]:
    """Milliseconds of every engine, packed, all in turn."""
    best = {engine.id: float("inf") for engine in bundle.manifest.engines}
    with ExitStack() as stack:
        runners = {e.id: stack.enter_context(runner_for(bundle, e, "packed", CORES)) for e in bundle.manifest.engines}
        for _ in range(_PREDICTION_ROUNDS):
            for engine in bundle.manifest.engines:
                feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
                stats = measure(runners[engine.id], feeds, min_runs=15, max_seconds=0.2)
                best[engine.id] = min(best[engine.id], stats.p50)
    return best


# Between the powers of two at which engines are measured, and between one row and 32.
_LENGTHS = (3, 6, 12, 24, 48, 90, 180, 350)
_ROWS = (1, 2, 5, 12, 24)
# A benchmark of minutes: what takes longer than this many tokens is left out.
_MOST_TOKENS = 2400


@benchmark
def bench_between() -> list[Row]:
    """All sizes are timed in the same interleaved rounds, so that a host that changes its speed does not decide."""
    bundle = open_bundle(minilm_range_bundle())
    engine = bundle.manifest.engines[0]
    known = measured_shapes(engine.bucket)
    asked = [Bucket(rows, length) for rows in _ROWS for length in _LENGTHS if rows * length <= _MOST_TOKENS]
    with runner_for(bundle, engine, "packed", CORES) as runner:
        timed = [Timed(runner, random_feeds(bundle.manifest.inputs, shape), False) for shape in (*known, *asked)]
        measured = dict(zip((*known, *asked), best_of_rounds(timed), strict=True))
    points = (with_measured(LatencyPoint(shape.batch, shape.sequence, 0.0), measured[shape]) for shape in known)
    predicted = latency_at(Latency(engine.id, tuple(points)))
    noise = [measured[shape].noise for shape in asked]
    repeats = [one.repeat_ratio - 1 for one in noise if one.repeat_ratio is not None]
    others = noise[0].others_share
    how = (
        f"whole MiniLM packed, measured at {len(known)} sizes; measured twice a size differs by {median(repeats):.1%} "
        f"(median), {max(repeats):.1%} (worst); others used {'?' if others is None else f'{others:.0%}'} of the CPUs"
    )
    rows = []
    for name, shapes in (
        ("one row", [shape for shape in asked if shape.batch == 1]),
        ("2 to 24 rows", [shape for shape in asked if shape.batch > 1]),
    ):
        errors = [abs(predicted(shape).p50_ms / measured[shape].p50_ms - 1) for shape in shapes]
        rows.append(
            Row(
                f"latency at {len(shapes)} sizes never measured, {name}",
                f"median {median(errors):.1%}, worst {max(errors):.1%} off",
                "median < 5 %, worst < 20 %",
                median(errors) < 0.05 and max(errors) < 0.20,
                how,
            )
        )
    return rows
