"""``python -m nestforge.benchmarks [NAME ...]``: runs the benchmarks and prints one table."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from ..profiles.probe_host import probe_host
from ..tools.console import print_json, print_table, working
from .harness import Row
from .kept import CACHE, forget_what_others_made


def benchmarks() -> dict[str, str]:
    """The module of each benchmark by its name: ``bench_NAME`` in a folder of this one."""
    root = Path(__file__).parent
    found = {path.stem.removeprefix("bench_"): path for path in root.glob("*/bench_*.py")}
    return {name: f"{__package__}.{path.parent.name}.{path.stem}" for name, path in sorted(found.items())}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(benchmarks()))
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout and nothing else.")
def main(names: tuple[str, ...], as_json: bool) -> None:
    """Run benchmarks NAMES, or all of them. Exit code 1 if a bar is missed."""
    rows: list[Row] = []
    modules = benchmarks()
    chosen = names or tuple(modules)
    if forget_what_others_made(CACHE):
        click.echo(f"{CACHE}: made by other sources, emptied; what is measured is compiled anew", err=True)
    with working() as progress:
        for done, name in enumerate(chosen):
            progress("benchmarks", done, len(chosen))
            rows += importlib.import_module(modules[name]).run()
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
