"""Complex numbers, which a graph has as pairs of real ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.exporters.signature import Signature
from nestforge.exporters.trace import trace

TOKENS = ("batch", "sequence")
Turn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Of complex x and y ``[B, S, 4]``.
TURNS: dict[str, Turn] = {
    "a product": lambda x, y: x * y,
    "a real number": lambda x, y: x * 1.5 + y,
    "a real tensor": lambda x, y: x * torch.view_as_real(y)[..., 0],
    "a new dimension": lambda x, y: (x.unsqueeze(2) * y[:, :, None, :]).squeeze(2),
    "a new last dimension": lambda x, y: (x.unsqueeze(-1) * y.unsqueeze(-1)).squeeze(-1),
    "rows alike": lambda x, y: x * y[:1].expand(x.shape[0], -1, -1),
    "dimensions in another order": lambda x, y: (x.transpose(1, 2) * y.transpose(-1, -2)).transpose(1, 2),
    "another type": lambda x, y: x.to(torch.complex64) - y.conj(),
}


class Turned(torch.nn.Module):
    def __init__(self, turn: Turn) -> None:
        super().__init__()
        self.turn = turn

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor]:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return (torch.view_as_real(self.turn(pairs, torch.polar(torch.ones_like(angles), angles))).flatten(2),)


@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
def test_as_torch_computes_them(turn: Turn) -> None:
    inputs = TensorSpec("x", "float32", (*TOKENS, 8)), TensorSpec("angles", "float32", (*TOKENS, 4))
    module = Turned(turn).eval()
    traced = trace(module, Signature(inputs, (TensorSpec("y", "float32", (*TOKENS, 8)),), None), Bucket(4, 9, 1, 1), 20)
    graph = ir.to_proto(traced.model).SerializeToString()
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    for rows, tokens in ((1, 1), (4, 9)):
        drawn = torch.Generator().manual_seed(0)
        x, angles = (torch.randn(rows, tokens, size, generator=drawn) for size in (8, 4))
        (found,) = session.run(None, {"x": x.numpy(), "angles": angles.numpy()})
        np.testing.assert_allclose(found, module(x, angles)[0].numpy(), rtol=1e-5, atol=1e-6)
