"""``nestforge serve``: bundles behind KServe v2, OpenAI's routes and those of text-embeddings-inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ...runtime.load import load
from ..options import FiniteRange, field_options, path_option

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
