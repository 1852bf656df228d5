"""What every export of torch makes anew of the same operators, made once a run: a third of a tiny module's export.

The product exports a few modules a process and does without; tests export hundreds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch._subclasses.fake_impls import _deregister_op_impl, op_implementations_dict
from torch.export import exported_program
from torch.onnx._internal.exporter import _decomp

_ORIGINALS = {
    (module, name): getattr(module, name)
    for module, name in (
        (_decomp, "create_onnx_friendly_decomposition_table"),
        (exported_program, "_collect_all_valid_cia_ops"),
        (exported_program, "_override_composite_implicit_decomp"),
    )
}
_decompositions, _composite_operators, _overridden = _ORIGINALS.values()


@contextlib.contextmanager
def tables_kept() -> Iterator[None]:
    """Exports inside share the decompositions of operators and the way in which these take the place of kernels."""
    kept = (_known_decompositions, _known_operators, _known_kernels)
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), known in zip(_ORIGINALS, kept, strict=True):
            patch.setattr(module, name, known)
        yield


@contextlib.contextmanager
def tables_anew() -> Iterator[None]:
    """Exports inside make them themselves again."""
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), original in _ORIGINALS.items():
            patch.setattr(module, name, original)
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


# By the decompositions that are asked for: of every operator the kernels in Python, and the rule for fake tensors.
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


def _replace(op: Any, kernels: Mapping[Any, Any]) -> None:
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()
