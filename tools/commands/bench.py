"""``nestforge bench`` and ``measure``: engines, requests and nodes timed on this host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click

from ...bucket import Bucket
from ...bundle.build_record import noisy_figures
from ...bundle.manifest import MEASUREMENTS_NAME
from ...bundle.open_bundle import open_bundle
from ...profiles.host_load import is_busy, load_warning
from ...runtime.engines.measure import BundleMeasurement, LatencyStats
from ...runtime.engines.onnxruntime_gpu.provider import PROVIDERS
from ...runtime.load import load
from ...runtime.summary import ShortNames
from ...tables import Table
from ..bundle_bench import BundleBench, EngineBench, NodeProfile, bench, profile_nodes
from ..console import Block, say, show, working
from ..functions import measure
from ..options import (
    bundle_argument,
    field_options,
    json_option,
    merge_option,
    merged_tasks,
    path_option,
    read_text_lines,
)
from ..traffic_bench import TrafficBench, bench_requests

_SHOWN_KINDS = 8

_BENCH_EXAMPLES = """\b
Examples:
  nestforge bench my.bundle
  nestforge bench my.bundle --submodel S --submodel XL --json
  nestforge bench my.bundle --text requests.txt --concurrency 4
  nestforge bench my.bundle --submodel XL --profile-nodes
"""


@click.command("bench", epilog=_BENCH_EXAMPLES)
@bundle_argument
@field_options(bench, "submodels")
@path_option("--text", "UTF-8 file of texts, one a line: each is sent as a request.")
@field_options(bench_requests, concurrency="1 with --text")
@click.option("--profile-nodes", is_flag=True, help="Time by kind of node, in place of engines.")
@field_options(bench, "at")
@field_options(bench_requests, "task")
@merge_option
@field_options(bench, "provider")
@json_option
def bench_command(
    bundle: Path,
    submodels: tuple[str, ...],
    text: Path | None,
    concurrency: int | None,
    profile_nodes: bool,
    at: Bucket | None,
    task: str | None,
    merge: bool,
    provider: str,
    as_json: bool,
) -> None:
    """Measure engines, requests or nodes on this host.

    Engines: each residency is measured, with predicted latency beside measured, in ms. Memory, in MB, is what one
    engine adds to a fresh process: private belongs to it alone; resident also counts mapped pages, which other
    processes share. With --provider it is what the engine adds to the GPU's.

    With --text or --concurrency requests go through the runtime instead, to one submodel after the other: requests per
    second of all threads, and the latency of a request from call to answer, in ms.

    With --profile-nodes the profiler of ONNX Runtime says where the time of each engine goes.

    Figures measured while other programs used the processor are marked as noisy.
    """
    traffic = text is not None or concurrency is not None
    if profile_nodes and (traffic or PROVIDERS[provider] is not None):
        raise click.UsageError("--profile-nodes is for engines on the processor, without --text and --concurrency")
    if traffic and at is not None:
        raise click.UsageError("--at is for engines, without --text and --concurrency")
    if task is not None and not traffic:
        raise click.UsageError("--task is for requests (--text, --concurrency); an engine takes as long for every task")
    merged = merged_tasks(task, merge)
    if profile_nodes:
        _show_nodes(bundle, submodels, at, as_json)
    elif traffic:
        _show_traffic(bundle, submodels, text, concurrency or 1, task, merged, provider, as_json)
    else:
        _show_engines(bundle, submodels, at, provider, as_json)


def _show_engines(bundle: Path, submodels: tuple[str, ...], at: Bucket | None, provider: str, as_json: bool) -> None:

    with working() as progress:
        result = bench(bundle, submodels, at=at, provider=provider, progress=progress)
    show(as_json, result, lambda: _bench_report(result, provider, ShortNames.of(open_bundle(bundle).manifest)))
    _warn_of_load([row.others_share for row in result.engines])


def _show_traffic(
    bundle: Path,
    submodels: tuple[str, ...],
    text: Path | None,
    concurrency: int,
    task: str | None,
    merged: tuple[str, ...],
    provider: str,
    as_json: bool,
) -> None:

    texts = None if text is None else read_text_lines(text).texts
    with working() as progress, load(bundle, provider=provider, merge=merged) as model:
        result = bench_requests(model, submodels, texts=texts, concurrency=concurrency, task=task, progress=progress)
        names = ShortNames.of(model.bundle.manifest)
    show(as_json, result, lambda: _traffic_report(result, provider, names))
    _warn_of_load([row.others_share for row in result.submodels])


def _show_nodes(bundle: Path, submodels: tuple[str, ...], at: Bucket | None, as_json: bool) -> None:

    opened = open_bundle(bundle)
    with working() as progress:
        result = profile_nodes(opened, submodels, progress, at)
    show(as_json, result, lambda: _nodes_report(result, ShortNames.of(opened.manifest)))


def _warn_of_load(shares: Sequence[float | None]) -> None:
    """On stderr, how many of the figures were measured beside other programs."""
    busy = [share for share in shares if share is not None and is_busy(share)]
    if busy:
        worst = load_warning(max(busy))
        say(f"\nwarning: {len(busy)} of {len(shares)} rows are noisy: {worst} meanwhile", err=True)


def _bench_report(result: BundleBench, provider: str, names: ShortNames) -> Iterator[Block]:
    where = ("threads", str(result.threads)) if PROVIDERS[provider] is None else ("provider", provider)
    yield Table.facts([("bundle", result.bundle), ("compiled for", result.profile), where])
    rows = [
        [
            names(row.engine),
            str(row.shape),
            row.residency,
            *_milliseconds(row.latency_ms),
            "-" if row.predicted_ms is None else f"{row.predicted_ms:.2f}",
            "-" if row.error is None else f"{row.error:+.1%}",
            *_memory(row),
        ]
        for row in result.engines
    ]
    memory = ["private MB", "resident MB"] if PROVIDERS[provider] is None else ["on the GPU MB"]
    yield Table(["engine", "at", "weights", "p50 ms", "p95 ms", "p99 ms", "predicted ms", "error", *memory], rows)
    yield names.ids
    errors = [abs(row.error) for row in result.engines if row.error is not None]
    if errors:
        yield [
            f"error of the predictions: median {median(errors):.1%}, worst {max(errors):.1%}",
            "a few of these rungs were measured at compile time to correct the predictions; they count here too",
        ]
    elif PROVIDERS[provider] is None and not result.compiled_for_this_host:
        yield f"no predictions to compare: the bundle was compiled for {result.profile}, not for this host"


def _milliseconds(stats: LatencyStats) -> list[str]:
    return [f"{ms:.2f}" for ms in (stats.p50, stats.p95, stats.p99)]


def _memory(row: EngineBench) -> list[str]:
    bytes_of = (row.memory_bytes.private, row.memory_bytes.resident) if row.memory_bytes else (row.device_bytes or 0,)
    return [f"{size / 1e6:.1f}" for size in bytes_of]


def _traffic_report(result: TrafficBench, provider: str, names: ShortNames) -> Iterator[Block]:
    where = ("threads a run", str(result.threads)) if PROVIDERS[provider] is None else ("provider", provider)
    facts = [("bundle", result.bundle), ("at once", str(result.concurrency)), where]
    lengths = result.lengths
    if lengths is None:
        yield Table.facts([*facts, ("requests", "random arrays of the engine for the longest row")])
    else:
        drawn = "" if lengths.texts == lengths.found else f" of {lengths.found}, drawn at random"
        tokens = f"median {lengths.median:.0f}, p95 {lengths.p95:.0f}, longest {lengths.longest}"
        yield Table.facts([*facts, ("requests", f"{lengths.texts} texts{drawn}"), ("tokens", tokens)])
        bands = [[f"{b.least} to {b.most}", str(b.texts), f"{b.share:.1%}"] for b in lengths.bands]
        yield Table(["tokens", "texts", "share"], bands)
    columns = ["submodel", "requests", "per second", "p50 ms", "p95 ms", "p99 ms"]
    rows = [
        [names(row.submodel), str(row.requests), f"{row.per_second:.1f}", *_milliseconds(row.latency_ms)]
        for row in result.submodels
    ]
    yield Table(columns, rows)
    yield names.ids
    for row in result.submodels:
        if row.truncated:
            yield f"{names(row.submodel)}: {row.truncated} of {row.requests} requests were cut to what it takes"


def _nodes_report(result: NodeProfile, names: ShortNames) -> Iterator[Block]:
    yield Table.facts([("bundle", result.bundle), ("threads", str(result.threads))])
    for engine in result.engines:
        shown, others = engine.kinds[:_SHOWN_KINDS], engine.kinds[_SHOWN_KINDS:]
        rows = [[each.kind, str(each.nodes), f"{each.ms:.3f}", f"{each.share:.1%}"] for each in shown]
        if others:
            nodes, ms = str(sum(each.nodes for each in others)), sum(each.ms for each in others)
            rows.append([f"{len(others)} other kinds", nodes, f"{ms:.3f}", f"{sum(e.share for e in others):.1%}"])
        table = Table(["node", "nodes", "ms a run", "share"], rows)
        yield [f"{names(engine.engine)} at {engine.shape}, {engine.runs} runs", table]
    yield "the profiler itself takes time at every node: shares count, not milliseconds"


_MEASURE_EXAMPLES = """\b
Examples:
  nestforge measure my.bundle
  nestforge measure my.bundle --threads 2 --json
  nestforge measure my.bundle --memory-mb 500
"""


@click.command("measure", epilog=_MEASURE_EXAMPLES)
@bundle_argument
@field_options(measure, "threads", "memory_mb", "force")
@json_option
def measure_command(bundle: Path, as_json: bool, **settings: Any) -> None:
    """Measure a bundle's engines on this host again.

    The figures are kept in the bundle's measurements.json, by host: those of other hosts stay. On this host the runtime
    then chooses by them in place of those of the compile. Nothing is kept where other programs use the processor.
    """

    with working() as progress:
        result = measure(bundle, progress=progress, **settings)
    path, warnings = bundle / MEASUREMENTS_NAME, _warnings(result)
    data = {"path": str(path), "measurement": result.measurement, "left_out": result.left_out, "warnings": warnings}
    names = ShortNames.of(open_bundle(bundle).manifest)
    show(as_json, data, lambda: _measure_report(result, path, warnings, names))


def _measure_report(
    result: BundleMeasurement, path: Path, warnings: Sequence[str], names: ShortNames
) -> Iterator[Block]:
    measurement = result.measurement
    yield Table.facts(
        [
            ("host", str(measurement.host)),
            ("threads", str(measurement.threads)),
            ("kept in", str(path)),
            *((f"left out {engine}", why) for engine, why in result.left_out.items()),
        ]
    )
    yield Table.of(
        [(each, point, point.noise) for each in measurement.engines for point in each.points],
        {
            "engine": lambda row: names(row[0].engine),
            "weights": lambda row: row[0].residency,
            "at": lambda row: f"{row[1].batch}x{row[1].sequence}",
            "p50 ms": lambda row: f"{row[1].p50_ms:.3f}",
            "p95 ms": lambda row: "-" if row[1].p95_ms is None else f"{row[1].p95_ms:.3f}",
            "runs": lambda row: row[2].runs,
            "spread": lambda row: f"{row[2].spread:.0%}",
            "again": lambda row: "-" if row[2].repeat_ratio is None else f"{row[2].repeat_ratio:.3f}x",
            "others' CPU": lambda row: "-" if row[2].others_share is None else f"{row[2].others_share:.0%}",
            "noisy": lambda row: "yes" if row[2].problem else "no",
        },
    )
    yield names.ids
    yield from (f"warning: {warning}" for warning in warnings)


def _warnings(result: BundleMeasurement) -> list[str]:

    measured = result.measurement.engines
    noisy = noisy_figures((each.engine, point.noise) for each in measured for point in each.points)
    return [noisy] if noisy else []
