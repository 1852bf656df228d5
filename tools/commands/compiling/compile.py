"""``nestforge compile``: the main job, one checkpoint to one bundle."""

from __future__ import annotations

import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from ....bundle.open_bundle import open_bundle
from ....profiles.compile_request import CompileRequest
from ...bundle_view import bundle_data, bundle_warnings, print_cpu_seconds, print_submodels, print_tasks
from ...console import let_waiting_threads_sleep, print_json, resumable, say, working
from ...options import field_options, json_option, model_argument
from ...spoken import in_options

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


FIELDS = tuple(field.name for field in fields(CompileRequest) if field.name not in ("model", "command", "progress"))


@click.command(epilog=EXAMPLES)
@model_argument
@field_options(CompileRequest, *FIELDS)
@json_option
def command(model: Path, as_json: bool, **settings: Any) -> None:
    """Compile a checkpoint into a bundle of verified engines.

    MODEL is a Hugging Face folder, or one in a format of nestforge's own: config.json and safetensors weights. An
    interrupted compile is resumed by the same command. Nothing is published unless every parity gate passes.
    """
    if settings["text"] is not None and settings["data"] is not None:
        raise click.UsageError("expected at most one of --text and --data")
    let_waiting_threads_sleep()
    with working() as progress, resumable(settings["output"]):
        from ....compiler.compile import compile_bundle

        path = compile_bundle(model, command=("nestforge", *sys.argv[1:]), progress=progress, **settings)
    bundle = open_bundle(path)
    if as_json:
        print_json(bundle_data(bundle))
        return
    print_submodels(bundle)
    if settings["tasks"]:
        say("")
        print_tasks(bundle)
    for note in bundle.manifest.notes:
        say(f"\nnote: {in_options(note)}")
    for warning in bundle_warnings(bundle):
        say(f"\nwarning: {in_options(warning)}")
    say("")
    print_cpu_seconds(bundle, time.process_time())
    say(f"wrote {path}")
    if settings["emit_only"]:
        say(f"on the device: nestforge build {path.name}")
