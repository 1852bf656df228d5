"""``python -m nestforge.examples.cost_eff.train``: trains the multi-exit example and prints how good every exit is.

Read top to bottom: texts, the whole model, the slender one. A finished stage is not repeated.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ...bundle.files import to_json
from ...exporters.checkpoints.checkpoint import open_checkpoint, sha256_of
from ...exporters.families.cost_eff.model import CostEffModel
from ...progress import Progress
from ...runtime.inputs.text import open_tokenizer
from ...tools.console import print_table
from ..commands import output_option, training
from ..encoder.corpus import demo_checkpoint
from ..training import Record, Stages, parameters_of, replace_file, replace_folder
from .fit import Distillation, Stretch, exit_quality, fit, label_loss, majority
from .slender import (
    Target,
    load_model,
    most_important,
    multi_exit_model,
    save_model,
    schedule,
    slender,
    taylor_importance,
)
from .texts import PARTS, SOURCES, Limits, Part, Rows, Source, read_corpus, read_jsonl, to_jsonl, tokenise


@dataclass(frozen=True)
class Training:
    """One training of the BERT checkpoint in ``source`` into ``output``; ``progress`` hears of every step."""

    output: Path
    source: Path
    packages: tuple[Source, ...]
    recipe: Recipe
    progress: Progress

    def run(self) -> Record:
        """Does the stages that are not done, and returns the records of all: what ``training.json`` holds.

        Raises CheckpointError if the checkpoint or the installed packages do not suffice.
        """
        recipe = self.recipe
        self.output.mkdir(parents=True, exist_ok=True)
        self._stage("data", {"packages": self.packages, "limits": recipe.limits}, self._data)
        texts = {part: sha256_of(self._texts(part)) for part in PARTS}
        whole = {"seed": recipe.seed, "batch": recipe.batch, "training": recipe.whole}
        checkpoint = {file.name: sha256_of(file) for file in open_checkpoint(self.source).source_files()}
        self._stage("whole", whole | {"texts": texts, "checkpoint": checkpoint}, self._whole)
        thinner = {"target": recipe.target, "cuts": recipe.cuts, "scoring_batches": recipe.scoring}
        stretches = {"between": recipe.between, "recovery": recipe.recovery}
        made_of = {"texts": texts, "whole": sha256_of(self.output / "whole" / "model.safetensors")}
        common = {"seed": recipe.seed, "batch": recipe.batch}
        self._stage("slender", common | thinner | stretches | made_of, self._slender)
        return self._stages.records()

    def _data(self) -> Record:
        tokenizer = open_tokenizer(self._tokenizer)
        corpus = read_corpus(
            self.packages,
            self.recipe.limits,
            lambda texts: [len(row.ids) for row in tokenizer.encode_batch(list(texts))],
            lambda done, total: self.progress("reading docstrings", done, total),
        )
        for part in PARTS:
            replace_file(self._texts(part), to_jsonl(corpus.parts[part]).encode())
        replace_file(self.output / "labels.json", to_json(corpus.labels))
        labels = {part: [item.label for item in corpus.parts[part]] for part in PARTS}
        return {
            "texts": {part: len(labels[part]) for part in PARTS},
            "classes": corpus.counts,
            "excluded": corpus.excluded,
            "majority_accuracy": majority(labels["train"], labels["test"]),
        }

    def _whole(self) -> Record:
        train = self._rows("train")
        model = multi_exit_model(open_checkpoint(self.source), len(self._labels()))
        batches = train.shuffled(self.recipe.batch, self.recipe.whole.steps, self.recipe.seed)
        fit(model, batches, label_loss, self.recipe.whole, self._telling("training the whole model"))
        return self._publish(model, "whole", train.tokens)

    def _slender(self) -> Record:
        recipe, train = self.recipe, self._rows("train")
        distillation = Distillation(load_model(self.output / "whole").requires_grad_(False))
        model = load_model(self.output / "whole")
        for number, target in enumerate(schedule(_widths(model), recipe.target, recipe.cuts), start=1):
            name = f"cut {number} of {recipe.cuts}"
            batches = train.shuffled(recipe.batch, recipe.scoring + recipe.between.steps, recipe.seed + number)
            scored, trained = batches[: recipe.scoring], batches[recipe.scoring :]
            importance = taylor_importance(model, scored, self._telling(f"{name}: scoring"))
            model = slender(model, *most_important(importance, target), target.rank)
            fit(model, trained, distillation, recipe.between, self._telling(f"{name}: training"))
        batches = train.shuffled(recipe.batch, recipe.recovery.steps, recipe.seed)
        fit(model, batches, distillation, recipe.recovery, self._telling("recovery of the slender model"))
        return self._publish(model, "slender", train.tokens)

    def _publish(self, model: CostEffModel, name: str, tokens: int) -> Record:
        replace_folder(self.output / name, lambda beside: save_model(model, self._tokenizer, beside))
        return {
            "parameters": parameters_of(model),
            "tokens_per_epoch": tokens,
            "test_exits": exit_quality(model, self._rows("test")),
        }

    def _stage(self, name: str, key: Record, work: Callable[[], Record]) -> None:
        files = [self._texts(part) for part in PARTS] if name == "data" else [self.output / name]
        self._stages.run(name, key, files, self.recipe.seed, work)

    def _rows(self, part: Part) -> Rows:
        pad = int(open_checkpoint(self.source).config["pad_token_id"])
        return tokenise(open_tokenizer(self._tokenizer), read_jsonl(self._texts(part)), pad)

    def _labels(self) -> list[str]:
        labels: list[str] = json.loads((self.output / "labels.json").read_bytes())
        return labels

    def _texts(self, part: Part) -> Path:
        return self.output / f"{part}.jsonl"

    def _telling(self, stage: str) -> Callable[[int, int], None]:
        return lambda done, total: self.progress(stage, done, total)

    @property
    def _stages(self) -> Stages:
        return Stages(self.output, self.progress)

    @property
    def _tokenizer(self) -> Path:
        return self.source / "tokenizer.json"


def _widths(model: CostEffModel) -> Target:
    """Size of a model whose layers are all alike and whose embedding is dense."""
    widths = model.architecture.layers[0]
    return Target(widths.heads, widths.ffn, model.architecture.hidden)


@dataclass(frozen=True)
class Recipe:
    """``batch`` texts a step. ``scoring`` batches judge importance ahead of each of ``cuts`` cuts, ``between``
    follows each cut, ``recovery`` the last one's."""

    limits: Limits
    seed: int
    batch: int
    whole: Stretch
    target: Target
    cuts: int
    scoring: int
    between: Stretch
    recovery: Stretch


# About ten minutes on two quiet cores: a step of the whole model takes half a second.
RECIPE = Recipe(
    limits=Limits(
        most={"train": 900, "calibration": 100, "test": 100},
        least={"train": 300, "calibration": 30, "test": 30},
        characters=60,
        tokens=64,
    ),
    seed=0,
    batch=32,
    whole=Stretch(steps=480, rate=2e-4, exit_rate=1e-3, dropout=0.1),
    target=Target(heads=6, ffn=512, rank=192),
    cuts=6,
    scoring=8,
    between=Stretch(steps=25, rate=1e-4, exit_rate=1e-4),
    recovery=Stretch(steps=350, rate=2e-4, exit_rate=2e-4),
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@output_option("demo/exits", "texts, both models")
def main(output: Path) -> None:
    """Train a multi-exit encoder from all-MiniLM-L6-v2 and slenderise it (COST-EFF).

    The task: which installed Python package does a docstring come from? Needs the environment of `make setup` and the
    checkpoint that `make demo` installs; no network, no GPU. Takes about 10 minutes on two quiet cores, 2 GB of memory
    and 150 MB on disk. An interrupted run goes on at the stage that it had reached (texts, whole, slender).
    """
    with training(output) as progress:
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
