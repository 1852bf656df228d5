"""``python -m nestforge.examples.cost_eff.train``: trains the multi-exit example and prints how good every exit is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ...tools.console import print_table, working
from ..commands import one_line_errors, output_option
from ..encoder.corpus import demo_checkpoint
from .stages import RECIPE, Training
from .texts import SOURCES


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@output_option("demo/exits", "texts, both models")
def main(output: Path) -> None:
    """Train a multi-exit encoder from all-MiniLM-L6-v2 and slenderise it (COST-EFF).

    The task: which installed Python package does a docstring come from? Needs the environment of `make setup` and the
    checkpoint that `make demo` installs; no network, no GPU. Takes about 10 minutes on two quiet cores, 2 GB of memory
    and 150 MB on disk. An interrupted run goes on at the stage that it had reached (texts, whole, slender).
    """
    with one_line_errors(output), working() as progress:
        records = Training(output, demo_checkpoint(), SOURCES, RECIPE, progress).run()
    _print_records(records)
    click.echo(f"\nBoth models and their texts lie in {output.resolve()}")


def _print_records(records: dict[str, Any]) -> None:
    data = records["data"]
    texts = ", ".join(f"{count} {part}" for part, count in data["texts"].items())
    click.echo(f"{len(data['classes'])} classes; texts: {texts}; the commonest label: {data['majority_accuracy']:.1%}")
    for label, reason in data["excluded"].items():
        click.echo(f"left out: {label} ({reason})")
    for name in ("whole", "slender"):
        click.echo(f"{name}: {records[name]['parameters']:,} parameters, {records[name]['seconds']:.0f} s")
    click.echo()
    pairs = zip(records["whole"]["test_exits"], records["slender"]["test_exits"], strict=True)
    print_table(
        ["exit", "whole accuracy", "of the certain", "slender accuracy", "of the certain"],
        [[str(whole["layer"]), *_cells(whole), *_cells(thin)] for whole, thin in pairs],
    )


def _cells(quality: dict[str, Any]) -> list[str]:
    certain = quality["certain_accuracy"]
    share = f"{quality['certain_share']:.0%} of texts"
    return [f"{quality['accuracy']:.1%}", share if certain is None else f"{certain:.1%} on {share}"]


if __name__ == "__main__":
    main()
