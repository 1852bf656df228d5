"""Arguments of public calls, checked against the annotations that document them: a wrong type is one line of ours."""

from __future__ import annotations

import collections.abc
import inspect
import math
import numbers
import operator
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, field, fields, is_dataclass
from functools import cache, wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Union

from .errors import InputError, SelectionError
from .strict import nearest

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
# bool is a number to Python, and to nobody who gives one; numpy's own numbers count as numbers.
_NUMBERS: dict[Any, type] = {int: numbers.Integral, float: numbers.Real}
_BOUNDS = {"min", "above", "max"}
_MOST_SHOWN = 80


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` with its options stated, which raises InputError for an argument that is not what its annotation
    says, or beyond its bounds."""
    signature = inspect.signature(stated(function))
    limits = {name: each.metadata for name, each in options_of(function).items() if _BOUNDS & each.metadata.keys()}

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
            _require_known(signature.parameters, kwargs)
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        several = {p.name for p in signature.parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        given.update(require_types(function, {name: value for name, value in given.items() if name not in several}))
        for name, bounds in limits.items():
            if given.get(name) is not None:
                number_within(name, given[name], _number_kind(_hints(function)[name]), bounds)
        return function(*bound.args, **bound.kwargs)

    return call


def require_types(owner: Any, values: Mapping[str, object]) -> dict[str, Any]:
    """``values``, numpy's numbers in them as plain ones. Raises InputError unless they are of the types that ``owner``,
    a function or dataclass, states by name."""
    hints = _hints(owner)
    for name, value in values.items():
        if name in hints and not _fits(hints[name], value):
            shown = f"{type(value).__name__} {value!r:.{_MOST_SHOWN}}"
            raise InputError(f"{name}: expected {_named(hints[name])}, got {'None' if value is None else shown}")
    return {name: _plain(hints[name], value) if name in hints else value for name, value in values.items()}


def take_types(options: Any) -> None:
    """``require_types`` for every field of the frozen dataclass ``options``, which then holds plain numbers."""
    for name, value in require_types(type(options), vars(options)).items():
        object.__setattr__(options, name, value)


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


def _plain(hint: Any, value: Any) -> Any:
    """``value``, which fits ``hint``, itself where it has no numbers but Python's own."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _plain(next(one for one in inner if _fits(one, value)), value)
    if hint in _NUMBERS and type(value) not in _NUMBERS:
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if not isinstance(origin, type) or not issubclass(origin, Mapping | collections.abc.Sequence):
        return value
    if isinstance(value, Mapping):
        items = {_plain(inner[0], key): _plain(inner[1], item) for key, item in value.items()}
        before, after = [*value, *value.values()], [*items, *items.values()]
        return items if any(map(operator.is_not, after, before)) else value
    hints = inner if origin is tuple and Ellipsis not in inner else [inner[0]] * len(value)
    plain = tuple(map(_plain, hints, value))
    return plain if any(map(operator.is_not, plain, value)) else value


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


def number_within(
    name: str,
    value: object,
    kind: type[int] | type[float],
    bounds: Mapping[str, Any],
    error: Callable[[str], Exception] = InputError,
) -> Any:
    """``value`` as a plain ``int`` or ``float``; numpy's numbers are numbers too, ``True`` is none.

    ``bounds`` are the least and the largest allowed, ``min`` and ``max``, and ``above``, which it may not be itself.
    Raises ``error(message)`` unless it is finite and within them.
    """
    number: int | float = math.nan
    given: Any = value
    if isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool):
        try:
            number = kind(given)
        except OverflowError:
            number = math.inf
    least, above, most = bounds.get("min", -math.inf), bounds.get("above", -math.inf), bounds.get("max", math.inf)
    if not (least <= number <= most and above < number and abs(number) < math.inf):
        shown = number if math.isinf(number) else repr(value)[:_MOST_SHOWN]
        raise error(f"{name}: expected {_described(kind, bounds)}, got {shown}")
    return number


def positive_limit(name: str, limit: object) -> float:
    """``limit`` as a float. Raises SelectionError unless it is finite and above 0."""
    return float(number_within(name, limit, float, {"above": 0}, SelectionError))


def option(help: str, default: Any = None, **bounds: Any) -> Any:
    """A dataclass field, or the default of a ``stated`` function's argument, with the text that explains it, its bounds
    (see ``number_within``) and its ``unit``, from which commands, docstrings, pages and checks are made."""
    return field(default=default, metadata={"help": help, **bounds})


def again(stated: Any, **changed: Any) -> Any:
    """An option like another, but for ``default`` and what else is ``changed``."""
    return field(default=changed.pop("default", stated.default), metadata={**stated.metadata, **changed})


def stated(function: F) -> F:
    """``function``, whose defaults may be ``option``: a call has their plain values, the docstring their help."""
    found = {n: p.default for n, p in inspect.signature(function).parameters.items() if isinstance(p.default, Field)}
    plain = [value.default if isinstance(value, Field) else value for value in function.__defaults__ or ()]
    function.__defaults__ = tuple(plain) or None
    own = function.__kwdefaults__ or {}
    function.__kwdefaults__ = own | {name: found[name].default for name in own.keys() & found}
    function.__doc__ = _documented(function, found)
    vars(function)["__options__"] = found
    return function


def options_of(owner: Any) -> Mapping[str, Field[Any]]:
    """The options that a dataclass or a ``stated`` function has, by name."""
    return {f.name: f for f in fields(owner)} if is_dataclass(owner) else vars(owner)["__options__"]


def take_numbers(options: Any, names: Collection[str], error: Callable[[str], Exception] = InputError) -> None:
    """Makes these fields of the frozen dataclass ``options`` plain numbers, within the bounds of their metadata; None
    stays where it is the default. Raises ``error(message)``, see ``number_within``."""
    owner: Any = type(options)
    hints = _hints(owner)
    for each in fields(options):
        value = getattr(options, each.name)
        if each.name in names and not (value is None and each.default is None):
            number = number_within(each.name, value, _number_kind(hints[each.name]), each.metadata, error)
            object.__setattr__(options, each.name, number)


def _number_kind(hint: Any) -> type[int] | type[float]:
    return int if int in (hint, *typing.get_args(hint)) else float


def _described(kind: type, bounds: Mapping[str, Any]) -> str:
    noun = "a whole number" if kind is int else "a number"
    least, above, most = (bounds.get(key) for key in ("min", "above", "max"))
    if least is not None:
        return f"{noun}, {least} or above" if most is None else f"{noun} from {least} to {most}"
    return "a positive number" if most is None else f"{noun} above {above}, at most {most}"


def takes_request(make: Callable[P, T]) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """Makes of a function of a request, a dataclass, one that takes the fields of ``make``, its class, as arguments,
    with its signature and the help of its fields. It raises InputError for a keyword that is none."""

    def decorate(act: Callable[[T], R]) -> Callable[P, R]:
        @wraps(act)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return act(_request(make, args, kwargs))

        return _with_signature(call, make, act)

    return decorate


def with_fields_of(make: Callable[P, T]) -> Callable[[Callable[[S, T], R]], Callable[Concatenate[S, P], R]]:
    """``takes_request`` for a method."""

    def decorate(method: Callable[[S, T], R]) -> Callable[Concatenate[S, P], R]:
        @wraps(method)
        def call(own: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return method(own, _request(make, args, kwargs))

        return _with_signature(call, make, method, inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY))

    return decorate


def _request(make: Callable[..., T], args: Any, kwargs: Any) -> T:
    _require_known(inspect.signature(make).parameters, kwargs)
    return make(*args, **kwargs)


def _require_known(known: Collection[str], given: Mapping[str, object]) -> None:
    for name in given:
        if name not in known:
            raise InputError(f"no option {name!r:.80}{nearest(name[:80], known)}")


def _with_signature(call: F, make: Any, act: Any, *own: inspect.Parameter) -> F:
    """``call`` as help() shows it."""
    signature, returned = inspect.signature(make), inspect.signature(act).return_annotation
    parameters = [*own, *signature.parameters.values()]
    call.__signature__ = signature.replace(parameters=parameters, return_annotation=returned)  # type: ignore[attr-defined]
    call.__doc__ = f"{inspect.getdoc(act)}\n\n{inspect.getdoc(make)}"
    return call


def document_fields(cls: type[T]) -> type[T]:
    """``cls``, a dataclass, with the ``help`` of its fields' metadata in its docstring."""
    cls.__doc__ = _documented(cls, {f.name: f for f in fields(cls)})  # type: ignore[arg-type]
    return cls


def _documented(owner: Any, options: Mapping[str, Field[Any]]) -> str:
    lines = [f"``{name}``: {each.metadata['help']}" for name, each in options.items() if "help" in each.metadata]
    return "\n\n".join([inspect.getdoc(owner) or "", *lines])
