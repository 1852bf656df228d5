from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.exporters.signature import Signature
from nestforge.exporters.tracing.trace import trace

SIGNATURE = Signature(
    (TensorSpec("y", "float32", ("batch", 4001)),), (TensorSpec("x", "float32", ("batch", 4001)),), None
)


class ErfInv(torch.nn.Module):
    def forward(self, y: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.special.erfinv(y),)


@pytest.fixture(scope="module")
def session() -> onnxruntime.InferenceSession:
    import onnx_ir as ir

    traced = trace(ErfInv().eval(), SIGNATURE, Bucket(1, 1), 20)
    return onnxruntime.InferenceSession(
        ir.to_proto(traced.model).SerializeToString(), providers=["CPUExecutionProvider"]
    )


@pytest.mark.parametrize("edge", [0.5, 0.999, 1 - 1e-6])
def test_the_inverse_error_function_within_float32(session: onnxruntime.InferenceSession, edge: float) -> None:
    y = np.linspace(-edge, edge, 4001, dtype=np.float32)[None]
    (found,) = session.run(None, {"y": y})
    expected = torch.special.erfinv(torch.from_numpy(y).double()).numpy()
    np.testing.assert_allclose(found, expected, rtol=5e-7, atol=1e-12)
