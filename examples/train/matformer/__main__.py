"""``python -m nestforge.examples.train.matformer``: trains the universal models and prints how good every level is."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ....tools.console import print_table, working
from ..command import one_line_errors, output_option
from ..stages import Record
from .comparison import Training
from .recipe import DIGITS_CONFIG, DIGITS_RECIPE, LANGUAGE_CONFIG, LANGUAGE_RECIPE, WRITER_CONFIG, WRITER_RECIPE
from .tasks import DigitsTask, LanguageTask, Task

_KINDS = ("nested", "baseline")
_HELD_OUT = 256  # windows of each held-out part of the language task
TASKS: tuple[Task, ...] = (
    DigitsTask(DIGITS_CONFIG, DIGITS_RECIPE),
    LanguageTask(LANGUAGE_CONFIG, LANGUAGE_RECIPE, _HELD_OUT),
    LanguageTask(WRITER_CONFIG, WRITER_RECIPE, _HELD_OUT, name="writer", most_seeds=1, published_levels=("S", "M")),
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("task", type=click.Choice([*(task.name for task in TASKS), "all"]), default="all")
@output_option("demo/matformer", "the models, held-out data")
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True, help="Repetitions of the comparison.")
@click.option("--no-baselines", is_flag=True, help="Train the universal models alone, once, and compare nothing.")
def main(task: str, output: Path, seeds: int, no_baselines: bool) -> None:
    """Train MatFormer's universal models: `vit` on handwritten digits, `lm` on the bytes of Python's own sources, and
    `writer`, a larger one of the same kind that is there to generate (compared once).

    Beside each universal model, models of every level's size are trained alone on a quarter of its tokens each, with
    the same settings: the paper's comparison. No network, no GPU. Each run takes one core, as many side by side as
    there are. An interrupted training goes on with the runs that it had not finished.
    """
    with one_line_errors(output):
        for one in TASKS:
            if task in (one.name, "all"):
                with working() as progress:
                    records = Training(output, one, seeds, not no_baselines, os.cpu_count() or 1, progress).run()
                _print_task(one, records)
    click.echo(f"\nModels, held-out data and training.json lie in {output.resolve()}")


def _print_task(task: Task, records: Record) -> None:
    universal = records["seed 0: universal"]
    click.echo(
        f"\n{task.name}: {universal['parameters']:,} parameters, trained in {universal['seconds']:.0f} s on one core\n"
    )
    if "comparison" in records:
        print_table(
            [
                "level",
                "width",
                "parameters",
                "nested loss",
                "baseline loss",
                "ratio",
                "nested",
                "baseline",
                "at most 1 % worse",
            ],
            [_row(name, records["comparison"]["levels"][name]) for name in task.recipe.levels],
        )
    else:
        print_table(
            ["level", "width", "test loss", "accuracy"],
            [_row_alone(name, universal["levels"][name]) for name in task.recipe.levels],
        )
    ladder = records["ladder"]
    click.echo(
        f"\nladder: {ladder['mixed']} mixed submodels, {ladder['outside']} with a loss outside the two levels that "
        f"they mix, by at most {ladder['worst']:.4f} nats"
    )


def _row(name: str, level: Record) -> list[str]:
    test = level["test"]
    losses = [_with_deviation(test[kind]["loss"]) for kind in _KINDS]
    right = [f"{test[kind]['accuracy']['mean']:.1%}" for kind in _KINDS]
    facts = [name, str(level["width"]), f"{level['parameters']:,}"]
    return [*facts, *losses, f"{test['ratio']:.3f}", *right, "yes" if test["holds"] else "NO"]


def _with_deviation(loss: Record) -> str:
    deviation = loss["deviation"]
    return f"{loss['mean']:.4f}" + ("" if deviation is None else f" ± {deviation:.4f}")


def _row_alone(name: str, level: Record) -> list[str]:
    return [name, str(level["width"]), f"{level['test']['loss']:.4f}", f"{level['test']['accuracy']:.1%}"]


if __name__ == "__main__":
    main()
