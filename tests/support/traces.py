"""Torch's export of one kind of module at one bucket, made once a process however many tests compile such a module.

Half of a tiny model's compile is this export, and most tests compile the same few models. torch.export sees shapes and
types of parameters and never their values, so what is kept serves every module of the same classes, settings, shapes
and buffers: a compile gets a copy of the graph, with its own module's parameters.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from nestforge.compiler.graph import template
from nestforge.elastic import Bucket
from nestforge.exporters.tracing.trace import Interface, Trace, trace
from torch.onnx._internal.exporter._core import TorchTensor
from transformers import PreTrainedConfig, PreTrainedModel

_KEPT = 64  # the last traces: graphs of up to a thousand nodes


@dataclass(frozen=True)
class _Known:
    trace: Trace
    parameters: dict[str, str]  # initializer to the parameter it is


_known: OrderedDict[str, _Known] = OrderedDict()


@contextlib.contextmanager
def traced_once() -> Iterator[None]:
    """Templates are made of known traces inside, where there are any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template, "trace", _known_trace)
        yield


def _known_trace(module: torch.nn.Module, interface: Interface, bucket: Bucket, opset: int) -> Trace:
    try:
        key = _key(module, interface.inputs, interface.outputs, bucket, opset)
    except (pickle.PicklingError, AttributeError, TypeError):  # such as a class or function of one test alone
        return trace(module, interface, bucket, opset)
    if key in _known:
        _known.move_to_end(key)
    else:
        _known[key] = _named(trace(module, interface, bucket, opset), module)
        if len(_known) > _KEPT:
            _known.popitem(last=False)
    return _copy(_known[key], module)


class _Pickler(pickle.Pickler):
    """Pickles a parameter as its type and shape, another tensor with its values, and no folder of a checkpoint."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, PreTrainedModel | PreTrainedConfig):
            return type(obj), (), {name: value for name, value in vars(obj).items() if not name.endswith("_or_path")}
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        kind = (str(obj.dtype), tuple(obj.shape), obj.requires_grad)
        values = b"" if isinstance(obj, torch.nn.Parameter) else _bytes(obj)
        return type(obj), (*kind, values)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _key(*parts: object) -> str:
    file = io.BytesIO()
    _Pickler(file).dump(parts)
    return hashlib.sha256(file.getbuffer()).hexdigest()


def _named(traced: Trace, module: torch.nn.Module) -> _Known:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    values = traced.model.graph.initializers.values()
    tensors = {value.name or "": value.const_value for value in values}
    return _Known(
        traced,
        {
            name: names[id(tensor.raw)]
            for name, tensor in tensors.items()
            if isinstance(tensor, TorchTensor) and id(tensor.raw) in names
        },
    )


def _copy(known: _Known, module: torch.nn.Module) -> Trace:
    model, parameters = known.trace.model.clone(), dict(module.named_parameters())
    for name, value in model.graph.initializers.items():
        # A tensor carries its value's name, which a compile changes.
        value.const_value = (
            TorchTensor(parameters[known.parameters[name]], name)
            if name in known.parameters
            else copy.copy(value.const_value)
        )
    return Trace(model, dict(known.trace.module_outputs))
