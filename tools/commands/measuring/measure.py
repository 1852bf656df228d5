"""``nestforge measure``: a bundle's engines timed on this host, kept in the bundle for the runtime to choose by."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ....runtime.summary.short_names import ShortNames
from ...bundle_view import print_ids
from ...console import print_facts, print_json, print_table, say, working
from ...options import bundle_argument, json_option

if TYPE_CHECKING:
    from ....bundle.device_files.measurements import MeasuredPoint
    from ....runtime.engines.measure import BundleMeasurement

EXAMPLES = """\b
Examples:
  nestforge measure my.bundle
  nestforge measure my.bundle --threads 2 --json
  nestforge measure my.bundle --memory-mb 500
"""


@click.command(epilog=EXAMPLES)
@bundle_argument
@click.option("--threads", type=click.IntRange(min=1), help="Cores per run. Default: all that this process may use.")
@click.option(
    "--memory-mb",
    type=click.FloatRange(min=0, min_open=True),
    help="Measure engines as they are held under this cap; the ones that it leaves out are named.",
)
@click.option("--force", is_flag=True, help="Also while other programs are busy; such figures are marked as noisy.")
@json_option
def command(bundle: Path, threads: int | None, memory_mb: float | None, force: bool, as_json: bool) -> None:
    """Measure a bundle's engines on this host again.

    The figures are kept in the bundle's measurements.json, by host: those of other hosts stay. On this host the runtime
    then chooses by them in place of those of the compile. Nothing is kept where other programs use the processor.
    """
    from ....bundle.manifest import MEASUREMENTS_NAME
    from ....bundle.open_bundle import open_bundle
    from ...functions import measure

    with working() as progress:
        result = measure(bundle, threads=threads, memory_mb=memory_mb, force=force, progress=progress)
    path = bundle / MEASUREMENTS_NAME
    if as_json:
        warnings = _warnings(result)
        print_json(
            {
                "path": str(path),
                "measurement": result.measurement,
                "left_out": result.left_out,
                "warnings": warnings,
            }
        )
    else:
        _print(result, path, ShortNames.of(open_bundle(bundle).manifest))


def _print(result: BundleMeasurement, path: Path, names: ShortNames) -> None:
    measurement = result.measurement
    print_facts(
        [
            ("host", str(measurement.host)),
            ("threads", str(measurement.threads)),
            ("kept in", str(path)),
            *((f"left out {engine}", why) for engine, why in result.left_out.items()),
        ]
    )
    click.echo()
    rows = [
        _row(names(each.engine), each.residency, point, f"{point.batch}x{point.sequence}")
        for each in measurement.engines
        for point in each.points
    ]
    columns = ["engine", "weights", "at", "p50 ms", "p95 ms", "runs", "spread", "again", "others' CPU", "noisy"]
    print_table(columns, rows)
    click.echo()
    print_ids(names)
    for warning in _warnings(result):
        say(f"\nwarning: {warning}")


def _row(engine: str, residency: str, point: MeasuredPoint, shape: str) -> list[str]:
    noise = point.noise
    again = "-" if noise.repeat_ratio is None else f"{noise.repeat_ratio:.3f}x"
    others = "-" if noise.others_share is None else f"{noise.others_share:.0%}"
    slow = "-" if point.p95_ms is None else f"{point.p95_ms:.3f}"
    noisy = "yes" if noise.problem else "no"
    return [
        engine,
        residency,
        shape,
        f"{point.p50_ms:.3f}",
        slow,
        str(noise.runs),
        f"{noise.spread:.0%}",
        again,
        others,
        noisy,
    ]


def _warnings(result: BundleMeasurement) -> list[str]:
    from ....bundle.build_record import noisy_figures

    measured = result.measurement.engines
    noisy = noisy_figures((each.engine, point.noise) for each in measured for point in each.points)
    return [noisy] if noisy else []
