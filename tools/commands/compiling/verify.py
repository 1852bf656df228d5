"""``nestforge verify``: every byte of a bundle, and with a model every engine against PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ....errors import ParityError
from ....runtime.summary.short_names import ShortNames
from ...bundle_view import print_ids
from ...console import let_waiting_threads_sleep, print_json, print_table, say, working
from ...options import bundle_argument, json_option

if TYPE_CHECKING:
    from ....compiler.parity.engine_verdict import EngineVerdict

_COUNTS = ("files", "bytes", "policies", "plans", "measurements", "tasks")

EXAMPLES = "\b\nExamples:\n  nestforge verify my.bundle\n  nestforge verify my.bundle --against MODEL --json"


@click.command(epilog=EXAMPLES)
@bundle_argument
@click.option(
    "--against",
    metavar="MODEL",
    type=click.Path(path_type=Path),
    help="Model folder: compare the written engines, run through the runtime, with its PyTorch submodels again.",
)
@json_option
def command(bundle: Path, against: Path | None, as_json: bool) -> None:
    """Check a bundle's bytes, and its parity with a model.

    Without --against the hash of every file is checked, calibration, plans, measurements and tasks included; with it
    every engine is run and compared as well, with the tensors of every task that it may answer for.
    """
    if against is None:
        _verify_bytes(bundle, as_json)
    else:
        _verify_parity(bundle, against, as_json)


def _verify_bytes(path: Path, as_json: bool) -> None:
    from ....runtime.verify_bytes import verify_bytes  # a device checks bytes without torch

    checked = verify_bytes(path)
    if as_json:
        counts = {name: getattr(checked, name) for name in _COUNTS}
        print_json({"bundle": str(checked.bundle.path), **counts, "engines": []})
    else:
        say(f"{path}: {checked}")


def _verify_parity(path: Path, against: Path, as_json: bool) -> None:
    let_waiting_threads_sleep()
    from ....bundle.open_bundle import open_bundle
    from ....compiler.verify import verify_bundle

    with working() as progress:
        report = verify_bundle(path, against, progress)
    if as_json:
        print_json(report)
    else:
        names = ShortNames.of(open_bundle(path).manifest)
        say(f"{path}: {report.files} files, {report.bytes / 1e6:.1f} MB, every hash and seal as it was written\n")
        columns = ["engine", "parity", "max abs", "max rel", "min cosine"]
        decide = any(verdict.routing for verdict in report.engines)
        columns += ["choices", "not PyTorch's own", "worst score gap"] if decide else []
        print_table(columns, [_row(verdict, names)[: len(columns)] for verdict in report.engines])
        click.echo()
        print_ids(names)
    broken = [verdict for verdict in report.engines if verdict.problem]
    if broken:
        raise ParityError(
            f"bundle {path}: {len(broken)} of {len(report.engines)} engines differ from {against}: "
            f"{broken[0].engine}: {broken[0].problem}"
        )


def _row(verdict: EngineVerdict, names: ShortNames) -> list[str]:
    """The worst figures over all outputs, and over all routes; dashes where the engine did not get as far as one."""
    outputs, routing = verdict.outputs, verdict.routing or ()
    figures, judged = ["-"] * 3, ["-"] * 3
    if outputs:
        figures = [
            f"{max(output.max_abs for output in outputs):.1e}",
            f"{max(output.max_rel for output in outputs):.1e}",
            f"{min(output.min_cosine for output in outputs):.7f}",
        ]
    if routing:
        judged = [
            str(sum(routes.made for routes in routing)),
            str(sum(routes.differing for routes in routing)),
            f"{max(routes.worst_score_gap for routes in routing):.1e}",
        ]
    return [names(verdict.engine), "differs" if verdict.problem else "equal", *figures, *judged]
