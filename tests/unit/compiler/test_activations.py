"""Every activation that transformers knows by name, but those with parameters of their own, can be sliced."""

import numpy as np
import onnx
import onnxruntime
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.compiler.graph.make_template import make_template
from nestforge.elastic import Axis, ElasticSpec, PrefixSlice
from nestforge.exporters.checkpoints.config import LEARNED
from nestforge.exporters.signature import Signature
from nestforge.exporters.trace import trace
from transformers.activations import ACT2CLS, ACT2FN

NAMES = sorted(ACT2CLS.keys() - set(LEARNED))
WIDE, NARROW = 8, 3


class _Networks(torch.nn.Module):
    """One FFN for each activation, all on the same input ``[B, S, 4]``."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.ModuleList(torch.nn.Linear(4, WIDE) for _ in NAMES)
        self.down = torch.nn.ModuleList(torch.nn.Linear(WIDE, 4) for _ in NAMES)
        self.activations = torch.nn.ModuleList(ACT2FN[name] for name in NAMES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(d(a(u(x))) for u, a, d in zip(self.up, self.activations, self.down, strict=True))


def test_every_activation_is_sliced() -> None:
    torch.manual_seed(0)
    module = _Networks().eval()
    tokens = ("batch", "sequence", 4)
    signature = Signature(
        (TensorSpec("x", "float32", tokens),), tuple(TensorSpec(name, "float32", tokens) for name in NAMES), 8
    )
    axes = tuple(Axis(f"layers.{index}.ffn", WIDE) for index in range(len(NAMES)))
    slices = tuple(
        PrefixSlice(f"{part}.{index}.{kind}", dim, axis.name)
        for index, axis in enumerate(axes)
        for part, kind, dim in (("up", "weight", 0), ("up", "bias", 0), ("down", "weight", 1))
    )
    spec, bucket = ElasticSpec(axes, slices, depth=len(axes)), Bucket(2, 3)
    names = {name for name, _ in module.named_parameters()}
    template = make_template(trace(module, signature, bucket, 20), spec, bucket, names)
    assert template.slice_problem is None

    weights = {name: value.detach() for name, value in module.named_parameters()}
    proto = template.proto
    for tensor in proto.graph.initializer:
        if tensor.name in template.external:
            name = tensor.name.removesuffix(".T")
            value = weights[name].T if tensor.name.endswith(".T") else weights[name]
            narrow = value[:NARROW] if spec.slices_of(name) else value
            tensor.CopyFrom(onnx.numpy_helper.from_array(narrow.numpy(), tensor.name))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    x = 3 * torch.randn(2, 3, 4)
    with torch.no_grad():
        for index in range(len(NAMES)):
            for part, kind, dim in (("up", "weight", 0), ("up", "bias", 0), ("down", "weight", 1)):
                parameter = getattr(getattr(module, part)[index], kind)
                parameter.data = parameter.data.narrow(dim, 0, NARROW)
        expected = module(x)
    for name, found, wanted in zip(NAMES, session.run(None, {"x": x.numpy()}), expected, strict=True):
        np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5, rtol=1e-5, err_msg=name)
