"""Names of PyTorch that are not public, for torch 2.13 (pyproject.toml pins it): it has no public ones of the same.

Models are surveyed by passes on fake tensors, which have shapes and no numbers, under modes that see every operation;
torch.export works so itself and offers no other way. No module but this one and faster_export.py uses a private name
of PyTorch, which a test holds: who moves to another release looks here.
"""

import copy
from typing import Any, TypeVar

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import tree_flatten, tree_iter, tree_leaves, tree_map_only, tree_unflatten

__all__ = [
    "FAKE_TENSOR_LOG",
    "ConstantSource",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "detect_fake_mode",
    "disable_current_modes",
    "disable_dispatch",
    "enable_python_dispatcher",
    "held_in",
    "is_hooked",
    "put_first",
    "schema_of",
    "storage",
    "tree_flatten",
    "tree_iter",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
    "unset_fake_temporarily",
    "with_part",
]

FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"
_Module = TypeVar("_Module", bound=torch.nn.Module)


def schema_of(operation: Any) -> Any:
    """Arguments of an operation as a mode is given it: names, defaults, and which it writes into."""
    return operation._schema


def storage(tensor: torch.Tensor) -> int:
    """Key that views of one tensor have in common, without numbers too."""
    return int(tensor.untyped_storage()._cdata)


def disable_dispatch() -> Any:
    """A context in which tensors are what they are, beneath any mode."""
    return torch._C._DisableTorchDispatch()


def held_in(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """The tables of what ``module`` has beside parameters: attributes and buffers."""
    return vars(module), module._buffers


def is_hooked(module: torch.nn.Module) -> bool:
    """Whether calls of ``module`` are seen or changed by others."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def with_part(module: _Module, name: str, part: torch.nn.Module) -> _Module:
    """``module`` with another ``part`` of this name; all else is shared."""
    other = copy.copy(module)
    other._modules = {**module._modules, name: part}
    return other


def put_first(module: torch.nn.Module, name: str) -> None:
    """Names the part ``name`` of ``module`` before its others, where it has one."""
    if name in module._modules:
        module._modules = {name: module._modules[name], **module._modules}
