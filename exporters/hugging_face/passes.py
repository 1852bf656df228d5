"""Passes of a model that leave nothing in it, go over sets in one order and, where they have no numbers, leave out
what its class asserts."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, ModuleType
from typing import Any

import torch

from ..torch_internals import detect_fake_mode, held_in

# Whether ``torch_compilable_check`` of transformers passes everything.
_UNCHECKED = "TRANSFORMERS_DISABLE_TORCH_CHECK"
# What is gone over: a set made in each pass, or once for all.
_LOOP, _TYPES = "set(self.config.layer_types)", "unique_layer_types"


@contextmanager
def without_asserts(model: torch.nn.Module) -> Iterator[None]:
    """Within it ``forward`` of the parts of ``model`` asserts and checks nothing while a pass has no numbers: XLM
    asserts of the lengths of texts, which no graph could. PyTorch's own passes with numbers do."""
    if detect_fake_mode() is None:
        yield
        return
    classes = {type(part) for part in model.modules()}
    forwards: list[Callable[..., Any]] = [inspect.unwrap(cls.forward) for cls in classes]
    stripped = [(forward, forward.__code__, code) for forward in forwards if (code := _stripped(forward)) is not None]
    for forward, _, code in stripped:
        forward.__code__ = code  # decorators around it stay
    checked = os.environ.get(_UNCHECKED)
    os.environ[_UNCHECKED] = "1"
    try:
        yield
    finally:
        if checked is None:
            del os.environ[_UNCHECKED]
        else:
            os.environ[_UNCHECKED] = checked
        for forward, own, _ in stripped:
            forward.__code__ = own


@cache
def _stripped(forward: Callable[..., Any]) -> CodeType | None:
    """The code of ``forward`` without asserts; None where it has none, or is not of a model of transformers."""
    if not inspect.isfunction(forward) or not forward.__module__.startswith("transformers.models."):
        return None
    if "assert " not in inspect.getsource(forward):
        return None
    own: CodeType = forward.__code__
    whole = [compile(inspect.getsource(sys.modules[forward.__module__]), own.co_filename, "exec", optimize=1)]
    for code in whole:  # which grows by what each holds
        if (code.co_name, code.co_firstlineno) == (own.co_name, own.co_firstlineno):
            return code
        whole += [each for each in code.co_consts if isinstance(each, CodeType)]
    return None


@contextmanager
def nothing_left(model: torch.nn.Module) -> Iterator[None]:
    """After it the parts of ``model`` have the attributes and buffers that they had: what a pass without numbers or a
    trace leaves there, as ``longrope`` leaves its frequencies, would be taken for numbers by the next."""
    held = [own for part in model.modules() for own in held_in(part)]
    before = [dict(own) for own in held]
    try:
        yield
    finally:
        for own, kept in zip(held, before, strict=True):
            for name in [name for name in own if name not in kept]:
                del own[name]
            own.update(kept)


class _Sorted(set[Any]):
    """A set that is gone over in the order of its elements; a builtin one of texts has another in every process."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__()))


def go_in_order(model: torch.nn.Module) -> None:
    """Classes of transformers that loop over ``set(config.layer_types)`` do so in one order from here on, so that the
    same model gives the same graph, byte for byte."""
    for part in model.modules():
        module = sys.modules[type(part).__module__]
        if _LOOP in _source(module):
            vars(module)["set"] = _Sorted
        vars(part).update({name: _Sorted(own) for name, own in vars(part).items() if name == _TYPES})


@cache
def _source(module: ModuleType) -> str:
    return inspect.getsource(module) if module.__name__.startswith("transformers.models.") else ""
