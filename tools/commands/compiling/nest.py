"""``nestforge nest``: an ordinary pretrained encoder becomes a nested model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ....runtime.summary.short_names import ShortNames
from ...bundle_view import print_ids
from ...console import print_facts, print_json, print_table, resumable, say, working
from ...options import LevelsType, json_option, model_argument, once_each, overwrite_option

if TYPE_CHECKING:
    from ....compiler.nest.nest import NestReport

EXAMPLES = """\b
Examples:
  nestforge nest MODEL --text corpus.txt --output nested
  nestforge nest MODEL --text corpus.txt --levels ffn=0.125,0.25,0.5,1 --minutes 20 --output nested
  nestforge nest MODEL --text corpus.txt --levels ffn=0.5,1 --levels heads=0.5,1 --steps 2000 --seed 1 --output nested
"""


@click.command(epilog=EXAMPLES)
@model_argument
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    required=True,
    help="UTF-8 text, one example a line, like what the model is for; about one line in five is held out.",
)
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Folder to write; must not exist.")
@overwrite_option
@click.option(
    "--levels",
    type=LevelsType(),
    multiple=True,
    callback=once_each,
    help="Granularities to train of an axis kind; repeatable. Default: ffn=0.25,0.5,0.75,1.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="How long to train, beside loading and comparing. Default: 8.",
)
@click.option("--steps", type=click.IntRange(min=1), help="How long to train, in batches instead of minutes.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of every random choice.")
@json_option
def command(
    model: Path,
    text: Path,
    output: Path,
    overwrite: bool,
    levels: dict[str, tuple[float, ...]],
    minutes: float | None,
    steps: int | None,
    seed: int,
    as_json: bool,
) -> None:
    """Make a nested model of an ordinary pretrained encoder.

    MODEL is a Hugging Face folder with a tokenizer. Its neurons are put in order of importance, then it is trained
    for some minutes so that every level answers like the original. The output is such a folder again, which every
    other command takes. An interrupted training is resumed by the same command.
    """
    if minutes is not None and steps is not None:
        raise click.UsageError("--minutes and --steps: give one of them")
    with working() as progress, resumable(output):
        from ....compiler.nest.nest import nest

        report = nest(
            model,
            text,
            output,
            levels=levels or None,
            minutes=minutes,
            steps=steps,
            seed=seed,
            progress=progress,
            overwrite=overwrite,
        )
    if as_json:
        print_json({**vars(report), "output": str(report.output)})
    else:
        _print(report)


def _print(report: NestReport) -> None:
    columns = ["submodel", "parameters", "cosine, ranked only", "cosine, nested"]
    print_table(
        columns,
        [
            [level.label, f"{level.parameters:,}", f"{level.ranked:.4f}", f"{level.nested:.4f}"]
            for level in report.levels
        ],
    )
    click.echo()
    print_ids(ShortNames({level.submodel: level.label for level in report.levels}))
    click.echo()
    print_facts(
        [
            ("cosine", f"mean to the original model, {report.held_out} held-out texts"),
            ("trained on", f"{report.texts} texts, {report.steps} steps, {report.seconds:.0f} s, seed {report.seed}"),
        ]
    )
    say(f"\nwrote {report.output}")
