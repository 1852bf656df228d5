"""Which dimensions of a module's parameters are one and the same, found by following them through one pass.

The pass computes nothing: its tensors have shapes alone. A dimension is a product of factors (factors.py). Those that
meet in an operation become one; a view splits them (dims_rules.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...errors import ExportError
from ...outside import library_errors
from ..torch_internals import FakeTensorMode, TorchDispatchMode, detect_fake_mode, schema_of, tree_iter, tree_map_only
from .dims_rules import Followed, Noted, rule_of
from .factors import block
from .passes import without_asserts
from .transformers_model import caches_unused


def follow(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Followed:
    """Follows every dimension through one pass of ``module``, whose tensors, as those of its arguments, may be on the
    meta device. Raises ExportError for a module that does not answer by shapes alone."""
    tensors = [*module.parameters(), *module.buffers()]
    found, mode = Followed(), detect_fake_mode(tensors) or FakeTensorMode(allow_non_fake_inputs=True)

    def shaped(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            made = torch.empty(tensor.shape, dtype=tensor.dtype)
            return torch.nn.Parameter(made, False) if isinstance(tensor, torch.nn.Parameter) else made

    # A pass leaves tensors without numbers in a module: it runs a copy.
    module = copy.deepcopy(module, {id(tensor): shaped(tensor) for tensor in tensors})
    noted = Noted(found)
    for name, parameter in module.named_parameters():
        noted.source(parameter, name)
    for buffer in module.buffers():
        noted.fresh(buffer, "a constant of the model has one for each")
    args, kwargs = tree_map_only(torch.Tensor, shaped, (tuple(args), dict(kwargs)))
    for tensor in _tensors((args, kwargs)):
        noted.fresh(tensor, "an input of the model has it")
    for name, part in module.named_modules():
        part.register_forward_pre_hook(_recorder(found, name), with_kwargs=True)
    failed = library_errors(lambda said: ExportError(f"cannot be followed by shapes alone: {said}"))
    asserted, math = without_asserts(module), sdpa_kernel(SDPBackend.MATH)
    with failed, torch.no_grad(), math, caches_unused(), mode, asserted, _Follower(noted):
        outputs = module(*args, **kwargs)
    for tensor in _tensors(outputs):
        block(noted.dims(tensor), "an output of the model has it")
    found.answers = [tuple(tensor.shape) for tensor in _tensors(outputs)]
    return found


def _recorder(found: Followed, name: str) -> Callable[..., None]:
    def record(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Caches, which XLM makes whatever is asked, hold tensors of the pass.
        given = {key: None if "Cache" in type(each).__name__ else each for key, each in kwargs.items()}
        found.calls.setdefault(name, (args, given))

    return record


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor))


class _Follower(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own is not typed
    """Notes the dimensions of every tensor that an operation returns."""

    def __init__(self, noted: Noted) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted = noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        returned = func(*args, **kwargs)
        outputs = list(_tensors(returned))
        name = func.overloadpacket.__name__
        inputs = list(_tensors((args, kwargs)))
        rule = rule_of(name, torch.Tag.pointwise in func.tags)
        if rule is not None:
            arguments = schema_of(func).arguments
            given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
            given |= {argument.name: value for argument, value in zip(arguments, args, strict=False)}
            rule(self.noted, inputs, outputs, {**given, **kwargs})
        elif inputs and outputs:
            for tensor in inputs:
                block(self.noted.dims(tensor), f"{name} is not followed")
        return returned
