"""``nestforge parity``: an export that anybody made, beside the model that it was made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ...errors import NestforgeError
from ...profiles.parity_request import SETTINGS, ParityRequest
from ...tables import Table
from ..console import Block, in_options, let_waiting_threads_sleep, say, show, working
from ..options import EXPORT_NAME, field_options, json_option, once_each, path_option, read_text_lines

if TYPE_CHECKING:
    from ...parity.check import ParityReport

_WRONG, _UNJUDGED = 1, 2
_MOST_INPUT_BYTES = 2**32

_EXAMPLES = """\b
Examples:
  nestforge parity model.onnx --against MODEL
  nestforge parity onnx_folder --against MODEL --preset deploy
  nestforge parity http://localhost:8080/embed --against MODEL --text texts.txt
  nestforge parity model.onnx --against MODEL --save receipt.json --save page.html --save junit.xml
  nestforge parity --receipt receipt.json
  nestforge parity model.onnx --against MODEL --map tokens=input_ids --inputs mine.npz
"""


@click.command("parity", epilog=_EXAMPLES)
@click.argument("export", required=False)
@click.option("--against", metavar="MODEL", help="Model folder that the export was made of, or another export.")
@click.option(
    "--map",
    type=EXPORT_NAME,
    multiple=True,
    callback=once_each,
    help="Input or output of the export, and its name in the model. Repeatable.",
)
@field_options(ParityRequest, "seed", "tolerance", "preset", "library")
@path_option("--inputs", "NPZ file with an array per input: one more case.")
@path_option("--text", "UTF-8 file of texts, one a line: more cases.", "texts")
@path_option(
    "--save",
    "Keep what was found: a receipt (.json), a page (.html) or JUnit's report (.xml). Repeatable.",
    multiple=True,
)
@path_option("--receipt", "Check again what a receipt claims, with the --inputs and --text that it had.")
@json_option
def parity_command(
    export: str | None,
    against: str | None,
    inputs: Path | None,
    texts: Path | None,
    save: tuple[Path, ...],
    receipt: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Check an export of any tool against its model.

    EXPORT is an ONNX file or a folder of them, an OpenVINO IR, a TensorRT plan, a bundle, or the URL of an embeddings
    server. Exit code 0: it is right; 1: it differs; 2: wrong usage, or it could not be judged.
    """
    context = click.get_current_context()
    stated = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if {"export", "against"} - stated if receipt is None else stated & {"export", "against", *SETTINGS}:
        raise click.UsageError("expected EXPORT and --against, or --receipt, which has its own settings")
    let_waiting_threads_sleep()
    try:
        from ...parity.check import check_parity
        from ...parity.receipt import recheck, write
        from ...runtime.inputs.files import read_npz

        own: dict[str, Any] = {} if inputs is None else {"inputs": read_npz(inputs, _MOST_INPUT_BYTES)}
        own |= {} if texts is None else {"texts": read_text_lines(texts).texts}
        with working() as progress:
            if receipt is not None:
                report = recheck(receipt, progress, **own)
            else:
                report = check_parity(str(export), str(against), **settings, **own, progress=progress)
        for path in save:
            write(report, path)
    except NestforgeError as failure:
        say(f"nestforge: error: {in_options(str(failure))}", err=True)
        raise click.exceptions.Exit(_UNJUDGED) from failure
    show(as_json, report, lambda: _parity_report(report))
    if not report.is_right:
        raise click.exceptions.Exit(_WRONG)


def _parity_report(report: ParityReport) -> Iterator[Block]:
    from ...parity.verdict import COLUMNS

    for graph in report.graphs:
        matched = [f"{match.name} is {match.model} ({match.how})" for match in (*graph.inputs, *graph.outputs)]
        facts = [("export", f"{graph.export} ({graph.kind}, {graph.precision})"), ("matched", "; ".join(matched))]
        facts += [("not compared", ", ".join(graph.unmatched))] if graph.unmatched else []
        facts += [("the model refuses", "; ".join(graph.refused))] if graph.refused else []
        yield Table.facts([*facts, ("rule", graph.rule)])
        yield Table(COLUMNS, graph.rows)
        if graph.fault is not None:
            yield str(graph.fault)
    yield [*(f"not checked: {left_out}" for left_out in report.not_checked), report.line]
