"""``nestforge serve`` and ``loadtest``: bundles behind KServe v2, OpenAI's routes and those of
text-embeddings-inference; a bundle, or any server that speaks KServe v2, under load by MLCommons LoadGen."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...bucket import Bucket
from ...bundle.open_bundle import open_bundle
from ...errors import InputError
from ...runtime.inputs.files import read_text_file
from ...runtime.load import load
from ...runtime.summary import ShortNames
from ...tables import Table
from ..console import say, show, working
from ..options import SHAPE, FiniteRange, field_options, json_option, path_option

if TYPE_CHECKING:
    from ..load_test import LoadPoint, Scenario


_SERVE_EXAMPLES = """\b
Examples:
  nestforge serve my.bundle
  nestforge serve minilm.bundle classes.bundle --host 0.0.0.0 --port 8080 --token-file token.txt
"""


@click.command("serve", epilog=_SERVE_EXAMPLES)
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0: any that is free."
)
@click.option("--grpc-port", type=click.IntRange(0, 65535), help="Port of the Open Inference Protocol over gRPC.")
@path_option("--token-file", "File with the token that requests must bring as Authorization: Bearer TOKEN.")
@click.option(
    "--patience-ms",
    type=FiniteRange(min=0, min_open=True),
    default=30_000.0,
    show_default=True,
    help="The longest that a request without a deadline waits, in ms.",
)
@click.option(
    "--stop-s", type=FiniteRange(min=1), default=30.0, show_default=True, help="Time to finish at the end, in s."
)
@field_options(load, "threads")
def serve_command(
    bundles: tuple[Path, ...],
    host: str,
    port: int,
    grpc_port: int | None,
    token_file: Path | None,
    patience_ms: float,
    stop_s: float,
    threads: int | None,
) -> None:
    """Serve bundles over HTTP, and over gRPC beside it.

    A model is called as its folder, without .bundle. Requests share runs, or have runs side by side on a thread each,
    get smaller submodels under load where they state a deadline, and are refused at once where even those are too
    late. The access log is stdout, a JSON object a line. SIGTERM or Ctrl-C ends it.
    """
    from ...serving.app import Limits
    from ...serving.server import ServeRequest, read_token, serve

    limits = Limits(patience_ms=patience_ms)
    options: dict[str, Any] = {"host": host, "port": port, "grpc_port": grpc_port, "token": read_token(token_file)}
    serve(ServeRequest(bundles, **options, stop_s=stop_s, threads=threads, limits=limits))


_PICTURES = (".svg", ".png", ".pdf")
# Shares of what SingleStream shows: offered loads, and the deadline.
_LOADS, _PATIENCE = (0.5, 1.0, 2.0, 3.0), 4.0
_POSITIVE = FiniteRange(min=0, min_open=True)
_EXAMPLES = """\b
Examples:
  nestforge loadtest my.bundle --picture load.svg
  nestforge loadtest my.bundle --rate 100 --rate 300 --deadline-ms 20 --seconds 60
  nestforge loadtest http://10.0.0.7:8000 --model minilm --scenario Offline --json
"""


@click.command("loadtest", epilog=_EXAMPLES)
@click.argument("where", metavar="BUNDLE|URL")
@click.option("--model", metavar="NAME", help="Model of the server at URL.")
@click.option(
    "--scenario",
    "scenarios",
    multiple=True,
    type=click.Choice(("MultiStream", "Server", "Offline"), case_sensitive=False),
    default=("Server",),
    show_default=True,
    help="Scenario of LoadGen; SingleStream always comes first. Repeatable.",
)
@click.option(
    "--rate",
    "rates",
    multiple=True,
    type=_POSITIVE,
    help="Requests a second that Server offers. Default: 0.5, 1, 2 and 3 times what SingleStream got. Repeatable.",
)
@click.option(
    "--deadline-ms", type=_POSITIVE, help="Deadline in Server, in ms. Default: 4 times SingleStream's median."
)
@click.option("--submodel", metavar="ID", help="Submodel that every request names, in place of a deadline.")
@click.option("--at", type=SHAPE, default="1x32", show_default=True, help="Input shape of a request.")
@click.option("--seconds", type=_POSITIVE, default=5.0, show_default=True, help="Least time of each scenario.")
@click.option(
    "--queries",
    type=click.IntRange(min=64),
    default=700,
    show_default=True,
    help="Least queries of each; LoadGen needs 662 to judge a 99th percentile.",
)
@path_option("--token-file", "File with the token that the server at URL wants.")
@path_option("--picture", "Picture of latency, and of who answered, over the load: .svg, .png or .pdf.")
@json_option
def loadtest_command(
    where: str,
    model: str | None,
    scenarios: tuple[Scenario, ...],
    rates: tuple[float, ...],
    deadline_ms: float | None,
    submodel: str | None,
    at: Bucket,
    seconds: float,
    queries: int,
    token_file: Path | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Load a server and see what gives.

    A BUNDLE is served for that by a process of its own; a URL is of a server that runs and speaks KServe v2, ours or
    another. MLCommons LoadGen drives and judges, tritonclient asks. Latencies and the verdict are LoadGen's, for which
    a refusal is an answer too; late are answers behind the deadline. Where server and client run on one host they share
    its cores.

    Exit code 1 where LoadGen says INVALID, or a request failed.
    """
    url = re.fullmatch(r"http://([^/]+)/?", where)
    if url and model is None:
        raise click.UsageError("a URL needs --model")
    if picture is not None and picture.suffix not in _PICTURES:
        raise click.UsageError(f"--picture {picture.name}: expected a name that ends in {', '.join(_PICTURES)}")
    from ..load_test import Target, run, served

    headers = {} if token_file is None else {"authorization": f"Bearer {read_text_file(token_file).strip()}"}
    least = {"seconds": seconds, "queries": queries}
    with ExitStack() as opened, working() as progress:
        address, name = (url[1], str(model)) if url else opened.enter_context(served(Path(where)))[:2]
        target = Target.of(address, name, at, headers).stating(**({"submodel": submodel} if submodel else {}))
        points = [run(target, "SingleStream", **least)]  # type: ignore[arg-type]
        if not points[0].answered:
            raise InputError(f"{where}: {next(iter(points[0].failed), 'the server refuses every request')}")
        alone, bound = points[0].per_second, deadline_ms or _PATIENCE * points[0].p50_ms
        timed = target if submodel else target.stating(deadline_ms=bound)
        asked: list[tuple[Scenario, float | None]] = [(one, None) for one in scenarios if one != "Server"]
        if "Server" in scenarios:
            asked += [("Server", rate) for rate in rates or [load * alone for load in _LOADS]]
        for done, (scenario, rate) in enumerate(asked, start=1):
            progress("load", done, len(asked) + 1)
            own = {} if rate is None else {"rate": rate, "bound_ms": bound}
            points.append(run(timed if rate else target, scenario, expected=3 * alone, **own, **least))  # type: ignore[arg-type]
        progress("load", 1, 1)
    manifest = None if url else open_bundle(Path(where)).manifest
    names = ShortNames({}) if manifest is None else ShortNames.of(manifest)
    if picture is not None:
        _draw([point for point in points if point.rate], bound, names, picture)
    facts = Table.facts([("target", where), ("requests of", str(at)), ("deadline", f"{bound:.3g} ms")])
    data = {"target": where, "at": str(at), "deadline_ms": bound, "points": points}
    show(as_json, data, lambda: [facts, _points_table(points, names)])
    for point in points:
        for reason in (*point.reasons, *(f"{count} failed: {said}" for said, count in point.failed.items())):
            say(f"{point.scenario}{f' at {point.rate:.0f}/s' if point.rate else ''}: {reason}", err=True)
    if any(point.verdict != "VALID" or point.failed for point in points):
        raise SystemExit(1)


def _points_table(points: Sequence[LoadPoint], names: Callable[[str], str]) -> Table:
    def shares(point: LoadPoint) -> str:
        return ", ".join(f"{names(one)} {count / point.answered:.0%}" for one, count in point.submodels.items())

    return Table.of(
        points,
        {
            "scenario": lambda point: point.scenario,
            "offered/s": lambda point: f"{point.rate:.1f}" if point.rate else "-",
            "answered/s": lambda point: f"{point.per_second:.1f}",
            "p50 ms": lambda point: f"{point.p50_ms:.2f}",
            "p99 ms": lambda point: f"{point.p99_ms:.2f}",
            "refused": lambda point: f"{point.refused / point.requests:.1%}",
            "late": lambda point: f"{point.late / max(1, point.answered):.1%}" if point.rate else "-",
            "LoadGen": lambda point: point.verdict,
            "answered by": lambda point: shares(point) or "-",
        },
    )


def _draw(points: Sequence[LoadPoint], bound_ms: float, names: Callable[[str], str], path: Path) -> None:
    """Latency over offered load, and below it who answered what share of the requests."""
    from matplotlib.figure import Figure

    points = sorted(points, key=lambda point: point.rate or 0.0)
    loads = [f"{point.rate:.0f}" for point in points]
    picture = Figure(figsize=(7.2, 5.4), layout="constrained")
    above, below = picture.subplots(2, sharex=True)
    above.plot(loads, [point.p99_ms for point in points], "o-", label="99th percentile")
    above.plot(loads, [point.p50_ms for point in points], "o-", label="median")
    above.axhline(bound_ms, color="0.5", linestyle="--", label="deadline")
    above.set(ylabel="latency, ms", ylim=(0, None))
    total = [0.0] * len(points)
    for one in dict.fromkeys([*(one for point in points for one in point.submodels), "refused"]):
        counts = [point.refused if one == "refused" else point.submodels.get(one, 0) for point in points]
        shares = [count / point.requests for count, point in zip(counts, points, strict=True)]
        below.bar(loads, shares, bottom=total, label=names(one), color="0.8" if one == "refused" else None)
        total = [base + share for base, share in zip(total, shares, strict=True)]
    below.set(ylabel="share of requests", xlabel="offered requests a second")
    for axes in (above, below):
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    picture.savefig(path)
