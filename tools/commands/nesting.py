"""``nestforge nest``, ``convert-coda`` and ``mixnmatch``: elastic models from ordinary ones, and their submodels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...profiles.budget import BudgetSpec
from ...profiles.compile_request import CompileRequest
from ...profiles.nest_request import ConversionSettings, NestRequest
from ...runtime.summary import ShortNames
from ...strict import unstructure
from ...tables import Table
from ..console import Block, resumable, show, working
from ..options import BUDGET, field_options, json_option, model_argument, path_option

if TYPE_CHECKING:
    from ...compiler.convert_coda import ConversionReport
    from ...compiler.mix_n_match import Comparison
    from ...compiler.nest import NestReport


_NEST_EXAMPLES = """\b
Examples:
  nestforge nest MODEL --text corpus.txt --output nested
  nestforge nest MODEL --text corpus.txt --levels ffn=0.125,0.25,0.5,1 --minutes 20 --output nested
  nestforge nest MODEL --text corpus.txt --levels ffn=0.5,1 --levels heads=0.5,1 --steps 2000 --seed 1 --output nested
"""


@click.command("nest", epilog=_NEST_EXAMPLES)
@model_argument
@field_options(NestRequest, "text", "output", "overwrite", "levels", "minutes", "steps", "seed")
@json_option
def nest_command(model: Path, as_json: bool, **settings: Any) -> None:
    """Make a nested model of a pretrained encoder.

    MODEL is a Hugging Face folder with a tokenizer. Its neurons are put in order of importance, then it is trained
    for some minutes so that every level answers like the original. The output is such a folder again, which every
    other command takes. An interrupted training is resumed by the same command.
    """
    if settings["minutes"] is not None and settings["steps"] is not None:
        raise click.UsageError("--minutes and --steps: give one of them")
    with working() as progress, resumable(settings["output"]):
        from ...compiler.nest import nest

        report = nest(model, progress=progress, **settings)
    show(as_json, {**vars(report), "output": str(report.output)}, lambda: _nest_report(report))


def _nest_report(report: NestReport) -> Iterator[Block]:
    yield Table.of(
        report.levels,
        {
            "submodel": lambda level: level.label,
            "parameters": lambda level: f"{level.parameters:,}",
            "cosine, ranked only": lambda level: f"{level.ranked:.4f}",
            "cosine, nested": lambda level: f"{level.nested:.4f}",
        },
    )
    yield ShortNames({level.submodel: level.label for level in report.levels}).ids
    yield Table.facts(
        [
            ("cosine", f"mean to the original model, {report.held_out} held-out texts"),
            ("trained on", f"{report.texts} texts, {report.steps} steps, {report.seconds:.0f} s, seed {report.seed}"),
        ]
    )
    yield f"wrote {report.output}"


_CONVERT_CODA_EXAMPLES = """\b
Examples:
  nestforge convert-coda MODEL --output conditional
  nestforge convert-coda MODEL --reduction 5 --reductions 8,5,3,1 --keys-of selected --output conditional
  nestforge convert-coda T5 --with-decoder --output conditional-t5
  nestforge convert-coda MODEL --dense-layers 0,11 --adapter-size 32 --num-labels 3 --output conditional
"""


@click.command("convert-coda", epilog=_CONVERT_CODA_EXAMPLES)
@model_argument
@field_options(NestRequest, "output", "overwrite")
@field_options(ConversionSettings, *(field.name for field in fields(ConversionSettings)))
@click.option("--with-decoder", is_flag=True, help="Keep a T5's decoder, dense, behind the encoder.")
@json_option
def convert_coda_command(
    model: Path, output: Path, overwrite: bool, with_decoder: bool, as_json: bool, **settings: Any
) -> None:
    """Add conditional adapters (CODA) to an encoder.

    MODEL is a Hugging Face folder: T5 (its encoder), ViT, DeiT, BERT and the models of its layout. Adapters start at
    zero and routers small and random, so that at r = 1 the output answers as MODEL's encoder does; at other r it must
    be trained first. The output is a folder of model_type coda_encoder, or with a decoder coda_encoder_decoder, which
    every other command takes.
    """
    from ...compiler.convert_coda import convert_coda

    report = convert_coda(model, output, ConversionSettings(**settings), with_decoder, overwrite)
    show(as_json, {**unstructure(report), "output": str(report.output)}, lambda: _conversion_report(report))


def _conversion_report(report: ConversionReport) -> Iterator[Block]:
    config, groups = report.config, report.groups
    added = ", ".join(f"{name} {count:,}" for name, count in groups.items())
    yield Table.facts(
        [
            ("conditional layers", f"{len(config.conditional)} of {config.num_hidden_layers}, router {config.router}"),
            ("reductions", f"{', '.join(map(str, config.offered))}; to be trained at {config.reduction}"),
            ("keys and values of", config.keys_of),
            *([("decoder", f"dense, {report.decoder_layers} layers")] if report.decoder_layers else []),
            ("parameters", f"{report.parameters:,}; a task trains {added}"),
            *([("left out", ", ".join(report.left_out))] if report.left_out else []),
        ]
    )
    yield f"wrote {report.output}"


_MIXNMATCH_EXAMPLES = """\b
Examples:
  nestforge mixnmatch MODEL --text held-out.txt --budget 'non_embedding_parameters<=60 %'
  nestforge mixnmatch MODEL --text held-out.txt --budget 'ffn_parameters<=94.4M' --evaluations 200 --seed 1 --json
"""


@click.command("mixnmatch", epilog=_MIXNMATCH_EXAMPLES)
@model_argument
@path_option("--text", "UTF-8 text, one example a line, that the model was not trained on.", required=True)
@click.option("--budget", required=True, type=BUDGET, help="One limit, such as 'ffn_parameters<=94.4M'.")
@field_options(CompileRequest, "profile", "levels")
@click.option(
    "--evaluations",
    type=click.IntRange(min=4),
    default=64,
    show_default=True,
    help="Assignments that the search evaluates, the four promotion orders among them.",
)
@field_options(NestRequest, "seed")
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
    """Compare assignments of levels to layers in one budget.

    Loss of the submodel that the ladder gives the budget, in each of the four promotion orders, and of the best
    assignment that an evolutionary search finds. In PyTorch; nothing is compiled. The search chooses on half of the
    held-out texts, and the table shows the loss on the other half.
    """
    from ...compiler.mix_n_match import compare_assignments

    request = CompileRequest(model, profile, levels=levels, budgets=dict([budget]))
    with working() as progress:
        compared = compare_assignments(request, text, evaluations=evaluations, seed=seed, progress=progress)
    show(as_json, compared, lambda: _comparison_report(compared))


def _comparison_report(compared: Comparison) -> Iterator[Block]:
    yield Table.facts(
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
    rows = [[a.way, f"{a.size:,.10g}", f"{a.loss:.4f}"] for a in compared.assignments]
    yield Table(["assignment", compared.metric, "loss"], rows)
    yield Table(["assignment", "id"], [[a.way, a.submodel] for a in compared.assignments])
