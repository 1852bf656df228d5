"""``python -m nestforge.benchmarks [NAME ...]``: runs the benchmarks and prints one table."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import click

from ..profiles.probe_host import probe_host
from ..tools.console import print_json, print_table, working
from .harness import BENCHMARKS, CACHE, Row, forget_what_others_made

for topic in sorted(Path(__file__).parent.glob("*.py")):
    if not topic.stem.startswith("__"):
        import_module(f"{__package__}.{topic.stem}")


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(sorted(BENCHMARKS)))
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout and nothing else.")
def main(names: tuple[str, ...], as_json: bool) -> None:
    """Run benchmarks NAMES, or all of them. Exit code 1 if a bar is missed."""
    rows: list[Row] = []
    chosen = names or tuple(sorted(BENCHMARKS))
    if forget_what_others_made(CACHE):
        click.echo(f"{CACHE}: made by other sources, emptied; what is measured is compiled anew", err=True)
    with working() as progress:
        for done, name in enumerate(chosen):
            progress("benchmarks", done, len(chosen))
            rows += BENCHMARKS[name]()
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
