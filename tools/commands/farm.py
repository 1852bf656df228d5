"""``nestforge farm``: compiles times profiles, on this machine or a Ray cluster."""

from __future__ import annotations

from pathlib import Path

import click

from ...profiles.farm_file import load_farm
from ...tables import Table
from ..console import in_options, let_waiting_threads_sleep, say, show, working
from ..options import json_option

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
