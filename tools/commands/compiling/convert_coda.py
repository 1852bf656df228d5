"""``nestforge convert-coda``: an ordinary encoder becomes one with conditional adapters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ....strict import unstructure
from ...console import print_facts, print_json, say
from ...options import LayersType, ReductionsType, json_option, model_argument, overwrite_option

if TYPE_CHECKING:
    from ....compiler.convert_coda import ConversionReport

EXAMPLES = """\b
Examples:
  nestforge convert-coda MODEL --output conditional
  nestforge convert-coda MODEL --reduction 5 --reductions 8,5,3,1 --keys-of selected --output conditional
  nestforge convert-coda T5 --with-decoder --output conditional-t5
  nestforge convert-coda MODEL --dense-layers 0,11 --adapter-size 32 --num-labels 3 --output conditional
"""


@click.command("convert-coda", epilog=EXAMPLES)
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
def command(model: Path, output: Path, overwrite: bool, with_decoder: bool, as_json: bool, **settings: Any) -> None:
    """Add conditional adapters (CODA) to an ordinary encoder, for training.

    MODEL is a Hugging Face folder: T5 (its encoder), ViT, DeiT, BERT and the models of its layout. Adapters start at
    zero and routers small and random, so that at r = 1 the output answers as MODEL's encoder does; at other r it must
    be trained first. The output is a folder of model_type coda_encoder, or with a decoder coda_encoder_decoder, which
    every other command takes.
    """
    from ....compiler.convert_coda import convert_coda
    from ....exporters.families.coda.convert import ConversionSettings

    report = convert_coda(model, output, ConversionSettings(**settings), with_decoder, overwrite)
    if as_json:
        print_json({**unstructure(report), "output": str(report.output)})
    else:
        _print(report)


def _print(report: ConversionReport) -> None:
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
