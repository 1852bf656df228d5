"""``nestforge compile``, ``farm``, ``build`` and ``add-task``: from a checkpoint to a bundle of verified engines, or
from jobs and profiles to a fleet's."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...bundle.open_bundle import Bundle, open_bundle
from ...profiles.compile_request import JOB_OPTIONS, CompileRequest
from ...profiles.job_file import load_farm, save_job
from ...runtime.summary import ShortNames
from ...tables import Table
from ..bundle_view import bundle_data, bundle_warnings, cpu_seconds_line, submodels_report, tasks_report
from ..console import Block, in_options, let_waiting_threads_sleep, resumable, say, show, working
from ..options import TASK, bundle_argument, field_options, json_option, model_argument, of_job, path_option

if TYPE_CHECKING:
    from ...compiler.trial import TrialReport


_COMPILE_EXAMPLES = """\b
Examples:
  nestforge compile MODEL --profile host-cpu --output my.bundle
  nestforge compile MODEL --text calibration.txt --levels ffn=0.25,0.5,1 --levels heads=0.5,1,1 --output my.bundle
  nestforge compile MODEL --budget 'ffn_parameters<=50 %' --promotion-order up-down --output my.bundle
  nestforge compile MODEL --submodel ffn768-heads6 --bucket 1x64 --bucket 8x128 --output my.bundle
  nestforge compile MODEL --precision fp32,int8 --text calibration.txt --output my.bundle
  nestforge compile MODEL --task reviews=FOLDER --task questions=FOLDER --output my.bundle
  nestforge compile MODEL --profile jetson-orin-nano-8gb --emit-only --output jetson.bundle
  nestforge compile MODEL --precision fp32,int8-dynamic --save job.yaml
  nestforge compile job.yaml --output other.bundle
  nestforge compile MODEL --generate --precision int4 --text calibration.txt --trial
"""


@click.command("compile", epilog=_COMPILE_EXAMPLES)
@model_argument
@field_options(CompileRequest, *JOB_OPTIONS[1:])
@path_option(
    "--save", "Write the job into this new YAML file instead, which `nestforge compile FILE` then runs.", "save"
)
@click.option(
    "--trial",
    is_flag=True,
    help="Compile a random model of the class with few layers and narrow widths instead, and report; write nothing.",
)
@json_option
def compile_command(model: Path, save: Path | None, trial: bool, as_json: bool, **settings: Any) -> None:
    """Compile a checkpoint into a bundle of verified engines.

    MODEL is a Hugging Face folder, or one in a format of nestforge's own: config.json and safetensors weights; or a job
    that --save wrote, in which options stated here take the place of its own. An interrupted compile is resumed by the
    same command. Nothing is published unless every parity gate passes.
    """
    model, settings = of_job(model, settings)
    if settings["text"] is not None and settings["data"] is not None:
        raise click.UsageError("expected at most one of --text and --data")
    if save is not None and trial:
        raise click.UsageError("expected at most one of --save and --trial")
    settings["output"] = Path(settings["output"])
    if save is not None:
        save_job(CompileRequest(model, **settings), save)
        show(as_json, {"job": str(save)}, lambda: [f"wrote {save}; nestforge compile {save} runs it"])
        return
    let_waiting_threads_sleep()
    if trial:
        _try(CompileRequest(model, **settings), as_json)
        return
    with working() as progress, resumable(settings["output"]):
        from ...compiler.compile import compile_job, prepare
        from ...compiler.work.clock import Clock

        clock = Clock(progress)
        job = prepare(CompileRequest(model, command=("nestforge", *sys.argv[1:]), **settings), clock)
        path = compile_job(job, clock, lambda: say(f"takes {job.cost}", err=True))
    bundle = open_bundle(path)
    show(as_json, bundle_data(bundle), lambda: _compile_report(bundle, path, **settings))


def _compile_report(bundle: Bundle, path: Path, tasks: Any, emit_only: bool, **_: Any) -> Iterator[Block]:
    yield from submodels_report(bundle)
    if tasks:
        yield tasks_report(bundle)
    yield from (f"note: {in_options(note)}" for note in bundle.manifest.notes)
    yield from (f"warning: {in_options(warning)}" for warning in bundle_warnings(bundle))
    built = [f"on the device: nestforge build {path.name}"] if emit_only else []
    yield [cpu_seconds_line(bundle, time.process_time()), f"wrote {path}", *built]


def _try(request: CompileRequest, as_json: bool) -> None:
    from ...compiler.trial import trial

    with working() as progress:
        report = trial(replace(request, progress=progress))
    show(as_json, report, lambda: _trial_report(report))


def _trial_report(report: TrialReport) -> Iterator[Block]:
    sizes = (f"{name} {small} of {size}" for name, (size, small) in report.changes.items())
    facts = {
        "model": f"{report.model_class} ({report.family}), {report.model}",
        "tried with": f"{report.parameters / 1e6:.2f} M parameters: {', '.join(sizes)}",
        "axes": ", ".join(report.axes) or "none",
        "submodels": ", ".join(report.submodels),
        "engines": f"{report.engines} in {', '.join(report.precisions)} at {', '.join(report.buckets)}, as PyTorch",
        "proofs": ", ".join(report.proofs) or "none",
        "not tried": in_options(", ".join(report.untried)),
    }
    yield Table.facts(facts.items())
    yield from (f"kept whole: {in_options(each)}" for each in report.kept_whole)
    yield from (f"note: {in_options(each)}" for each in report.notes)
    yield f"the road works for this class and these options; it took {report.seconds:.0f} s"


@click.command("build", epilog="\b\nExamples:\n  nestforge build my.bundle\n  nestforge build my.bundle --json")
@bundle_argument
@json_option
def build_command(bundle: Path, as_json: bool) -> None:
    """Build a bundle's TensorRT plans on this device.

    Each plan is built from its graph, checked against it, and listed beside the bundle's files, which stay as they are.
    Plans that are there already, for this GPU and release of TensorRT, are kept.
    """
    from ...compiler.tensorrt.build_bundle import build_plans

    with working() as progress:
        plans = build_plans(bundle, progress)
    names = ShortNames.of(open_bundle(bundle).manifest)
    table = Table.of(
        plans,
        {
            "engine": lambda plan: names(plan.engine),
            "plan MB": lambda plan: f"{plan.entry.bytes / 1e6:.1f}",
            "activations MB": lambda plan: f"{plan.entry.activation_bytes / 1e6:.1f}",
            "layers": lambda plan: sum(plan.entry.layers.values()),
            "max abs": lambda plan: f"{plan.entry.parity.max_abs:.2g}",
            "built in": lambda plan: "kept" if plan.was_kept else f"{plan.entry.seconds:.0f} s",
        },
    )
    show(as_json, plans, lambda: [table, names.ids, f"plans for {plans[0].entry.gpu}"])


_ADD_TASK_EXAMPLES = """\b
Examples:
  nestforge add-task my.bundle reviews=TASK_FOLDER --against MODEL
  nestforge add-task my.bundle reviews=ADAPTER_FOLDER --against MODEL --json
"""


@click.command("add-task", epilog=_ADD_TASK_EXAMPLES)
@bundle_argument
@click.argument("task", type=TASK)
@path_option(
    "--against", "Model folder of the bundle's base, PyTorch's side of the gate.", metavar="MODEL", required=True
)
@json_option
def add_task_command(bundle: Path, task: tuple[str, Path], against: Path, as_json: bool) -> None:
    """Add a task to a bundle compiled with --task.

    TASK is NAME=FOLDER. Every engine that may answer for it is run with its tensors and compared with PyTorch; what the
    bundle has stays untouched, and where anything is refused nothing is added.
    """
    let_waiting_threads_sleep()
    from ...compiler.add_task import add_task

    name, folder = task
    with working() as progress:
        path = add_task(bundle, name, folder, against, progress)
    opened = open_bundle(path)
    show(as_json, bundle_data(opened), lambda: [tasks_report(opened), f"added {name} to {bundle}"])


_EXAMPLES = """\b
Examples:
  nestforge farm farm.yaml
  nestforge farm farm.yaml --address auto
  nestforge farm farm.yaml --address 10.0.0.7:6379 --json
"""


@click.command("farm", epilog=_EXAMPLES)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--address",
    metavar="HOST:PORT",
    envvar="RAY_ADDRESS",
    show_envvar=True,
    help="Ray cluster whose machines see the same folders; auto: the one of this machine. Default: this machine alone.",
)
@json_option
def farm_command(file: Path, address: str | None, as_json: bool) -> None:
    """Compile a fleet's bundles, jobs times profiles.

    FILE is YAML: `jobs`, files of nestforge compile --save; `profiles`, names or files; `output`, the folder of the
    bundles. Jobs of one model share traces and weights. One that fails stops no other, and the same command goes on
    where an earlier one was. Plans for TensorRT are left to nestforge build.

    Exit code 1 where a job failed.
    """
    requests = load_farm(file)
    let_waiting_threads_sleep()
    outcomes = []
    try:
        with working() as progress:
            from ...compiler.farm import run_farm

            for one in run_farm(requests, address, progress):
                outcomes.append(one)
                if one.problem is not None:
                    say(f"{one.name}: {in_options(one.problem)}", err=True)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command goes on where this one was") from None
    outcomes.sort(key=lambda one: [*requests].index(one.name))
    table = Table.of(
        outcomes,
        {
            "bundle": lambda one: one.bundle,
            "state": lambda one: one.state,
            "seconds": lambda one: f"{one.seconds:.0f}" if one.host else "-",
            "machine": lambda one: one.host or "-",
        },
    )
    show(as_json, outcomes, lambda: [table])
    if any(one.state == "failed" for one in outcomes):
        raise SystemExit(1)
