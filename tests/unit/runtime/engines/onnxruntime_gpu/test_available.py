from __future__ import annotations

import sys

import pytest
from nestforge.runtime.engines.onnxruntime_gpu.provider import provider_problem


def test_a_build_without_the_provider() -> None:
    problem = str(provider_problem(("CUDAExecutionProvider",)))
    assert problem.startswith("onnxruntime ")
    assert problem.endswith(" and no CUDAExecutionProvider; install nestforge[cuda] in place of nestforge[cpu]")


def test_a_host_without_cudas_runtime_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    assert provider_problem(("CPUExecutionProvider",)) == "cuda.bindings is not installed; install nestforge[cuda]"


def test_a_host_without_onnx_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert provider_problem(("CPUExecutionProvider",)) == "onnxruntime is not installed; install nestforge[cuda]"
