"""``nestforge parity``: an export that anybody made, beside the model that it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from ...errors import NestforgeError
from ..console import in_options, let_waiting_threads_sleep, print_facts, print_json, print_table, say, working
from ..options import json_option, once_each, path_option, read_text_lines

if TYPE_CHECKING:
    from ...parity.check import GraphReport

_WRONG, _UNJUDGED = 1, 2

_EXAMPLES = """\b
Examples:
  nestforge parity model.onnx --against MODEL
  nestforge parity onnx_folder --against MODEL --preset deploy
  nestforge parity http://localhost:8080/embed --against MODEL --text texts.txt
  nestforge parity model.onnx --against MODEL --save receipt.json --save page.html --save junit.xml
  nestforge parity --receipt receipt.json
  nestforge parity model.onnx --against MODEL --map tokens=input_ids --inputs mine.npz
"""


class _Pair(click.ParamType):  # type: ignore[type-arg]  # click's own annotations leave it out
    """``a=b``: a name of the export, and the model's."""

    name = "EXPORT=MODEL"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        left, equals, right = str(value).partition("=")
        if not left or not equals or not right:
            self.fail(f"{value!r}: expected a name of the export and the model's, such as tokens=input_ids", param, ctx)
        return left, right


@click.command("parity", epilog=_EXAMPLES)
@click.argument("export", required=False)
@click.option("--against", metavar="MODEL", help="Model folder that the export was made of, or another export.")
@click.option(
    "--map",
    type=_Pair(),
    multiple=True,
    callback=once_each,
    help="Input or output of the export, and its name in the model. Repeatable.",
)
@click.option("--inputs", type=click.Path(path_type=Path), help="NPZ file with an array per input: one more case.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Random seed of the cases.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0, min_open=True),
    help="Largest difference, as a share of the output's rms, in the place of the rule.",
)
@click.option(
    "--preset",
    type=click.Choice(["strict", "deploy"]),
    help="strict: the rule of fp32, whatever the precision; deploy: cosine and largest element of every row.",
)
@click.option("--library", type=click.Path(path_type=Path), help="Shared library with the export's custom operators.")
@path_option("--text", "UTF-8 file of texts, one a line: more cases.")
@path_option(
    "--save",
    "Keep what was found: a receipt (.json), a page (.html) or JUnit's report (.xml). Repeatable.",
    multiple=True,
)
@path_option("--receipt", "Check again what a receipt claims; beside it --save and --json alone.")
@json_option
def parity_command(
    export: str | None,
    against: str | None,
    map: dict[str, str],
    inputs: Path | None,
    seed: int,
    tolerance: float | None,
    preset: str | None,
    library: Path | None,
    text: Path | None,
    save: tuple[Path, ...],
    receipt: Path | None,
    as_json: bool,
) -> None:
    """Check an export of any tool against its model.

    EXPORT is an ONNX file or a folder of them, an OpenVINO IR, a bundle, or the URL of an embeddings server. Exit code
    0: it is right; 1: it differs; 2: wrong usage, or it could not be judged.
    """
    context = click.get_current_context()
    stated = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if {"export", "against"} - stated if receipt is None else stated - {"receipt", "save", "as_json"}:
        raise click.UsageError("expected EXPORT and --against, or --receipt with --save or --json alone")
    if (inputs or text) and any(path.suffix == ".json" for path in save):
        raise click.UsageError("a receipt holds no --inputs and no --text; save a page (.html) or a report (.xml)")
    let_waiting_threads_sleep()
    try:
        from ...parity.check import check_parity, read_inputs
        from ...parity.receipt import recheck, write

        with working() as progress:
            report = (
                recheck(receipt)
                if receipt is not None
                else check_parity(
                    str(export),
                    str(against),
                    map=map,
                    inputs=None if inputs is None else read_inputs(inputs),
                    texts=None if text is None else read_text_lines(text).texts,
                    seed=seed,
                    tolerance=tolerance,
                    preset=preset,  # type: ignore[arg-type]  # click has checked it
                    library=library,
                    progress=progress,
                )
            )
        for path in save:
            write(report, path)
    except NestforgeError as failure:
        say(f"nestforge: error: {in_options(str(failure))}", err=True)
        raise click.exceptions.Exit(_UNJUDGED) from failure
    if as_json:
        print_json(report)
    else:
        for graph in report.graphs:
            _print_graph(graph)
        say(report.line)
    if not report.is_right:
        raise click.exceptions.Exit(_WRONG)


def _print_graph(graph: GraphReport) -> None:
    matched = [f"{match.name} is {match.model} ({match.how})" for match in (*graph.inputs, *graph.outputs)]
    facts = [("export", f"{graph.export} ({graph.kind}, {graph.precision})"), ("matched", "; ".join(matched))]
    if graph.unmatched:
        facts.append(("not compared", ", ".join(graph.unmatched)))
    if graph.refused:
        facts.append(("the model refuses", "; ".join(graph.refused)))
    print_facts([*facts, ("rule", graph.rule)])
    click.echo()
    rows = [
        [
            figure.case,
            figure.output,
            f"{figure.max_abs:.1e}",
            f"{figure.max_rel:.1e}",
            f"{figure.cosine:.7f}",
            "-" if figure.agreement is None else f"{figure.agreement:.1%}",
            f"{figure.own:.1e}",
            "right" if figure.is_right else "differs",
        ]
        for figure in graph.figures
    ]
    rows += [[failure.case, "-", "-", "-", "-", "-", "-", "fails"] for failure in graph.failures]
    print_table(["case", "output", "max abs", "max rel", "cosine", "same largest", "PyTorch's own", "verdict"], rows)
    click.echo()
    if graph.fault is not None:
        say(f"{graph.fault}\n")
