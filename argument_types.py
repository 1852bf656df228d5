"""Arguments of public calls, checked against the annotations that document them: a wrong type is one line of ours."""

from __future__ import annotations

import collections.abc
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import cache, wraps
from typing import Any, Literal, ParamSpec, TypeVar, Union

from .errors import InputError

P = ParamSpec("P")
R = TypeVar("R")
# bool is a number to Python, and to nobody who gives one; numpy's own numbers count as numbers.
_NUMBERS: dict[Any, type] = {int: numbers.Integral, float: numbers.Real}
_MOST_SHOWN = 80


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which raises InputError for an argument that is not what its annotation says."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(*args, **kwargs).arguments
        several = {p.name for p in signature.parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        require_types(function, {name: value for name, value in given.items() if name not in several})
        return function(*args, **kwargs)

    return call


def require_types(owner: Any, values: Mapping[str, object]) -> None:
    """Raises InputError unless ``values`` are of the types that ``owner``, a function or dataclass, states by name."""
    hints = _hints(owner)
    for name, value in values.items():
        if name in hints and not _fits(hints[name], value):
            shown = f"{type(value).__name__} {value!r:.{_MOST_SHOWN}}"
            raise InputError(f"{name}: expected {_named(hints[name])}, got {'None' if value is None else shown}")


@cache
def _hints(owner: Any) -> dict[str, Any]:
    return typing.get_type_hints(owner)


def _fits(hint: Any, value: object) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(one, value) for one in inner)
    if origin is Literal:
        return isinstance(value, str | int | bool) and value in inner
    if origin is not None and issubclass(origin, collections.abc.Mapping):
        return isinstance(value, Mapping) and all(
            _fits(inner[0], key) and _fits(inner[1], item) for key, item in value.items()
        )
    if origin is tuple and Ellipsis not in inner:
        return isinstance(value, tuple) and len(value) == len(inner) and all(map(_fits, inner, value))
    if origin is not None and issubclass(origin, collections.abc.Sequence):
        if isinstance(value, str | bytes | bytearray | memoryview) or not isinstance(value, collections.abc.Sequence):
            return False
        return all(_fits(inner[0], item) for item in value)
    if hint in _NUMBERS:
        return isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool)
    if origin is collections.abc.Callable:
        return callable(value)
    return isinstance(value, origin or hint)


def _named(hint: Any) -> str:
    """A type as a sentence has it: ``str, Path or None``."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        names = list(dict.fromkeys(map(_named, inner)))
        return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    if origin is Literal:
        return " or ".join(repr(value) for value in inner)
    if origin is not None and issubclass(origin, collections.abc.Mapping):
        return f"a mapping of {_named(inner[0])} to {_named(inner[1])}"
    if origin is tuple and Ellipsis not in inner:
        return f"a tuple of {', '.join(map(_named, inner))}"
    if origin is not None and issubclass(origin, collections.abc.Sequence):
        return f"a list of {_named(inner[0])}"
    if origin is collections.abc.Callable:
        return "a function"
    return "None" if hint is type(None) else str((origin or hint).__name__)


def option(help: str, default: Any = None, **bounds: Any) -> Any:
    """A dataclass field with the text that explains it, its bounds and its ``unit``, from which
    commands, docstrings and checks are made."""
    return field(default=default, metadata={"help": help, **bounds})
