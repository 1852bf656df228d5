"""``nestforge compile``: the main job, one checkpoint to one bundle."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ....bucket import Bucket
from ....bundle.open_bundle import open_bundle
from ...bundle_view import bundle_data, bundle_warnings, print_cpu_seconds, print_submodels, print_tasks
from ...console import let_waiting_threads_sleep, print_json, resumable, say, working
from ...options import (
    bucket_option,
    budget_at_option,
    budget_option,
    exits_option,
    json_option,
    levels_option,
    model_argument,
    overwrite_option,
    precision_option,
    profile_option,
    promotion_order_option,
    slice_option,
    submodel_option,
    tasks_option,
    variant_option,
)
from ...spoken import in_options

if TYPE_CHECKING:
    from ....compiler.request import Include
    from ....profiles.budget import BudgetSpec
    from ....profiles.device_profile import PromotionOrder
    from ....profiles.precision import Precision

EXAMPLES = """\b
Examples:
  nestforge compile MODEL --profile host-cpu --output my.bundle
  nestforge compile MODEL --text calibration.txt --levels ffn=0.25,0.5,1 --levels heads=0.5,1,1 --output my.bundle
  nestforge compile MODEL --budget 'ffn_parameters<=50 %' --promotion-order up-down --output my.bundle
  nestforge compile MODEL --submodel ffn768-heads6 --bucket 1x64 --bucket 8x128 --output my.bundle
  nestforge compile MODEL --precision fp32,int8 --text calibration.txt --output my.bundle
  nestforge compile MODEL --task reviews=FOLDER --task questions=FOLDER --output my.bundle
  nestforge compile MODEL --profile jetson-orin-nano-8gb --emit-only --output jetson.bundle
"""


@click.command(epilog=EXAMPLES)
@model_argument
@profile_option
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Folder to write; must not exist.")
@overwrite_option
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    help="UTF-8 text, one example a line: ranks the axes and measures quality. Without it: magnitude, no quality.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="The same for models that take no text: .npz with an array per input, rows first, perhaps 'labels'.",
)
@levels_option
@promotion_order_option
@budget_option
@submodel_option
@slice_option
@bucket_option
@budget_at_option
@exits_option
@variant_option
@precision_option
@tasks_option
@click.option(
    "--lora-rank",
    type=click.IntRange(1, 2**16),
    help="Least rank of engines for PEFT adapters, so that add-task takes larger ones. Default: the largest given.",
)
@click.option(
    "--mergeable",
    is_flag=True,
    help="Also engines into whose weights a task is merged where it is opened so: faster, at a model's memory each.",
)
@click.option(
    "--include",
    type=click.Choice(["budgets", "levels", "ladder"]),
    default="levels",
    show_default=True,
    help="Submodels to build: those the budgets chose; also every level; also every rung between.",
)
@click.option(
    "--emit-only",
    is_flag=True,
    help="For TensorRT: write proven graphs alone; `nestforge build BUNDLE` makes their plans on the device.",
)
@click.option(
    "--generate",
    is_flag=True,
    help="Also engines that keep a cache, of a causal language model: `nestforge generate` runs them.",
)
@click.option("--no-measure", is_flag=True, help="Time nothing on this host: latencies are predicted.")
@json_option
def command(
    model: Path,
    profile: str,
    output: Path,
    overwrite: bool,
    text: Path | None,
    data: Path | None,
    levels: tuple[tuple[str, tuple[float, ...]], ...],
    promotion_order: PromotionOrder | None,
    budgets: tuple[tuple[str, BudgetSpec], ...],
    submodels: tuple[str, ...],
    slices: tuple[Path, ...],
    buckets: tuple[Bucket, ...],
    budget_at: Bucket | None,
    exits: tuple[int, ...] | None,
    variants: tuple[tuple[str, str], ...],
    precisions: tuple[Precision, ...] | None,
    tasks: tuple[tuple[str, Path], ...],
    lora_rank: int | None,
    mergeable: bool,
    include: Include,
    generate: bool,
    emit_only: bool,
    no_measure: bool,
    as_json: bool,
) -> None:
    """Compile a checkpoint into a bundle of verified engines.

    MODEL is a Hugging Face folder, or one in a format of nestforge's own: config.json and safetensors weights. An
    interrupted compile is resumed by the same command. Nothing is published unless every parity gate passes.
    """
    if text is not None and data is not None:
        raise click.UsageError("expected at most one of --text and --data")
    let_waiting_threads_sleep()
    with working() as progress, resumable(output):
        from ....compiler.compile import compile_request
        from ....compiler.request import CompileRequest

        request = CompileRequest(
            model,
            profile,
            text=text,
            data=data,
            levels=dict(levels),
            promotion_order=promotion_order,
            budgets=dict(budgets),
            submodels=submodels,
            slices=slices,
            buckets=buckets,
            budget_at=budget_at,
            exits=exits,
            variants=dict(variants),
            precisions=precisions,
            include=include,
            generate=generate,
            emit_only=emit_only,
            measure=not no_measure,
            tasks=dict(tasks),
            lora_rank=lora_rank,
            mergeable=mergeable,
        )
        path = compile_request(
            request, output, command=("nestforge", *sys.argv[1:]), progress=progress, overwrite=overwrite
        )
    bundle = open_bundle(path)
    if as_json:
        print_json(bundle_data(bundle))
        return
    print_submodels(bundle)
    if tasks:
        say("")
        print_tasks(bundle)
    for note in bundle.manifest.notes:
        say(f"\nnote: {in_options(note)}")
    for warning in bundle_warnings(bundle):
        say(f"\nwarning: {in_options(warning)}")
    say("")
    print_cpu_seconds(bundle, time.process_time())
    say(f"wrote {path}")
    if emit_only:
        say(f"on the device: nestforge build {path.name}")
