"""``nestforge bench``: latency and memory of every engine, predicted beside measured."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

from ..console import print_facts, print_json, print_table, say, working
from ..options import bundle_argument, json_option, provider_option

if TYPE_CHECKING:
    from ..bundle_bench import BundleBench, EngineBench

EXAMPLES = "\b\nExamples:\n  nestforge bench my.bundle\n  nestforge bench my.bundle --submodel S --submodel XL --json"


@click.command(epilog=EXAMPLES)
@bundle_argument
@click.option("--submodel", "submodels", multiple=True, metavar="ID", help="Only this one, by id or level; repeatable.")
@provider_option
@json_option
def command(bundle: Path, submodels: tuple[str, ...], provider: str, as_json: bool) -> None:
    """Measure latency and memory of every engine.

    Each residency is measured, predicted latency stands beside measured. Memory is what one engine adds to a fresh
    process: private belongs to it alone; resident also counts mapped pages, which other processes share and the
    system may drop. With --provider it is what the engine adds to the GPU's.
    """
    from ...runtime.bundle.open_bundle import open_bundle
    from ...runtime.engines.onnxruntime_gpu.provider import provider_named
    from ..bundle_bench import bench_bundle

    ran_on = provider_named(provider)
    opened = open_bundle(bundle)
    with working() as progress:
        result = bench_bundle(opened, submodels, progress, ran_on)
    if as_json:
        print_json(result)
    else:
        _print(result, provider)


def _print(result: BundleBench, provider: str) -> None:
    where = ("threads", str(result.threads)) if provider == "cpu" else ("provider", provider)
    print_facts([("bundle", result.bundle), ("compiled for", result.profile), where])
    click.echo()
    rows = [
        [
            row.engine,
            row.residency,
            f"{row.latency_ms.p50:.2f}",
            f"{row.latency_ms.p95:.2f}",
            f"{row.latency_ms.p99:.2f}",
            "-" if row.predicted_ms is None else f"{row.predicted_ms:.2f}",
            "-" if row.error is None else f"{row.error:+.1%}",
            *_memory(row),
        ]
        for row in result.engines
    ]
    memory = ["private MB", "resident MB"] if provider == "cpu" else ["on the GPU MB"]
    print_table(["engine", "weights", "p50 ms", "p95 ms", "p99 ms", "predicted ms", "error", *memory], rows)
    errors = [abs(row.error) for row in result.engines if row.error is not None]
    if errors:
        say(f"\nerror of the predictions: median {median(errors):.1%}, worst {max(errors):.1%}")
        say("a few of these rungs were measured at compile time to correct the predictions; they count here too")
    elif provider == "cpu" and not result.compiled_for_this_host:
        say(f"\nno predictions to compare: the bundle was compiled for {result.profile}, not for this host")


def _memory(row: EngineBench) -> list[str]:
    bytes_of = (row.memory_bytes.private, row.memory_bytes.resident) if row.memory_bytes else (row.device_bytes or 0,)
    return [f"{size / 1e6:.1f}" for size in bytes_of]
