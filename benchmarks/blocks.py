"""A block of a model as an engine of its own, made as the compiler makes engines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..bucket import Bucket
from ..bundle.entries.tensor_spec import TensorSpec
from ..bundle.manifest import WEIGHTS_NAME
from ..compiler.graph.emit import emit
from ..compiler.graph.make_template import make_template
from ..compiler.graph.store import read_store, save_tensors
from ..elastic import ElasticSpec
from ..exporters.tracing.trace import Interface, trace


@dataclass(frozen=True)
class HiddenStates:
    """The interface of a block: hidden states ``[B, S, hidden]`` in, hidden states out."""

    hidden: int

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("x", "float32", ("batch", "sequence", self.hidden)),)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("y", "float32", ("batch", "sequence", self.hidden)),)


def block_engine(block: torch.nn.Module, interface: Interface, bucket: Bucket, folder: Path) -> Path:
    """The engine of ``block`` in ``folder``: weights outside, a row of a stack a view."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().numpy() for name, value in block.named_parameters()}
    spec = ElasticSpec((), ())
    template = make_template(trace(block, interface, bucket, opset=20), spec, bucket, set(weights))
    save_tensors({name: weights[name] for name in template.weights} | dict(template.tables), folder / WEIGHTS_NAME)
    path = folder / "engine.onnx"
    path.write_bytes(emit(template, read_store(folder / WEIGHTS_NAME, spec), spec.universal()))
    return path
