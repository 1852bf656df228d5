from __future__ import annotations

import pytest
from nestforge.runtime.engines.onnxruntime.available import onnxruntime_problem


def test_this_host_has_onnx_runtime_and_another_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert onnxruntime_problem() is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert onnxruntime_problem() == "onnxruntime is not installed; install nestforge[cpu]"
