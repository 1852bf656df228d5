import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from nestforge.bundle.open_bundle import Bundle
from nestforge.errors import BundleIncompatibleError, InputError
from nestforge.runtime.engines.onnxruntime_gpu import provider as module
from nestforge.runtime.engines.onnxruntime_gpu.provider import (
    PROVIDERS,
    provider_named,
    provider_problem,
    require_providers,
)
from support.fake_cuda import World
from support.fake_gpu import HostDevice, host_provider


def wheel(monkeypatch: pytest.MonkeyPatch, *providers: str) -> None:
    """ONNX Runtime with these providers."""
    fake: Any = ModuleType("onnxruntime")
    fake.__version__, fake.get_available_providers = "1.31.1", lambda: list(providers)
    fake.__spec__ = SimpleNamespace()
    fake.preload_dlls = lambda: print("libcudnn.so.9 is not found")
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)
    module._find_libraries.cache_clear()


GPU = ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")


@pytest.mark.parametrize("name", ["cuda", "tensorrt"])
def test_a_wheel_without_the_provider_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    wheel(monkeypatch, "CPUExecutionProvider")
    missing = {"cuda": "CUDA", "tensorrt": "Tensorrt"}[name]
    with pytest.raises(BundleIncompatibleError) as error:
        provider_named(name)
    assert str(error.value) == (
        f"provider {name}: onnxruntime 1.31.1 here has CPUExecutionProvider and no {missing}ExecutionProvider; "
        "install nestforge[cuda] in place of nestforge[cpu]"
    )


def test_the_processor_needs_nothing_and_other_names_are_refused() -> None:
    assert provider_named("cpu") is None
    with pytest.raises(InputError, match=r"^provider 'rocm': expected one of cpu, cuda, tensorrt$"):
        provider_named("rocm")


class Gpu(HostDevice):
    index = 1
    stream = SimpleNamespace(handle=4711)


def test_engines_run_in_the_devices_stream_without_tf32(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cuda.bindings.runtime")
    wheel(monkeypatch, *GPU)
    cuda = provider_named("cuda")
    assert (cuda.chain, cuda.shares, cuda.captures) == (("CUDAExecutionProvider",), True, True)
    stream = {"device_id": "1", "has_user_compute_stream": "1", "user_compute_stream": "4711"}
    own = {**stream, "use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}
    assert cuda.options(Gpu(), None, ()) == [{**own, "enable_cuda_graph": "0"}]
    assert capsys.readouterr().out == ""


def test_tensorrt_inside_onnx_runtime_keeps_what_it_builds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bundle: Bundle
) -> None:
    pytest.importorskip("cuda.bindings.runtime")
    wheel(monkeypatch, *GPU)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    tensorrt = provider_named("tensorrt")
    assert (tensorrt.chain, tensorrt.shares) == (GPU[:2], False)
    folders = [tensorrt.cache_folder(bundle, engine) for engine in bundle.manifest.engines]
    assert len(set(folders)) == len({engine.file for engine in bundle.manifest.engines})
    (folder, *_) = folders
    assert folder.is_dir()
    assert folder.stat().st_mode & 0o77 == 0
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # what was built with TF32 must not serve without
    assert tensorrt.cache_folder(bundle, bundle.manifest.engines[0]) not in folders
    first, second = tensorrt.options(Gpu(), folder, ())
    assert first["trt_engine_cache_path"] == str(folder)
    assert not tensorrt.captures
    assert (first["trt_cuda_graph_enable"], second["enable_cuda_graph"]) == ("0", "0")
    assert first["user_compute_stream"] == second["user_compute_stream"] == "4711"


@pytest.mark.parametrize(
    ("took", "fits"),
    [
        (["CUDAExecutionProvider", "CPUExecutionProvider"], True),
        (["CUDAExecutionProvider"], True),
        (["CPUExecutionProvider"], False),
        (["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"], False),
    ],
)
def test_a_session_that_took_another_provider_is_refused(took: list[str], fits: bool) -> None:
    session = SimpleNamespace(get_providers=lambda: took)
    cuda = module.Provider("cuda", ("CUDAExecutionProvider",), True, True, HostDevice, lambda *_: [{}])
    if fits:
        require_providers("e", session, cuda)
        return
    with pytest.raises(BundleIncompatibleError, match=r"^e: expected CUDAExecutionProvider, onnxruntime took "):
        require_providers("e", session, cuda)
    host = host_provider()
    with pytest.raises(BundleIncompatibleError, match="expected CPUExecutionProvider, onnxruntime took Tensor"):
        require_providers("e", SimpleNamespace(get_providers=lambda: [*GPU[:1]]), host)


def test_a_host_without_cudas_runtime_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    assert provider_problem(("CPUExecutionProvider",)) == "cuda.bindings is not installed; install nestforge[cuda]"


def test_a_host_without_onnx_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert provider_problem(("CPUExecutionProvider",)) == "onnxruntime is not installed; install nestforge[cuda]"


@pytest.mark.parametrize(
    ("capability", "stated", "expected"), [((8, 7), None, None), ((9, 0), None, ":32768:1"), ((9, 0), ":16:1", ":16:1")]
)
def test_a_session_on_hopper_takes_one_workspace_of_cublas(
    world: World, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], stated: str | None, expected: str | None
) -> None:
    world.capability = capability
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", stated or "")  # so that it is put back
    if stated is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    cuda = PROVIDERS["cuda"]
    cuda.take().release()
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == expected
