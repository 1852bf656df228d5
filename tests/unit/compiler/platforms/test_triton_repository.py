"""Model repositories: what lies where, and a real Triton server that answers from one as the model in this process."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import nestforge
import numpy as np
import pytest
from nestforge.compiler.platforms.triton_repository import export_triton
from nestforge.errors import InputError, OutputError
from nestforge.runtime.inputs.arrays import random_feeds
from nestforge.runtime.load import verify_bytes
from support.servers import port_for_later

_NUMPY_2 = np.lib.NumpyVersion(np.__version__) >= "2.0.0"


def test_the_bundle_lies_there_once(tiny_bundle: Path, tmp_path: Path) -> None:
    found = export_triton(tiny_bundle, tmp_path / "models")
    assert (found.repository, found.model) == (str(tmp_path / "models"), "tiny")
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    own = [f"models/tiny/1/bundle/{path.name}" for path in tiny_bundle.iterdir()]
    assert files == sorted([*own, "models/tiny/1/model.py", "models/tiny/config.pbtxt"])
    bundle = tmp_path / "models" / "tiny" / "1" / "bundle"
    assert (bundle / "weights.safetensors").samefile(tiny_bundle / "weights.safetensors")
    assert verify_bytes(bundle).files == verify_bytes(tiny_bundle).files
    assert (tmp_path / "models" / "tiny" / "config.pbtxt").read_text().splitlines()[3:9] == [
        'input { name: "input_ids" data_type: TYPE_INT64 dims: [ -1, -1 ] optional: true }',
        'input { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1, -1 ] optional: true }',
        'input { name: "text" data_type: TYPE_STRING dims: [ -1 ] optional: true }',
        'output { name: "hidden" data_type: TYPE_FP32 dims: [ -1, -1, 16 ] }',
        'output { name: "total" data_type: TYPE_FP32 dims: [ -1, 16 ] }',
        'output { name: "nestforge_submodel" data_type: TYPE_STRING dims: [ 1 ] }',
    ]


def test_each_refusal_leaves_nothing(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(OutputError, match="there: exists already"):
        export_triton(tiny_bundle, tmp_path / "there")
    named = Path(shutil.copytree(tiny_bundle, tmp_path / "a name.bundle"))
    with pytest.raises(InputError, match="bundle 'a name': a model's name is its folder's"):
        export_triton(named, tmp_path / "out")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nestforge.compiler.platforms.triton_repository.link", full)
    with pytest.raises(OutputError, match=r"out: cannot be written \(No space left on device\); nothing was exported"):
        export_triton(tiny_bundle, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a name.bundle", "there"]


@pytest.fixture(scope="module")
def ask(
    tiny_bundle: Path, exits_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Any]]:
    """``ask(model, arrays, parameters, outputs)``: the answer of a Triton server with both bundles, over HTTP."""
    spec = find_spec("pytriton")
    if spec is None or spec.origin is None:
        pytest.skip("needs a Triton server: the wheel nvidia-pytriton is not installed")
    http = pytest.importorskip("tritonclient.http")
    root = tmp_path_factory.mktemp("triton")
    package = Path(spec.origin).parent
    server, libraries = package / "tritonserver", package.parent / "nvidia_pytriton.libs"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    backend = Path(shutil.copytree(server / "backends" / "python", root / "backends" / "python"))
    shutil.copy(server / "python_backend_stubs" / version / "triton_python_backend_stub", backend)
    for bundle in (tiny_bundle, exits_bundle):
        export_triton(bundle, root / bundle.name)
        shutil.copytree(root / bundle.name, root / "models", dirs_exist_ok=True)
        if _NUMPY_2:  # what nvidia-pytriton carries was built for numpy 1
            config = root / "models" / bundle.name.removesuffix(".bundle") / "config.pbtxt"
            lines = config.read_text().splitlines()
            config.write_text("\n".join(line for line in lines if "TYPE_STRING" not in line))
    shutil.copytree(root / tiny_bundle.name / "tiny", root / "models" / "as_written")
    config = root / "models" / "as_written" / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "tiny"', 'name: "as_written"'))
    port = port_for_later()
    python = {
        "LD_LIBRARY_PATH": f"{libraries}:{Path(sys.base_prefix) / 'lib'}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    command: list[object] = [server / "bin" / "tritonserver", "--model-repository", root / "models"]
    command += ["--backend-directory", root / "backends", "--http-address", "127.0.0.1", "--http-port", port]
    command += [
        "--allow-grpc",
        "false",
        "--allow-metrics",
        "false",
        "--exit-on-error",
        "false",
        "--exit-timeout-secs",
        "5",
    ]
    with (root / "log").open("wb") as log:
        process = subprocess.Popen([str(one) for one in command], env={**os.environ, **python}, stdout=log, stderr=log)
    try:
        for model in ("tiny", exits_bundle.name.removesuffix(".bundle")):
            _wait(process, f"http://127.0.0.1:{port}/v2/models/{model}/ready", root / "log")
        with http.InferenceServerClient(f"127.0.0.1:{port}") as client:

            def asked(model: str, arrays: dict[str, Any], outputs: list[str] | None = None, **parameters: Any) -> Any:
                inputs = []
                for name, array in arrays.items():
                    kind = {"int64": "INT64", "float32": "FP32", "object": "BYTES"}[array.dtype.name]
                    inputs.append(http.InferInput(name, array.shape, kind))
                    inputs[-1].set_data_from_numpy(array)
                wanted = outputs and [http.InferRequestedOutput(name) for name in outputs]
                return client.infer(model, inputs, parameters=parameters, outputs=wanted)

            asked.log = root / "log"
            yield asked
    finally:
        process.terminate()
        process.wait(30)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    for _ in range(240):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            with urlopen(url):  # noqa: S310 - of this host
                return
        except OSError:
            time.sleep(0.25)
    raise AssertionError(log.read_text()[-4000:])


def test_a_triton_server_answers_as_the_model_in_this_process(
    ask: Callable[..., Any], tiny_bundle: Path, feeds: Callable[..., Any]
) -> None:
    arrays = feeds(2, 5)
    with nestforge.load(tiny_bundle) as model:
        for parameters in ({}, {"submodel": "S"}, {"submodel": "XL"}, {"budget": "edge"}):
            answer, found = model(arrays, **parameters), ask("tiny", arrays, ["hidden", "total"], **parameters)
            for name in ("hidden", "total"):
                np.testing.assert_array_equal(found.as_numpy(name), answer[name])
        small, large = (ask("tiny", arrays, ["total"], **one).as_numpy("total") for one in ({"submodel": "S"}, {}))
        assert not np.array_equal(small, large)


def test_what_a_request_has_wrong_is_its_error(ask: Callable[..., Any], feeds: Callable[..., Any]) -> None:
    from tritonclient.utils import InferenceServerException

    for parameters, says in (
        ({"submodel": "Q"}, "no submodel 'Q' in this bundle; it has"),
        ({"latency": 1}, "no parameter 'latency'; did you mean"),
        ({"latency_ms": 1e-6}, "no submodel answers 1x4 with `latency_ms` <= 1e-06"),
        ({"submodel": "S", "budget": "edge"}, "expected"),
    ):
        with pytest.raises(InferenceServerException, match=says):
            ask("tiny", feeds(1, 4), ["total"], **parameters)
    assert ask("tiny", feeds(1, 4), ["total"]).as_numpy("total").shape == (1, 16), "the server goes on"


def test_texts_and_names(ask: Any, tiny_bundle: Path) -> None:
    if _NUMPY_2:
        line = f"model as_written: this release of Triton passes no texts to numpy {np.__version__}; run it with numpy "
        assert f"{line}below 2, or take text, nestforge_submodel, nestforge_reason out of" in ask.log.read_text()
        return
    found = ask("as_written", {"text": np.array([b"a nest", b"of models"], object)}, submodel="S")
    assert found.as_numpy("nestforge_submodel").tolist() == [b"ffn16"]
    with nestforge.load(tiny_bundle) as model:
        np.testing.assert_array_equal(found.as_numpy("total"), model(["a nest", "of models"], submodel="S")["total"])


def test_rows_leave_at_exits(ask: Callable[..., Any], exits_bundle: Path) -> None:
    with nestforge.load(exits_bundle) as model:
        bucket = model.bundle.manifest.engines[0].bucket
        arrays = random_feeds(model.inputs, bucket, 3)
        name = exits_bundle.name.removesuffix(".bundle")
        for exits in ("off", "0.5", "100"):
            answer = model(arrays, exits=exits if exits == "off" else float(exits))
            found = ask(name, arrays, [*answer.outputs, "nestforge_exit"], exits=exits)
            for output, array in answer.outputs.items():
                np.testing.assert_array_equal(found.as_numpy(output), array)
            layers = (
                [-1] * len(found.as_numpy("nestforge_exit")) if answer.exits is None else answer.exits.layer.tolist()
            )
            assert found.as_numpy("nestforge_exit").tolist() == layers
