"""MLCommons LoadGen asks a served model through tritonclient: by the rules of its scenarios, with its own verdict."""

from __future__ import annotations

import atexit
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import Any, Literal

import gevent
import gevent.event
import mlperf_loadgen as loadgen
import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from ..bucket import Bucket
from ..errors import InputError
from .interruption import EXIT_CODE

Scenario = Literal["SingleStream", "MultiStream", "Server", "Offline"]
# Requests at once: in Offline, where as many wait as are answered in a run of 16, and in the others, where answers in
# time never need so many.
AT_ONCE, _CONNECTIONS = 32, 128


@dataclass(frozen=True)
class Target:
    """A model of a server at ``address``, HOST:PORT, that speaks KServe v2. ``asks``, the arguments of tritonclient's
    ``infer``, are the same for every request."""

    address: str
    asks: Mapping[str, Any]

    @classmethod
    def of(cls, address: str, model: str, shape: Bucket, headers: Mapping[str, str] | None = None) -> Target:
        """One with arrays of ``shape`` that are 1 throughout, and the outputs of the fewest dimensions. Raises
        InputError where no such server answers, or none that has the model."""
        client = triton.InferenceServerClient(address, connection_timeout=10.0)
        try:
            said = client.get_model_metadata(model, headers=dict(headers or {}))
        except InferenceServerException as failure:
            raise InputError(f"{address}: {failure.message()}") from None
        except Exception as failure:  # noqa: BLE001  (of sockets, of names, and of what is no HTTP)
            raise InputError(f"{address}: does not answer ({failure}); does a server run there?") from None
        finally:
            client.close()
        inputs = []
        for one in said["inputs"]:
            free = iter((shape.batch, shape.sequence))
            sizes = [next(free, 1) if size < 0 else size for size in one["shape"]]
            inputs.append(triton.InferInput(one["name"], sizes, one["datatype"]))
            inputs[-1].set_data_from_numpy(np.ones(sizes, triton_to_np_dtype(one["datatype"])))
        least = min(len(one["shape"]) for one in said["outputs"])
        outputs = [triton.InferRequestedOutput(one["name"]) for one in said["outputs"] if len(one["shape"]) == least]
        return cls(address, {"model_name": model, "inputs": inputs, "outputs": outputs, "headers": dict(headers or {})})

    def stating(self, **parameters: str | float) -> Target:
        """The same with these parameters of the protocol."""
        return replace(self, asks={**self.asks, "parameters": parameters})


@dataclass(frozen=True)
class LoadPoint:
    """One scenario as LoadGen ran it, at ``rate`` a second in Server.

    ``verdict`` and percentiles, in ms of all queries, are LoadGen's; ``reasons`` are its lines where that is INVALID.
    ``per_second`` counts answers, of which ``late`` came after ``bound_ms``, by ``submodels``. ``refused`` are requests
    that the server had no time for, ``failed`` all others without an answer, by error.
    """

    scenario: Scenario
    rate: float | None
    bound_ms: float | None
    verdict: str
    reasons: Sequence[str]
    p50_ms: float
    p99_ms: float
    per_second: float
    requests: int
    answered: int
    late: int
    refused: int
    submodels: Mapping[str, int]
    failed: Mapping[str, int]


class _Client:
    """tritonclient on a thread of its own; LoadGen's threads hand it their queries."""

    def __init__(self, target: Target, connections: int, bound_ms: float | None) -> None:
        self._target, self._connections, self._bound_ms = target, connections, bound_ms or float("inf")
        self.submodels: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.refused, self.late, self.is_given_up = 0, 0, False
        self.began, self.ended = perf_counter(), 0.0
        self._asked: deque[tuple[int, float]] = deque()
        self._is_over, ready = False, Event()
        self._thread = Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()

    def issue(self, samples: Sequence[Any]) -> None:
        if self.is_given_up:  # LoadGen cannot be stopped, so it waits until the process ends
            Event().wait()
        began = perf_counter()
        self._asked.extend((sample.id, began) for sample in samples)
        self._wake.send()

    def close(self) -> None:
        self._is_over = True
        self._wake.send()
        self._thread.join()

    def _run(self, ready: Event) -> None:
        self._over = gevent.event.Event()
        self._client = triton.InferenceServerClient(self._target.address, concurrency=self._connections)
        self._wake = gevent.get_hub().loop.async_()
        self._wake.start(self._begin)
        ready.set()
        self._over.wait()
        self._wake.close()
        self._client.close()

    def _begin(self) -> None:
        while self._asked:
            gevent.spawn(self._ask, *self._asked.popleft())
        if self._is_over:
            self._over.set()

    def _ask(self, number: int, began: float) -> None:
        try:
            answer = self._client.infer(**self._target.asks)
        except InferenceServerException as failure:
            if failure.status() in ("429", "503"):
                self.refused += 1
            else:
                self.failed[failure.message()] += 1
        except Exception as failure:  # noqa: BLE001  (of sockets and of what is no HTTP: LoadGen waits for every query)
            self.failed[f"{type(failure).__name__}: {failure}"] += 1
        else:
            self.submodels[answer.get_response().get("parameters", {}).get("submodel", "?")] += 1
            self.late += 1e3 * (perf_counter() - began) > self._bound_ms
        self.ended = perf_counter()
        loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(number, 0, 0)])


def run(
    target: Target,
    scenario: Scenario,
    *,
    seconds: float,
    queries: int,
    expected: float = 1000.0,
    rate: float | None = None,
    bound_ms: float | None = None,
) -> LoadPoint:
    """Asks for ``seconds`` and ``queries`` at least; in Server at ``rate`` a second, with ``bound_ms`` as LoadGen's
    bound of the 99th percentile; in Offline AT_ONCE at a time, as many as ``expected`` a second would take."""
    settings = loadgen.TestSettings()
    settings.scenario = getattr(loadgen.TestScenario, scenario)
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.min_query_count, settings.min_duration_ms = queries, round(1e3 * seconds)
    settings.single_stream_expected_latency_ns = settings.multi_stream_expected_latency_ns = round(1e9 / expected)
    settings.offline_expected_qps, settings.server_target_qps = expected, rate or expected
    settings.server_target_latency_ns = round(1e6 * (bound_ms or 1e4))
    with tempfile.TemporaryDirectory(prefix="nestforge-loadgen-") as folder:
        logs = loadgen.LogSettings()
        logs.log_output.outdir, logs.enable_trace = folder, False
        client = _Client(target, AT_ONCE if scenario == "Offline" else _CONNECTIONS, bound_ms)
        asks = loadgen.ConstructSUT(client.issue, lambda: None)
        samples = loadgen.ConstructQSL(1, 1, lambda _: None, lambda _: None)
        given = (asks, samples, settings, logs, os.path.join(folder, "audit.config"))
        test = Thread(target=loadgen.StartTestWithLogSettings, args=given, daemon=True)
        test.start()  # on the main thread Ctrl-C would be raised within LoadGen, which does not survive it
        try:
            test.join()
        except KeyboardInterrupt:
            client.is_given_up = True
            atexit.register(os._exit, EXIT_CODE)  # what LoadGen leaves behind does not survive an orderly end either
            raise
        loadgen.DestroyQSL(samples)
        loadgen.DestroySUT(asks)
        client.close()
        said = Path(folder, "mlperf_log_summary.txt").read_text()
    verdict, why = re.findall(r"Result is : (\w+)\n((?:  .*\n)*)", said)[0]
    at_ns = dict(re.findall(r"(\d+)\.00 percentile latency \(ns\) *: (\d+)", said))
    answered, failed = client.submodels.total(), client.failed.total()
    return LoadPoint(
        scenario,
        rate,
        bound_ms,
        verdict,
        [" ".join(line.split()) for line in why.splitlines() if line.endswith("NO")],
        float(at_ns["50"]) / 1e6,
        float(at_ns["99"]) / 1e6,
        answered / max(client.ended - client.began, 1e-9),
        answered + client.refused + failed,
        answered,
        client.late,
        client.refused,
        dict(client.submodels.most_common()),
        dict(client.failed.most_common(5)),
    )


@contextmanager
def served(bundle: Path) -> Iterator[tuple[str, str, int]]:
    """A server of ``bundle`` in a process of its own: HOST:PORT, the model's name, the process's id. Raises InputError
    with the line by which it ended where it does not come up."""
    command = [sys.executable, "-m", "nestforge", "serve", str(bundle), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = "the server did not come up"
            for line in process.stderr:
                if found := re.search(r": serving (\S+) at http://(\S+)$", line):
                    break
            else:
                raise InputError(line.strip().removeprefix("nestforge: error: "))
            Thread(target=sys.stderr.writelines, args=(process.stderr,), daemon=True).start()
            yield found[2], found[1], process.pid
        finally:
            process.terminate()
