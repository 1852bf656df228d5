"""``nestforge loadtest``: LoadGen and tritonclient against a real server of a small bundle."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest
from nestforge.bucket import Bucket
from nestforge.tools.load_test import Target, run
from support.commands import error_of, nestforge, shown, usage_of

SHORT = ("--at", "1x8", "--seconds", "0.2", "--queries", "64")
TOKEN = "known-to-both"  # noqa: S105  (of a server of this test)


@pytest.fixture(scope="module")
def server(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Address of a server of the tiny bundle, and the file with the token that it wants."""
    token = tmp_path_factory.mktemp("token") / "token.txt"
    token.write_text(TOKEN)
    command = [sys.executable, "-m", "nestforge", "serve", tiny_bundle, "--port", "0", "--token-file", token]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        yield process.stderr.readline().rpartition("http://")[2].strip(), token
        process.kill()


def test_a_bundle_is_served_and_every_scenario_counts_every_request(tiny_bundle: Path, tmp_path: Path) -> None:
    each = ("--scenario", "Offline", "--scenario", "MultiStream", "--scenario", "Server")
    asked = ("--rate", 400, "--rate", 200, "--deadline-ms", 30_000, "--picture", tmp_path / "load.svg", "--json")
    result = nestforge("loadtest", tiny_bundle, *SHORT, *each, *asked)
    found = json.loads(result.stdout)
    points = found["points"]
    assert [(one["scenario"], one["rate"]) for one in points] == [
        ("SingleStream", None),
        ("Offline", None),
        ("MultiStream", None),
        ("Server", 400.0),
        ("Server", 200.0),
    ]
    for one in points:
        assert one["requests"] == one["answered"] >= 64
        assert one["submodels"] == {"ffn32": one["answered"]}
        assert (one["late"], one["refused"], one["failed"]) == (0, 0, {})
        assert 0 < one["p50_ms"] <= one["p99_ms"]
        assert one["verdict"] == ("INVALID" if one["reasons"] else "VALID")
    assert points[2]["requests"] == 8 * (points[2]["requests"] // 8), "a query of MultiStream is of eight"
    assert result.exit_code == any(one["verdict"] == "INVALID" for one in points)
    picture = (tmp_path / "load.svg").read_text()
    assert "<svg" in picture


def test_what_the_server_refuses_is_counted_and_no_failure(server: tuple[str, Path]) -> None:
    address, token = server
    options = (*SHORT, "--model", "tiny", "--token-file", token, "--rate", 200, "--deadline-ms", 1e-6)
    result = nestforge("loadtest", f"http://{address}", *options)
    *_, head, alone, load = result.stdout.splitlines()
    assert re.split(r"  +", head.strip()) == (
        ["scenario", "offered/s", "answered/s", "p50 ms", "p99 ms", "refused", "late", "LoadGen", "answered by"]
    )
    assert alone.split()[0] == "SingleStream"
    assert alone.endswith("ffn32 100%")
    assert load.split()[5] == "100.0%"
    assert "failed" not in result.stderr


def test_every_request_names_the_submodel(server: tuple[str, Path]) -> None:
    address, _ = server
    target = Target.of(address, "tiny", Bucket(2, 8), {"authorization": f"Bearer {TOKEN}"}).stating(submodel="S")
    assert {one.name(): one.shape() for one in target.asks["inputs"]} == {
        "input_ids": [2, 8],
        "attention_mask": [2, 8],
    }
    assert [one.name() for one in target.asks["outputs"]] == ["total"], "hidden states would be sent for nothing"
    point = run(target, "Server", seconds=0.1, queries=64, rate=300.0, bound_ms=1e-3)
    assert point.submodels == {"ffn16": point.answered}
    assert (point.answered, point.late, point.verdict) == (64, 64, "INVALID")
    assert "Performance constraints satisfied : NO" in point.reasons


def test_an_error_of_the_server_is_one_line(server: tuple[str, Path], tiny_bundle: Path) -> None:
    address, token = server
    url = f"http://{address}"
    assert error_of("loadtest", url, "--model", "tiny").startswith(f"{address}: expected the token as ")
    with_token = ("--token-file", token)
    assert error_of("loadtest", url, "--model", "no", *with_token) == f"{address}: no model 'no'; there is tiny"
    too_long = error_of("loadtest", url, "--model", "tiny", *with_token, "--at", "1x999", "--seconds", 0.1)
    assert too_long.startswith(f"{url}: input of 1 rows x 999 is larger than every bucket")
    assert "no/such" in error_of("loadtest", "no/such.bundle")


def test_nobody_or_somebody_else_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = "{}:{}".format(*other.getsockname())

        def greet() -> None:
            with other.accept()[0] as connection:
                connection.sendall(b"220 no HTTP\r\n")
                connection.recv(1000)

        Thread(target=greet, daemon=True).start()
        assert error_of("loadtest", f"http://{address}/", "--model", "a").startswith(f"{address}: does not answer (")
    assert error_of("loadtest", f"http://{address}", "--model", "a").endswith("; does a server run there?")


def test_without_the_extra_one_line_names_it(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "nestforge.tools.load_test")
    monkeypatch.setitem(sys.modules, "mlperf_loadgen", None)
    expected = "mlperf_loadgen is not installed: pip install 'nestforge[loadtest]'"
    assert error_of("loadtest", tiny_bundle) == expected
    assert "Load a server" in shown("loadtest", "--help")


def test_ctrl_c_ends_it_and_its_server(tiny_bundle: Path) -> None:
    command = [sys.executable, "-m", "nestforge", "loadtest", tiny_bundle, "--at", "1x8", "--seconds", "60"]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which a job in the background ignores
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": heard}
    with subprocess.Popen([*map(str, command)], text=True, **pipes) as process:
        own = psutil.Process(process.pid)
        while not (children := own.children()) or not children[0].net_connections():
            time.sleep(0.05)
        while not any(one.status == "ESTABLISHED" for one in children[0].net_connections()):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "nestforge: interrupted\n")
        assert process.returncode == 130
        assert not children[0].is_running()


def test_usage(tmp_path: Path) -> None:
    assert "Invalid value for '--rate': inf is not a finite number" in usage_of("loadtest", tmp_path, "--rate", "inf")
    assert "a URL needs --model" in usage_of("loadtest", "http://127.0.0.1:1")
    assert "ends in .svg, .png, .pdf" in usage_of("loadtest", tmp_path, "--picture", "load.gif")
