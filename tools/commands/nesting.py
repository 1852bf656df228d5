"""``nestforge nest``, ``convert-coda`` and ``mixnmatch``: elastic models from ordinary ones, and their submodels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...profiles.compile_request import CompileRequest
from ...runtime.summary import ShortNames
from ...strict import unstructure
from ..bundle_view import print_ids
from ..console import print_facts, print_json, print_table, resumable, say, working
from ..options import (
    BudgetType,
    LayersType,
    LevelsType,
    ReductionsType,
    field_options,
    json_option,
    model_argument,
    once_each,
    overwrite_option,
)

if TYPE_CHECKING:
    from ...compiler.convert_coda import ConversionReport
    from ...compiler.mix_n_match import Comparison
    from ...compiler.nest.nest import NestReport
    from ...profiles.budget import BudgetSpec


_NEST_EXAMPLES = """\b
Examples:
  nestforge nest MODEL --text corpus.txt --output nested
  nestforge nest MODEL --text corpus.txt --levels ffn=0.125,0.25,0.5,1 --minutes 20 --output nested
  nestforge nest MODEL --text corpus.txt --levels ffn=0.5,1 --levels heads=0.5,1 --steps 2000 --seed 1 --output nested
"""


@click.command("nest", epilog=_NEST_EXAMPLES)
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
def nest_command(
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
        from ...compiler.nest.nest import nest

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
        _print_nest(report)


def _print_nest(report: NestReport) -> None:
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


_CONVERT_CODA_EXAMPLES = """\b
Examples:
  nestforge convert-coda MODEL --output conditional
  nestforge convert-coda MODEL --reduction 5 --reductions 8,5,3,1 --keys-of selected --output conditional
  nestforge convert-coda T5 --with-decoder --output conditional-t5
  nestforge convert-coda MODEL --dense-layers 0,11 --adapter-size 32 --num-labels 3 --output conditional
"""


@click.command("convert-coda", epilog=_CONVERT_CODA_EXAMPLES)
@model_argument
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Folder to write; must not exist.")
@overwrite_option
@click.option(
    "--adapter",
    type=click.Choice(("parallel", "sequential", "lora")),
    default="parallel",
    show_default=True,
    help="Beside a layer, behind it, or low-rank terms of queries and values.",
)
@click.option(
    "--adapter-size",
    type=click.IntRange(1, 16_384),
    default=64,
    show_default=True,
    help="Neurons of the adapter of each layer, or the rank.",
)
@click.option(
    "--adapter-activation",
    type=click.Choice(("relu", "gelu", "gelu_tanh")),
    help="Activation of the adapters; LoRA has none. Default: relu.",
)
@click.option(
    "--router",
    type=click.Choice(("soft_top_k", "sigmoid", "first_k")),
    default="soft_top_k",
    show_default=True,
    help="How a layer chooses its tokens and gates them.",
)
@click.option(
    "--keys-of",
    type=click.Choice(("selected", "all")),
    default="all",
    show_default=True,
    help="Whose keys and values the chosen tokens read: their own (k-to-k), or those of all (k-to-all).",
)
@click.option(
    "--reduction",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="The r to train at: a layer computes ceil(n / r) of n tokens.",
)
@click.option(
    "--reductions",
    type=ReductionsType(),
    help="Those that compiles offer, such as 8,5,3,1. Default: 8,5,3,2,1 and the trained one.",
)
@click.option("--dense-layers", type=LayersType(), default=(), help="Layers that stay dense, such as 0,11.")
@click.option("--num-labels", type=click.IntRange(2, 65_536), help="Draw a classifier of the mean of a row's tokens.")
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed of the new weights."
)
@click.option("--with-decoder", is_flag=True, help="Keep a T5's decoder, dense, behind the encoder.")
@json_option
def convert_coda_command(
    model: Path, output: Path, overwrite: bool, with_decoder: bool, as_json: bool, **settings: Any
) -> None:
    """Add conditional adapters (CODA) to an ordinary encoder, for training.

    MODEL is a Hugging Face folder: T5 (its encoder), ViT, DeiT, BERT and the models of its layout. Adapters start at
    zero and routers small and random, so that at r = 1 the output answers as MODEL's encoder does; at other r it must
    be trained first. The output is a folder of model_type coda_encoder, or with a decoder coda_encoder_decoder, which
    every other command takes.
    """
    from ...compiler.convert_coda import convert_coda
    from ...exporters.families.coda.convert import ConversionSettings

    report = convert_coda(model, output, ConversionSettings(**settings), with_decoder, overwrite)
    if as_json:
        print_json({**unstructure(report), "output": str(report.output)})
    else:
        _print_convert_coda(report)


def _print_convert_coda(report: ConversionReport) -> None:
    config, groups = report.config, report.groups
    added = ", ".join(f"{name} {count:,}" for name, count in groups.items())
    print_facts(
        [
            ("conditional layers", f"{len(config.conditional)} of {config.num_hidden_layers}, router {config.router}"),
            ("reductions", f"{', '.join(map(str, config.offered))}; to be trained at {config.reduction}"),
            ("keys and values of", config.keys_of),
            *([("decoder", f"dense, {report.decoder_layers} layers")] if report.decoder_layers else []),
            ("parameters", f"{report.parameters:,}; a task trains {added}"),
            *([("left out", ", ".join(report.left_out))] if report.left_out else []),
        ]
    )
    say(f"\nwrote {report.output}")


_MIXNMATCH_EXAMPLES = """\b
Examples:
  nestforge mixnmatch MODEL --text held-out.txt --budget 'non_embedding_parameters<=60 %'
  nestforge mixnmatch MODEL --text held-out.txt --budget 'ffn_parameters<=94.4M' --evaluations 200 --seed 1 --json
"""


@click.command("mixnmatch", epilog=_MIXNMATCH_EXAMPLES)
@model_argument
@click.option(
    "--text",
    required=True,
    type=click.Path(path_type=Path),
    help="UTF-8 text, one example a line, that the model was not trained on.",
)
@click.option("--budget", required=True, type=BudgetType(), help="One limit, such as 'ffn_parameters<=94.4M'.")
@field_options(CompileRequest, "profile", "levels")
@click.option(
    "--evaluations",
    type=click.IntRange(min=4),
    default=64,
    show_default=True,
    help="Assignments that the search evaluates, the four promotion orders among them.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the search.")
@json_option
def mixnmatch_command(
    model: Path,
    text: Path,
    budget: tuple[str, BudgetSpec],
    profile: str,
    levels: dict[str, tuple[float, ...]],
    evaluations: int,
    seed: int,
    as_json: bool,
) -> None:
    """Compare ways to assign levels to layers within one budget.

    Loss of the submodel that the ladder gives the budget, in each of the four promotion orders, and of the best
    assignment that an evolutionary search finds. In PyTorch; nothing is compiled. The search chooses on half of the
    held-out texts, and the table shows the loss on the other half.
    """
    from ...compiler.mix_n_match import compare_assignments

    request = CompileRequest(model, profile, levels=levels, budgets=dict([budget]))
    with working() as progress:
        compared = compare_assignments(request, text, evaluations=evaluations, seed=seed, progress=progress)
    if as_json:
        print_json(compared)
    else:
        _print_mixnmatch(compared)


def _print_mixnmatch(compared: Comparison) -> None:
    print_facts(
        [
            ("model", compared.model),
            ("budget", f"{compared.metric} <= {compared.limit:,.10g}"),
            ("loss", f"{compared.loss_unit}, on {compared.texts} held-out texts"),
            (
                "search",
                f"{compared.evaluations} assignments on {compared.search_texts} other texts, {compared.seconds:.1f} s",
            ),
        ]
    )
    click.echo()
    rows = [[a.way, f"{a.size:,.10g}", f"{a.loss:.4f}"] for a in compared.assignments]
    print_table(["assignment", compared.metric, "loss"], rows)
    click.echo()
    print_table(["assignment", "id"], [[a.way, a.submodel] for a in compared.assignments])
