"""Torch's export of one kind of module at one bucket, made once a run however many tests compile such a module.

Half of a tiny model's compile is this export, and most tests compile the same few models. torch.export sees shapes and
types of parameters and never their values, so what is kept serves every module of the same classes, settings, shapes
and buffers: a compile gets a copy of the graph, with its own parameters. The processes of a run share a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.compiler.graph import make_template
from nestforge.exporters.trace import Interface, Trace, trace
from support.operator_tables import tables_kept
from support.shared_folder import shared_folder
from torch.onnx._internal.exporter._core import TorchTensor
from transformers import PreTrainedConfig, PreTrainedModel

_OUTPUTS_KEY = "nestforge.module_outputs"
# Where the values of a parameter would lie in a file that has none: its name.
_PARAMETER = "parameter:"

folder: Path | None = None


@contextlib.contextmanager
def traced_once(factory: pytest.TempPathFactory) -> Iterator[None]:
    """Templates are made of known traces inside, where there are any."""
    with pytest.MonkeyPatch.context() as patch, tables_kept():
        patch.setitem(globals(), "folder", shared_folder(factory, "traces"))
        patch.setattr(make_template, "trace", _known_trace)
        yield


def _known_trace(module: torch.nn.Module, interface: Interface, bucket: Bucket, opset: int) -> Trace:
    assert folder is not None
    try:
        file = folder / f"{_key(module, interface.inputs, interface.outputs, bucket, opset)}.onnx"
    except (pickle.PicklingError, AttributeError, TypeError):  # such as a class or function of one test alone
        return trace(module, interface, bucket, opset)
    if not file.exists():
        _save(trace(module, interface, bucket, opset), module, file)
    return _load(file, module)


class _Pickler(pickle.Pickler):
    """Pickles a parameter as its type and shape, another tensor with its values, and no folder of a checkpoint; a set
    in an order that every process has."""

    def persistent_id(self, obj: Any) -> Any:
        return ("set", sorted(map(repr, obj))) if isinstance(obj, set | frozenset) else None

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


def _save(traced: Trace, module: torch.nn.Module, file: Path) -> None:
    """Parameters as their names; whole or not at all, since another process may read it."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for name, value in traced.model.graph.initializers.items():
        tensor = value.const_value
        if isinstance(tensor, TorchTensor) and id(tensor.raw) in names:
            place = _PARAMETER + names[id(tensor.raw)]
            value.const_value = ir.ExternalTensor(
                place, 0, tensor.nbytes, tensor.dtype, shape=tensor.shape, name=name, base_dir=""
            )
    traced.model.metadata_props[_OUTPUTS_KEY] = json.dumps(traced.module_outputs)
    beside = file.with_suffix(f".{os.getpid()}")
    beside.write_bytes(ir.to_proto(traced.model).SerializeToString())
    beside.replace(file)


def _load(file: Path, module: torch.nn.Module) -> Trace:
    model = ir.from_proto(onnx.ModelProto.FromString(file.read_bytes()))
    parameters = dict(module.named_parameters())
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            value.const_value = TorchTensor(parameters[str(tensor.location).removeprefix(_PARAMETER)], name)
    return Trace(model, json.loads(model.metadata_props.pop(_OUTPUTS_KEY)))
