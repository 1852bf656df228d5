"""The server under load: MLCommons LoadGen and tritonclient on the same cores ask it (`nestforge loadtest`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from subprocess import PIPE, Popen

import psutil
import tritonclient.http as triton

from .. import load, nest
from ..bucket import Bucket
from ..bundle.open_bundle import open_bundle
from ..compiler.compile import compile_bundle
from ..examples.encoder.corpus import demo_checkpoint, write_corpus
from ..profiles.precision import Precision
from ..runtime.inputs.arrays import random_feeds
from ..runtime.model import ElasticModel
from ..serving.kserve import LENGTH
from ..tools.load_test import AT_ONCE, LoadPoint, Target, run, served
from .harness import CACHE, Row, benchmark, milliseconds
from .subjects import tiny_bundle

_AT, _QUERY, _SENTENCE = Bucket(1, 32), Bucket(1, 8), Bucket(1, 16)
_ROUNDS, _PAIRS = 5, 300
# LoadGen wants a margin of the 99 % that shrinks with the number of requests, some 12,000 here.
_LOAD, _PATIENCE, _SECONDS = 3.0, 4.0, 24.0
_FIRST, _ALL = 10_000, 40_000
_LEVELS = dict.fromkeys(("ffn", "heads"), (0.25, 0.5, 0.75, 1.0))
_PRECISIONS: tuple[Precision, ...] = ("fp32", "int8-dynamic")
_NESTED = Path("demo/serving/nested")
# Runs the model for whatever it reads, and answers with the bytes that it read at first.
_BARE = """
import socket, sys
from nestforge import load
from nestforge.bucket import Bucket
from nestforge.runtime.inputs.arrays import random_feeds
bundle, batch, sequence = sys.argv[1:]
answer = sys.stdin.buffer.read()
with load(bundle, preload=True) as model, socket.create_server(("127.0.0.1", 0)) as server:
    feeds = random_feeds(model.inputs, Bucket(int(batch), int(sequence)))
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    while connection.recv(1 << 20):
        model(feeds)
        connection.sendall(answer)
"""


def nested_bundle() -> Path:
    """MiniLM taught to be nested (some 8 minutes, once), in two precisions, for up to 16 short texts at once."""
    bundle, corpus = CACHE / "serving.bundle", CACHE / "serving.txt"
    if not bundle.exists():
        write_corpus(corpus)
        if not _NESTED.exists():
            nest(demo_checkpoint(), corpus, _NESTED, levels=_LEVELS)
        compile_bundle(
            _NESTED, "host-cpu", bundle, precisions=_PRECISIONS, text=corpus, buckets=(Bucket(16, 128, 1, 1),)
        )
    return bundle


@benchmark
def bench_serving() -> list[Row]:
    """What HTTP costs, what shared runs gain, and who is in time under three times the load."""
    bundle = nested_bundle()
    with served(bundle) as (address, name, _):
        with load(bundle, preload=True) as model:
            cost = _cost(model, bundle, Target.of(address, name, _AT))
        query, sentence, full = (Target.of(address, name, one) for one in (_QUERY, _SENTENCE, _AT))
        gains = [_gain(query, _QUERY, ">= 2x"), _gain(sentence, _SENTENCE, "stated")]
        return [*cost, *gains, *_overload(full, bundle)]


def _cost(model: ElasticModel, bundle: Path, target: Target) -> list[Row]:
    feeds = random_feeds(model.inputs, _AT)
    with ExitStack() as stack:
        client = stack.enter_context(triton.InferenceServerClient(target.address))
        bare = stack.enter_context(_bare(bundle, target))
        here = partial(model, feeds)
        there, barely = (partial(one.infer, **target.asks) for one in (client, bare))
        for call in (here, there, barely) * 20:
            call()
        turns = [[milliseconds(call) for call in (here, there, barely)] for _ in range(_PAIRS)]
    alone, served_ms, _ = (min(times) for times in zip(*turns, strict=True))
    whole, own = (median(turn[1] - turn[other] for turn in turns) for other in (0, 2))
    how = f"MiniLM {_AT}, binary tensors, tritonclient; medians of {_PAIRS} turns, one call of each"
    return [
        Row(
            "HTTP and its client over calling the model in process, p50",
            f"{whole:.2f} ms (best {served_ms:.2f} against {alone:.2f} ms)",
            "stated",
            True,
            how,
        ),
        Row(
            "of it the server's",
            f"{own:.2f} ms",
            "<= 1 ms",
            own <= 1.0,
            "over a bare socket that runs the model and answers with bytes that it has, so without the client",
        ),
    ]


@contextmanager
def _bare(bundle: Path, target: Target) -> Iterator[triton.InferenceServerClient]:
    """A client of a process that runs the model, and answers with what the server answered once."""
    model, inputs, outputs = (target.asks[name] for name in ("model_name", "inputs", "outputs"))
    body, size = triton.InferenceServerClient.generate_request_body(inputs, outputs=outputs)
    connection = HTTPConnection(target.address)
    connection.request("POST", f"/v2/models/{model}/infer", body, {LENGTH: str(size)})
    response = connection.getresponse()
    lines = ["HTTP/1.1 200 OK", *(f"{name}: {value}" for name, value in response.getheaders()), "", ""]
    answer = "\r\n".join(lines).encode() + response.read()
    connection.close()
    command = [sys.executable, "-c", _BARE, str(bundle), str(_AT.batch), str(_AT.sequence)]
    with Popen(command, stdin=PIPE, stdout=PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(answer)
        process.stdin.close()
        try:
            with triton.InferenceServerClient(f"127.0.0.1:{int(process.stdout.readline())}") as client:
                yield client
        finally:
            process.kill()


def _gain(target: Target, shape: Bucket, bar: str) -> Row:
    found = []
    for _ in range(_ROUNDS):
        alone = run(target, "SingleStream", seconds=1.0, queries=64).per_second
        found.append(run(target, "Offline", seconds=1.0, queries=300, expected=alone).per_second / alone)
    return Row(
        f"requests a second at {shape}, {AT_ONCE} at once over one at a time",
        f"{median(found):.2f}x ({min(found):.2f} to {max(found):.2f})",
        bar,
        bar == "stated" or median(found) >= 2.0,
        f"MiniLM {shape}, the largest submodel, up to 16 in a run; LoadGen, {_ROUNDS} rounds",
    )


def _overload(target: Target, bundle: Path) -> list[Row]:
    nested: list[LoadPoint] = []
    plain: list[LoadPoint] = []
    for _ in range(_ROUNDS):
        alone = run(target, "SingleStream", seconds=2.0, queries=64)
        asks = {"rate": _LOAD * alone.per_second, "bound_ms": _PATIENCE * alone.p50_ms}
        for points, asked in ((nested, target.stating(deadline_ms=asks["bound_ms"])), (plain, target)):
            points.append(run(asked, "Server", seconds=_SECONDS, queries=64, **asks))
    submodels = open_bundle(bundle).manifest.submodels
    quality = {one.id: one.quality.figures["mean_cosine"] for one in submodels if one.quality}
    answers = [(one, count) for point in nested for one, count in point.submodels.items()]
    kept = sum(quality[one] * count for one, count in answers) / max(1, sum(count for _, count in answers))
    beside = f"plain: {_median(plain, _in_time):.1%} of {_median(plain, _admitted):.1%}"
    verdicts = ", ".join(point.verdict for point in nested)
    how = (
        f"Server at 3x of one at a time, deadline 4x its p50, {_AT}; LoadGen, medians of "
        f"{_ROUNDS} rounds ({verdicts}); plain: the largest submodel alone"
    )
    in_time, admitted = _median(nested, _in_time), _median(nested, _admitted)
    return [
        Row("nested at 3x: admitted that are in time", f"{in_time:.1%} ({beside})", ">= 99 %", in_time >= 0.99, how),
        Row("nested at 3x: admitted of all", f"{admitted:.1%}", ">= 90 %", admitted >= 0.9, how),
        Row("nested at 3x: mean cosine of answers", f"{kept:.4f}", "stated", True, "the bundle's own, by who answered"),
    ]


def _in_time(point: LoadPoint) -> float:
    return 1 - point.late / max(1, point.answered)


def _admitted(point: LoadPoint) -> float:
    return point.answered / point.requests


def _median(points: list[LoadPoint], of: object) -> float:
    return median(map(of, points))  # type: ignore[call-overload]


@benchmark
def bench_serving_memory() -> list[Row]:
    """Memory of a server after its first requests, and after many more."""
    with served(tiny_bundle()) as (address, name, process):
        target, server = Target.of(address, name, _AT), psutil.Process(process)
        seen = []
        for queries in (_FIRST, _ALL - _FIRST):
            point = run(target, "Offline", seconds=0.1, queries=queries, expected=1.0)
            assert point.answered == queries
            seen.append(server.memory_info().rss / 1e6)
    growth = seen[1] - seen[0]
    return [
        Row(
            f"memory of the server after {_ALL:,} requests over after {_FIRST:,}",
            f"{growth:+.1f} MB of {seen[0]:.0f}",
            "<= 1 MB",
            growth <= 1.0,
            f"resident, 2 layers of 64 at {_AT}, {AT_ONCE} at once; LoadGen",
        )
    ]
