"""A module that writes into nothing runs once in an export; of others torch says what it says of them."""

from __future__ import annotations

import contextlib
from typing import ClassVar

import onnx_ir as ir
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.exporters import trace as trace_module
from nestforge.exporters.signature import Signature
from nestforge.exporters.trace import trace

ROWS = ("batch", "sequence", 3)
SIGNATURE = Signature((TensorSpec("x", "float32", ROWS),), (TensorSpec("y", "float32", ROWS),), 16)


class Net(torch.nn.Module):
    """Returns more than is asked for, its input among it."""

    calls: ClassVar[list[torch.Tensor]] = []
    last: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(3, 3)
        self.last = None
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        Net.calls.append(x)
        y = self.up(x)
        y[:, 0] = 0.0
        return y, x, x.mT, y


class Counting(Net):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.seen += 1
        return (super().forward(x)[0] * self.seen,)


class Overwriting(Net):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().forward(x.mul_(2))


class Keeping(Net):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.last = x * 2
        return super().forward(x)


def traced(net: type[Net], bucket: Bucket) -> tuple[ir.Model, Net, int]:
    """The graph, the module behind it, and how often it ran."""
    torch.manual_seed(0)
    Net.calls.clear()
    module = net().eval().requires_grad_(False)
    model = trace(module, SIGNATURE, bucket, 20).model
    return model, module, len(Net.calls)


@pytest.mark.parametrize("bucket", [Bucket(2, 8), Bucket(2, 9, None, 1)], ids=str)
@pytest.mark.parametrize(("net", "runs"), [(Net, 1), (Keeping, 1), (Counting, 3), (Overwriting, 3)])
def test_the_graph_is_that_of_two_runs(
    monkeypatch: pytest.MonkeyPatch, net: type[Net], runs: int, bucket: Bucket
) -> None:
    alone, module, ran = traced(net, bucket)
    assert (ran, module.last) == (runs, None), "what a trace leaves on a module is taken away again"
    monkeypatch.setattr(trace_module, "traced_alone", _refused)
    behind, _, ran = traced(net, bucket)
    assert ran == 2
    assert repr(alone.graph) == repr(behind.graph)


@contextlib.contextmanager
def _refused(_: torch.nn.Module):  # type: ignore[no-untyped-def]
    raise RuntimeError
    yield
