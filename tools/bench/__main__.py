"""``python -m nestforge.tools.bench [NAME ...]``: runs the benchmarks and prints one table."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import click

from ...profiles.probe_host import probe_host
from ..console import print_json, print_table, working
from .harness import Row


def benchmarks() -> list[str]:
    """Names of the benchmarks: the modules ``bench_*`` of this folder."""
    found = pkgutil.iter_modules([str(Path(__file__).parent)])
    return sorted(module.name.removeprefix("bench_") for module in found if module.name.startswith("bench_"))


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(benchmarks()))
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout and nothing else.")
def main(names: tuple[str, ...], as_json: bool) -> None:
    """Run benchmarks NAMES, or all of them. Exit code 1 if a bar is missed."""
    rows: list[Row] = []
    chosen = list(names) or benchmarks()
    with working() as progress:
        for done, name in enumerate(chosen):
            progress("benchmarks", done, len(chosen))
            rows += importlib.import_module(f"{__package__}.bench_{name}").run()
        progress("benchmarks", len(chosen), len(chosen))
    if as_json:
        print_json(rows)
    else:
        host = probe_host()
        click.echo(f"{host.cpu}, {host.cores} cores, {host.memory_mb / 1e3:.0f} GB, {host.system}\n")
        print_table(
            ["figure", "measured", "bar", "", "how"],
            [[row.figure, row.measured, row.bar, "reached" if row.reached else "MISSED", row.how] for row in rows],
        )
    if not all(row.reached for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
