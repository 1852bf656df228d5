"""What a farm settles before Ray: who goes before whom, what is done already, and addresses without a cluster."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest
from nestforge.compiler.compile import compile_job, prepare
from nestforge.compiler.engines.templates import Templates
from nestforge.compiler.farm import _before, _is_done, _needs, _require, run_farm
from nestforge.compiler.job import resolve
from nestforge.compiler.work.clock import Clock
from nestforge.errors import InputError, OutputError
from nestforge.profiles.compile_request import CompileRequest
from nestforge.progress import silent
from nestforge.whole_file import alone
from support.tiny_compile import board, save_tiniest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiniest(tmp_path_factory.mktemp("farm") / "tiny")


def request(model: Path, output: Path, **changes: object) -> CompileRequest:
    return CompileRequest(model, profile=board(budgets={"full": {}}, **changes), output=output, levels={"ffn": (1.0,)})


def test_of_jobs_that_trace_one_graph_the_first_goes_before_the_others(model: Path, tmp_path: Path) -> None:
    wanted = {
        "a": request(model, tmp_path, buckets=["1x8"]),
        "b": request(model, tmp_path, buckets=["1x8", "2x8"]),
        "c": request(model, tmp_path, buckets=["2x8"], memory_mb=90),
        "d": request(model, tmp_path, buckets=["1x8"], opset=21),
        "e": request(model, tmp_path, buckets=["1x8", "2x8"]),
    }
    jobs = {name: resolve(one) for name, one in wanted.items()}
    assert _before(wanted, jobs) == {"a": set(), "b": {"a"}, "c": {"b"}, "d": set(), "e": {"a", "b"}}
    rooms = {"CPU": 4.0, "memory": 1e9}
    assert _needs(jobs["a"], rooms) == {"num_cpus": 1.0, "memory": min(1e9, jobs["a"].cost.memory_mb * 1e6)}
    timed = replace(jobs["a"], profile=replace(jobs["a"].profile, host="this one"))
    assert _needs(timed, rooms)["num_cpus"] == 4.0


def test_jobs_of_one_model_trace_it_once_and_share_the_file_of_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced, trace = [], Templates._trace
    monkeypatch.setattr(
        Templates, "_trace", lambda self, key, path: (traced.append(str(key.bucket)), trace(self, key, path))
    )
    clock = Clock(silent)
    jobs = [
        prepare(request(model, tmp_path / name, buckets=buckets, **own), clock)
        for name, buckets, own in (
            ("a", ["1x8"], {}),
            ("b", ["1x8", "2x8"], {"memory_mb": 90}),
            ("c", ["1x8"], {"opset": 21}),
        )
    ]
    for job in jobs:
        compile_job(job, clock, pools=tmp_path / "pools")
    assert traced == ["1x8", "2x8", "1x8"]
    a, b = ((tmp_path / name / "weights.safetensors").stat() for name in "ab")
    assert a.st_ino == b.st_ino
    alone_ = replace(jobs[1], output=tmp_path / "alone")
    compile_job(alone_, clock)
    for file in sorted((tmp_path / "alone").iterdir()):
        if file.name not in ("build.json", "report.md"):
            assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
    assert _is_done(jobs[0])
    assert not _is_done(replace(jobs[0], output=tmp_path / "b"))
    assert not _is_done(replace(jobs[0], output=tmp_path / "nowhere"))


def test_addresses_without_a_cluster() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        _require(f"{host}:{port}")
    for address in (f"{host}:{port}", "nonsense", "127.0.0.1:port", "127.0.0.1:99999", "ray://127.0.0.1:x"):
        with pytest.raises(InputError, match=rf"^address '{address}': no Ray cluster is there \(.+HOST:PORT"):
            _require(address)


def test_another_farm_in_the_folder(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / ".farm").mkdir()
    with alone(tmp_path / ".farm"), pytest.raises(OutputError, match=r"another farm is at work there: process \d+ \("):
        next(run_farm({"a": request(model, tmp_path / "a.bundle")}, None, silent))
