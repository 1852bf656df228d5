"""``python -m nestforge.examples.matformer.train``: trains the universal models and prints how good every level is."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from ...progress import Progress
from ...tools.console import print_table
from ..commands import output_option, training
from ..training import Record, Stage, Stages, replace_file, train_missing
from .fit import Run, train
from .recipe import DIGITS_CONFIG, DIGITS_RECIPE, LANGUAGE_CONFIG, LANGUAGE_RECIPE, WRITER_CONFIG, WRITER_RECIPE
from .tasks import DigitsTask, LanguageTask, Task

_KINDS = ("nested", "baseline")
_HELD_OUT = 256  # windows of each held-out part of the language task
TASKS: tuple[Task, ...] = (
    DigitsTask(DIGITS_CONFIG, DIGITS_RECIPE),
    LanguageTask(LANGUAGE_CONFIG, LANGUAGE_RECIPE, _HELD_OUT),
    LanguageTask(WRITER_CONFIG, WRITER_RECIPE, _HELD_OUT, name="writer", most_seeds=1, published_levels=("S", "M")),
)
_PARTS = ("validation", "test")
BAR = 1.01  # a nested level's loss over its baseline's


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("task", type=click.Choice([*(task.name for task in TASKS), "all"]), default="all")
@output_option("demo/matformer", "the models, held-out data")
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True, help="Repetitions of the comparison.")
def main(task: str, output: Path, seeds: int) -> None:
    """Train MatFormer's universal models: `vit` on handwritten digits, `lm` on the bytes of Python's own sources, and
    `writer`, a larger one of the same kind that is there to generate (compared once).

    Beside each universal model, models of every level's size are trained alone on a quarter of its tokens each, with
    the same settings: the paper's comparison. No network, no GPU. Each run takes one core, as many side by side as
    there are. An interrupted training goes on with the runs that it had not finished.
    """
    asked = [one for one in TASKS if task in (one.name, "all")]
    with training(output) as progress:
        records = [Training(output, one, seeds, os.cpu_count() or 1, progress).run() for one in asked]
    for one, found in zip(asked, records, strict=True):
        _print_task(one, found)
    click.echo(f"\nModels, held-out data and training.json lie in {output.resolve()}")


def _print_task(task: Task, records: Record) -> None:
    universal = records["seed 0: universal"]
    click.echo(
        f"\n{task.name}: {universal['parameters']:,} parameters, trained in {universal['seconds']:.0f} s on one core\n"
    )
    columns = ["level", "width", "parameters", "nested loss", "baseline loss", "ratio", "nested", "baseline"]
    levels = records["comparison"]["levels"]
    print_table([*columns, "at most 1 % worse"], [_row(name, levels[name]) for name in task.recipe.levels])


def _row(name: str, level: Record) -> list[str]:
    test = level["test"]
    losses = [_with_deviation(test[kind]["loss"]) for kind in _KINDS]
    right = [f"{test[kind]['accuracy']['mean']:.1%}" for kind in _KINDS]
    facts = [name, str(level["width"]), f"{level['parameters']:,}"]
    return [*facts, *losses, f"{test['ratio']:.3f}", *right, "yes" if test["holds"] else "NO"]


def _with_deviation(loss: Record) -> str:
    deviation = loss["deviation"]
    return f"{loss['mean']:.4f}" + ("" if deviation is None else f" ± {deviation:.4f}")


@dataclass(frozen=True)
class Training:
    """Trains ``task`` into ``output``: the universal model of every seed, of which that of seed 0 is published, and a
    baseline for each of its levels."""

    output: Path
    task: Task
    seeds: int
    jobs: int
    progress: Progress

    def run(self) -> Record:
        """Does what is not done, and returns the records of this training by stage.

        ``training.json`` has them with the task's name ahead, and keeps those of other tasks and seeds.
        """
        self.output.mkdir(parents=True, exist_ok=True)
        made_from = self._data()
        self._train_all(made_from)
        key = {**made_from, "seeds": self._repetitions}
        self.stages.store(self._stage("comparison"), key, {"levels": self._comparison()})
        stages = ["data", *(run.name for run in self._runs), "comparison"]
        records = self.stages.records()
        return {name: records[self._stage(name)] for name in stages}

    @property
    def stages(self) -> Stages:
        return Stages(self.output, self.progress)

    @property
    def folder(self) -> Path:
        """The published universal model."""
        return self.output / self.task.name

    @property
    def _repetitions(self) -> int:
        return min(self.seeds, self.task.most_seeds or self.seeds)

    @property
    def _runs(self) -> list[Run]:
        """The longest first, so that the last to finish are short."""
        seeds = range(self._repetitions)
        universal = [Run(seed, folder=None if seed else self.folder) for seed in seeds]
        levels = reversed(self.task.recipe.levels)
        return universal + [Run(seed, level, self._alone(level, seed)) for level in levels for seed in seeds]

    def _alone(self, level: str, seed: int) -> Path | None:
        published = seed == 0 and level in self.task.published_levels
        return self.output / f"{self.task.name}-{level}-alone" if published else None

    def _data(self) -> Record:
        data = self.task.data()
        path = self.output / self.task.held_out_name

        def write() -> Record:
            replace_file(path, self.task.held_out_file(data))
            return data.facts

        self.stages.run(self._stage("data"), data.facts, [path], 0, write)
        return {"config": self.task.config.to_json(), "recipe": self.task.recipe, "data": data.facts}

    def _train_all(self, made_from: Record) -> None:
        keys = {run: {**made_from, "seed": run.seed, "level": run.level or "all"} for run in self._runs}
        missing = {run: Stage(self._stage(run.name), key, _files(run)) for run, key in keys.items()}
        train_missing(self.stages, partial(train, self.task), missing, self.jobs, self._stage("training"))

    def _comparison(self) -> Record:
        records = self.stages.records()
        seeds = range(self._repetitions)
        rows: Record = {}
        for level in self.task.recipe.levels:
            nested = [records[self._stage(Run(seed).name)]["levels"][level] for seed in seeds]
            alone = [records[self._stage(Run(seed, level).name)]["levels"][level] for seed in seeds]
            rows[level] = {
                "width": nested[0]["width"],
                "parameters": records[self._stage(Run(0, level).name)]["parameters"],
                **{part: compared(*([run[part] for run in runs] for runs in (nested, alone))) for part in _PARTS},
            }
        return rows

    def _stage(self, name: str) -> str:
        return f"{self.task.name} {name}"


def compared(nested: Sequence[Record], alone: Sequence[Record]) -> Record:
    """Figures of one level over the seeds: means and standard deviations of both (None for one seed), the ratio of
    their mean losses, that ratio seed by seed, and whether it keeps the bar."""
    losses = [[run["loss"] for run in runs] for runs in (nested, alone)]
    ratio = statistics.fmean(losses[0]) / statistics.fmean(losses[1])
    return {
        "nested": _summary(nested),
        "baseline": _summary(alone),
        "ratio": ratio,
        "ratios": [mine / theirs for mine, theirs in zip(*losses, strict=True)],
        "holds": ratio <= BAR,
    }


def _summary(runs: Sequence[Record]) -> Record:
    columns = {figure: [run[figure] for run in runs] for figure in ("loss", "accuracy")}
    return {
        figure: {"mean": statistics.fmean(values), "deviation": statistics.stdev(values) if len(values) > 1 else None}
        for figure, values in columns.items()
    }


def _files(run: Run) -> list[Path]:
    return [] if run.folder is None else [run.folder]


if __name__ == "__main__":
    main()
