"""Things that a test run makes once: folders that its processes share, the tables of operators that every export of
torch makes anew, and exports themselves.

Half of a tiny model's compile is torch's export, and most tests compile the same few models. torch.export sees shapes
and types of parameters and never their values, so a stored export serves every module of the same classes, settings,
shapes and buffers: a compile gets a copy of the graph, with its own parameters. A third of each export is tables of
operators; the product exports a few modules a process and does without, tests export hundreds.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.compiler.graph import make_template
from nestforge.exporters.signature import Interface
from nestforge.exporters.trace import Trace, trace
from torch._subclasses.fake_impls import _deregister_op_impl, op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import exported_program
from torch.onnx._internal.exporter import _decomp
from torch.onnx._internal.exporter._core import TorchTensor
from transformers import PreTrainedConfig, PreTrainedModel


def shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """The folder ``name`` of the run, empty at first."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder ``name`` of the run with what ``make(folder)`` writes there, only to be read. One process makes it,
    while others that need it wait."""
    folder = shared_folder(factory, name)
    made = folder / "made"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "whole").exists():
            shutil.rmtree(made, ignore_errors=True)  # of a process that failed half-way
            made.mkdir()
            make(made)
            (folder / "whole").touch()
    return made


_ORIGINALS = {
    (module, name): getattr(module, name)
    for module, name in (
        (_decomp, "create_onnx_friendly_decomposition_table"),
        (exported_program, "_collect_all_valid_cia_ops"),
        (exported_program, "_override_composite_implicit_decomp"),
    )
}
_decompositions, _composite_operators, _overridden = _ORIGINALS.values()
_INFO = "_get_output_info_for_cache_entry"
_output_info = getattr(FakeTensorMode, _INFO)


@contextlib.contextmanager
def tables_kept() -> Iterator[None]:
    """Exports inside share the decompositions of operators and the way in which these take the place of kernels."""
    kept = (_known_decompositions, _known_operators, _known_kernels)
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), known in zip(_ORIGINALS, kept, strict=True):
            patch.setattr(module, name, known)
        patch.setattr(FakeTensorMode, _INFO, _info_of_known)
        yield


@contextlib.contextmanager
def tables_anew() -> Iterator[None]:
    """Exports inside make them themselves again."""
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), original in _ORIGINALS.items():
            patch.setattr(module, name, original)
        patch.setattr(FakeTensorMode, _INFO, _output_info)
        yield


def _known_decompositions(translated: Collection[Any]) -> dict[Any, Any]:
    return dict(_decompositions_without(frozenset(translated)))


@cache
def _decompositions_without(translated: frozenset[Any]) -> dict[Any, Any]:
    return _decompositions(translated)


def _known_operators() -> Collection[Any]:
    return _operators_of(tuple(torch.ops._dir))


@cache
def _operators_of(_namespaces: tuple[str, ...]) -> Collection[Any]:
    return frozenset(_composite_operators())


# By the decompositions that are requested: of every operator the kernels in Python, and the rule for fake tensors.
_kernels: dict[frozenset[Any], list[tuple[Any, dict[Any, Any], Callable[..., Any]]]] = {}


@contextlib.contextmanager
def _known_kernels(decompositions: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    wanted = frozenset(decompositions.items())
    if wanted not in _kernels:
        with _overridden(decompositions):
            _kernels[wanted] = [(op, dict(op.py_kernels), op_implementations_dict[op]) for op in decompositions]
    before = [(op, dict(op.py_kernels)) for op in decompositions]
    for op, kernels, rule in _kernels[wanted]:
        _replace(op, kernels)
        op_implementations_dict.setdefault(op, rule)
    try:
        yield
    finally:
        for op, kernels in before:
            _replace(op, kernels)
            _deregister_op_impl(op)


def _info_of_known(mode: Any, *given: Any) -> Any:
    """What torch remembers of an operation on tensors without values, but that it does not make the output once more
    to see whether it can: of a range that takes as long as the operation."""
    mode._output_from_cache_entry = lambda *_: given[-1]
    try:
        return _output_info(mode, *given)
    finally:
        del mode._output_from_cache_entry


def _replace(op: Any, kernels: Mapping[Any, Any]) -> None:
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()


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
