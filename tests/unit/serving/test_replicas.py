"""Replicas on a Ray Serve of their own: the routes of ``nestforge serve``, one copy of weights, what Ray hears."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from http.client import HTTPException
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.http as triton
import yaml
from nestforge.errors import BundleError, InputError, NestforgeError
from support.servers import Running, port_for_later
from support.small_bundle import reference

pytest.importorskip("ray")
from nestforge.serving.replicas import Replica, app, wanted_replicas
from nestforge.serving.server import ServeRequest, _mapped, opened

ROOT, GOLDEN = Path(__file__).parents[3], Path(__file__).parents[2] / "golden"
SERVE = "from ray.serve.scripts import cli; cli()"


@pytest.fixture(scope="module")
def replicas(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two, behind Ray's proxy, started as users of Ray Serve start them."""
    folder = tmp_path_factory.mktemp("replicas")
    (folder / "token").write_text("known-to-both\n")
    port = port_for_later()
    own = {"bundles": str(tiny_bundle), "min_replicas": 2, "max_replicas": 2, "token_file": str(folder / "token")}
    stated = {"name": "nestforge", "import_path": "nestforge.serving.replicas:app", "args": own}
    config = {"http_options": {"port": port}, "applications": [stated]}
    (folder / "serve.yaml").write_text(yaml.safe_dump(config))
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, "run", "serve.yaml"],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            text=True,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # which a job in the background ignores
        )
    running = Running(process, f"127.0.0.1:{port}")
    try:
        for _ in range(600):  # two minutes
            assert process.poll() is None, (folder / "log").read_text()
            if is_ready(running):
                break
            time.sleep(0.2)
        else:
            pytest.fail((folder / "log").read_text()[-8000:])
        yield running
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def is_ready(running: Running) -> bool:
    try:
        return running.ask("GET", "/v2/health/ready")[0] == 200
    except (OSError, HTTPException):
        return False


def processes(running: Running) -> list[psutil.Process]:
    family = psutil.Process(running.process.pid).children(recursive=True)
    return [one for one in family if "ServeReplica" in "".join(one.cmdline()[:1])]


def test_the_routes_of_a_server(replicas: Running) -> None:
    token = {"Authorization": "Bearer known-to-both"}
    assert replicas.ask("GET", "/v2/health/ready")[0] == 200
    assert replicas.ask("GET", "/v2")[0] == 401
    status, headers, found = replicas.ask("POST", "/v1/embeddings", {"model": "tiny", "input": ["a nest"]}, **token)
    assert (status, headers["nestforge-submodel"], len(found["data"])) == (200, "ffn32", 1)
    ids, mask = np.array([[1, 2, 3]]), np.ones((1, 3), np.int64)
    tensors = [triton.InferInput(name, [1, 3], "INT64") for name in ("input_ids", "attention_mask")]
    for tensor, array in zip(tensors, (ids, mask), strict=True):
        tensor.set_data_from_numpy(array)
    client = triton.InferenceServerClient(replicas.address)
    for asked, width in (({"submodel": "S"}, 16), ({"deadline_ms": 10_000.0}, 32)):
        result = client.infer("tiny", tensors, parameters=asked, headers=token)
        np.testing.assert_allclose(result.as_numpy("total"), reference(width, ids, mask)["total"], atol=1e-4, rtol=1e-5)
    client.close()
    hopeless = {**token, "nestforge_deadline_ms": "0.0001"}
    status, headers, found = replicas.ask("POST", "/v1/embeddings", {"model": "tiny", "input": ["a"]}, **hopeless)
    assert status == 429, found
    assert float(headers["nestforge-needs-ms"]) > 0
    assert replicas.ask("POST", "/v1/embeddings", {"model": "other", "input": ["a"]}, **token)[0] == 404


def test_replicas_of_a_host_map_the_same_weights(replicas: Running) -> None:
    def mapped() -> list[set[str]]:
        maps = [Path(f"/proc/{one.pid}/maps").read_text() for one in processes(replicas)]
        return [set(re.findall(r"/\S*/nestforge/mapped/\S+$", text, re.MULTILINE)) for text in maps]

    until = time.monotonic() + 60
    while len(found := mapped()) < 2 or len(found[0]) != len(found[1]):  # the proxy answers once one of them is ready
        assert time.monotonic() < until, found
        time.sleep(0.2)
    assert found[0] == found[1] != set()


def test_text_is_generated_from_mapped_weights_too(tiny_bundle: Path) -> None:
    assert _mapped(tiny_bundle) == "mapped"
    assert _mapped(GOLDEN / "bundle-fewer-heads") == "shared"
    with opened(ServeRequest([GOLDEN / "bundle-fewer-heads"], maps=True, workers=1, threads=1)) as (service, _):
        assert service.served["bundle-fewer-heads"].model.generate("a", max_tokens=2)


def test_what_ray_hears_of_load_and_health(tiny_bundle: Path) -> None:
    replica = Replica(ServeRequest([tiny_bundle], threads=1, workers=1), None)
    service = replica._service
    stats = replica.record_autoscaling_stats
    assert asyncio.run(stats()) == {"missed": 0.0}
    for _ in range(6):
        service.metrics.latency("tiny").observe(1.0)
    service.metrics.late("tiny").inc()
    service.desk.scheduler.overloads += 2
    assert asyncio.run(stats()) == {"missed": 3 / 8}
    assert asyncio.run(stats()) == {"missed": 0.0}
    asyncio.run(replica.check_health())
    service.served["tiny"].is_broken = True
    with pytest.raises(BundleError, match="model tiny cannot answer"):
        asyncio.run(replica.check_health())
    replica._open.close()


@pytest.mark.parametrize(
    ("ongoing", "missed", "wanted"),
    [
        (0.0, None, 0.0),
        (20.0, {}, 2.5),
        (4.0, {"a": 0.0, "b": 0.02}, 0.5),
        (4.0, {"a": 0.0, "b": 0.03}, 3),
        (40.0, {"a": 1.0}, 5.0),
    ],
)
def test_replicas_follow_requests_in_progress_and_missed_deadlines(ongoing: float, missed: Any, wanted: float) -> None:
    config = SimpleNamespace(target_ongoing_requests=8.0)
    metrics = None if missed is None else {"missed": missed}
    context = SimpleNamespace(
        total_num_requests=ongoing, aggregated_metrics=metrics, current_num_replicas=2, config=config
    )
    assert wanted_replicas(context) == (wanted, {})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bundles": "nowhere"}, r"/nowhere: not a folder; expected one that `nestforge compile` wrote$"),
        ({"bundles": "a,a"}, "bundle 'a': a model's name is its folder's"),
        ({"bundles": []}, r"^bundles: .+, got \[\]$"),
        ({"max_replicas": "many"}, r"^max_replicas: .+, got 'many'$"),
        ({"threads": 0}, "^threads: .+, got 0$"),
        ({"replicas": 2}, "^replicas: .+, got 2$"),
    ],
)
def test_arguments_that_are_refused(tiny_bundle: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(NestforgeError, match=says) as refusal:
        app({"bundles": str(tiny_bundle), **changes})
    assert "\n" not in str(refusal.value)
    with pytest.raises(InputError, match=r"^bundles: .+"):
        app({})
