"""``nestforge consistency``: how much of the universal model a bundle's submodels keep, on the user's own data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...console import print_facts, print_json, print_table, say, working
from ...options import bundle_argument, json_option

if TYPE_CHECKING:
    from ....runtime.consistency.report import Consistency

EXAMPLES = """\b
Examples:
  nestforge consistency my.bundle --text texts.txt
  nestforge consistency my.bundle --data images.npz --submodel S --submodel M
  nestforge consistency my.bundle --text texts.txt --json
"""


@click.command(epilog=EXAMPLES)
@bundle_argument
@click.option("--text", type=click.Path(path_type=Path), help="UTF-8 file, one text a line.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="NPZ file with an array per input, rows first; 'labels' of a classifier add accuracy.",
)
@click.option(
    "--submodel", "submodels", multiple=True, metavar="ID", help="By label or id; repeatable. Default: all of them."
)
@json_option
def command(bundle: Path, text: Path | None, data: Path | None, submodels: tuple[str, ...], as_json: bool) -> None:
    """Compare every submodel of a bundle with its universal model, on your own texts or arrays.

    Runs the deployed engines on this host, without torch. Which figures there are follows from what the model
    returns: an embedding, classes, or tokens.
    """
    from ...functions import consistency

    if (text is None) == (data is None):
        raise click.UsageError("expected exactly one of --text and --data")
    with working() as progress:
        found = consistency(bundle, text=text, data=data, submodels=submodels, progress=progress)
    if as_json:
        print_json(found)
    else:
        _print(found)


def _print(found: Consistency) -> None:
    from ....bundle.figures import FIGURES, cell, heading, present
    from ....profiles.precision import TRACED

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
    for name in names:
        say(f"{FIGURES[name].heading}: {FIGURES[name].meaning}")
    if not exact:
        precision = found.universal_precision
        say(f"\nnote: figures are against the universal model in {precision}, not in float32")
