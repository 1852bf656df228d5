"""``nestforge verify`` and ``consistency``: a bundle beside its model, submodels beside the universal one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...errors import ParityError
from ...runtime.summary import ShortNames
from ..bundle_view import print_ids
from ..console import let_waiting_threads_sleep, print_facts, print_json, print_table, say, working
from ..functions import consistency
from ..options import bundle_argument, field_options, json_option, path_option

if TYPE_CHECKING:
    from ...compiler.parity.engine_verdict import EngineVerdict
    from ...runtime.consistency.measure import Consistency


_COUNTS = ("files", "bytes", "policies", "plans", "measurements", "tasks")

_VERIFY_EXAMPLES = "\b\nExamples:\n  nestforge verify my.bundle\n  nestforge verify my.bundle --against MODEL --json"


@click.command("verify", epilog=_VERIFY_EXAMPLES)
@bundle_argument
@path_option(
    "--against", "Model folder, whose PyTorch submodels the written engines are compared with again.", metavar="MODEL"
)
@json_option
def verify_command(bundle: Path, against: Path | None, as_json: bool) -> None:
    """Check a bundle's bytes, and its parity with a model.

    Without --against the hash of every file is checked, calibration, plans, measurements and tasks included; with it
    every engine is run and compared as well, with the tensors of every task that it may answer for.
    """
    if against is None:
        _verify_bytes(bundle, as_json)
    else:
        _verify_parity(bundle, against, as_json)


def _verify_bytes(path: Path, as_json: bool) -> None:
    from ...runtime.load import verify_bytes  # a device checks bytes without torch

    checked = verify_bytes(path)
    if as_json:
        counts = {name: getattr(checked, name) for name in _COUNTS}
        print_json({"bundle": str(checked.bundle.path), **counts, "engines": []})
    else:
        say(f"{path}: {checked}")


def _verify_parity(path: Path, against: Path, as_json: bool) -> None:
    let_waiting_threads_sleep()
    from ...bundle.open_bundle import open_bundle
    from ...compiler.verify import verify_bundle

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


_CONSISTENCY_EXAMPLES = """\b
Examples:
  nestforge consistency my.bundle --text texts.txt
  nestforge consistency my.bundle --data images.npz --submodel S --submodel M
  nestforge consistency my.bundle --text texts.txt --json
"""


@click.command("consistency", epilog=_CONSISTENCY_EXAMPLES)
@bundle_argument
@field_options(consistency, "text", "data", "submodels")
@json_option
def consistency_command(bundle: Path, as_json: bool, **settings: Any) -> None:
    """Compare submodels with the universal model on your data.

    Runs the deployed engines on this host, without torch. Which figures there are follows from what the model
    returns: an embedding, classes, or tokens.
    """
    if (settings["text"] is None) == (settings["data"] is None):
        raise click.UsageError("expected exactly one of --text and --data")
    with working() as progress:
        found = consistency(bundle, progress=progress, **settings)
    if as_json:
        print_json(found)
    else:
        _print_consistency(found)


def _print_consistency(found: Consistency) -> None:
    from ...bundle.figures import cell, heading, meanings, present
    from ...profiles.precision import TRACED

    given = f"{found.samples}" if found.samples == found.given else f"{found.samples} of {found.given}, spread over all"
    cut = f", {found.truncated} cut to {found.bucket.sequence} tokens" if found.truncated else ""
    exact = found.universal_precision == TRACED
    print_facts(
        [
            ("bundle", found.bundle),
            ("universal", found.universal if exact else f"{found.universal} ({found.universal_precision})"),
            ("compared", ", ".join(f"output {name} as {role}" for role, name in found.outputs.items())),
            ("samples", f"{given}{cut}"),
            *([("positions", str(found.positions))] if found.positions is not None else []),
            ("bucket", str(found.bucket)),
        ]
    )
    click.echo()
    names = present(row.figures for row in found.submodels)
    fewer = any(row.samples != found.samples for row in found.submodels)  # of submodels of a shorter sequence
    rows = [
        [
            "/".join(row.labels) or row.submodel,
            f"{row.parameters / 1e6:.2f}",
            *([str(row.samples)] if fewer else []),
            *(cell(row.figures, name, row.errors) for name in names),
        ]
        for row in found.submodels
    ]
    print_table(["submodel", "M params", *(["samples"] if fewer else []), *map(heading, names)], rows)
    click.echo()
    say("±: standard error of so many samples")
    for line in meanings(names):
        say(line)
    if not exact:
        precision = found.universal_precision
        say(f"\nnote: figures are against the universal model in {precision}, not in float32")
