"""Exports share one reading of torchlib and change nothing that the next one sees."""

from __future__ import annotations

import pytest
import torch
from nestforge.exporters.tracing.torchlib import torchlib_read_once
from nestforge.exporters.tracing.trace import quiet_export
from torch.onnx._internal.exporter import _registration
from torch.onnx._internal.exporter._registration import ONNXRegistry


def export(**options: object) -> bytes:
    program = torch.onnx.export(torch.nn.GELU(), (torch.ones(2, 3),), dynamo=True, verbose=False, **options)
    assert program is not None
    return program.model_proto.graph.SerializeToString()


def test_torchlib_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with torchlib_read_once(), quiet_export():
        export()
    monkeypatch.setattr(_registration.onnxscript_apis, "get_torchlib_ops", None)  # a second reading would fail
    with torchlib_read_once(), quiet_export():
        export()


def test_graphs_are_those_of_a_registry_of_their_own() -> None:
    with quiet_export():
        expected = export(optimize=False)
        with torchlib_read_once():
            assert export(optimize=False) == expected


def test_a_translation_that_one_export_adds_is_not_seen_by_the_next() -> None:
    def as_relu(x: object, approximate: str = "none") -> object:
        from onnxscript import opset20

        return opset20.Relu(x)

    with quiet_export(), torchlib_read_once():
        plain = export(optimize=False)
        assert export(optimize=False, custom_translation_table={torch.ops.aten.gelu.default: as_relu}) != plain
        assert export(optimize=False) == plain
    assert isinstance(vars(ONNXRegistry)["from_torchlib"], classmethod)  # its own again
