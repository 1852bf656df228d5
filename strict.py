"""Strict reading of outside data (YAML profiles, JSON manifests): plain data into frozen dataclasses.

Unknown keys are refused with the nearest known name, missing ones by name, and every value is checked against its type.
Field metadata may bound a value: ``field(metadata={"min": 0, "max": 1, "choices": (...)})``. The first field of
dataclasses in a union, where it is a literal, names the one which data are of.
"""

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")

# Limit of a whole number in a file; larger ones overflow floats, arrays and even printing.
_MAX_BITS = 63


def structure(cls: type[T], data: object, where: str, error: Callable[[str], Exception]) -> T:
    """Reads ``data`` (plain dicts, lists and scalars) as dataclass ``cls``, or as a list or mapping of such;
    ``error(message)`` is raised on misfit.

    ``where`` names the document and is extended by the path of the offending value.
    """
    return typing.cast(T, _value(cls, data, where, error, {}))


def unstructure(value: object) -> Any:
    """The inverse: dataclasses to dicts, tuples to lists, fields equal to a ``None`` default left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {f.name: unstructure(v) for f, v in pairs if not (v is None and f.default is None)}
    if isinstance(value, Mapping):
        return {key: unstructure(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [unstructure(item) for item in value]
    return value


def digest(value: object) -> str:
    """SHA-256 of plain data, mappings and dataclasses, whatever the order of their names."""
    return sha256(json.dumps(unstructure(value), sort_keys=True).encode()).hexdigest()


def finite(data: Any) -> Any:
    """``data`` with None for infinities and NaN, which JSON cannot say."""
    if isinstance(data, dict):
        return {key: finite(item) for key, item in data.items()}
    if isinstance(data, list):
        return [finite(item) for item in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """``; did you mean 'latency_ms'?`` or a list of what is known."""
    options = list(known)
    close = difflib.get_close_matches(name, options, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; expected one of {', '.join(sorted(options)) or 'none'}"


def _dataclass(cls: Any, data: object, where: str, error: Callable[[str], Exception]) -> object:
    if not isinstance(data, Mapping):
        raise error(f"{where}: expected a mapping, got {_kind(data)}")
    fields = _fields(cls)
    for key in data:
        if key not in fields:
            raise error(f"{where}: unknown key {_shown(key)}{_nearest(key, fields)}")
    values = {}
    for key, (f, hint) in fields.items():
        if key in data:
            values[f.name] = _value(hint, data[key], f"{where}: {key}", error, f.metadata)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise error(f"{where}: missing key {key!r}")
    return cls(**values)


@cache
def _fields(cls: Any) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """By key, fields and their resolved types; resolving costs far more than reading one value."""
    hints = typing.get_type_hints(cls)
    return {f.name: (f, hints[f.name]) for f in dataclasses.fields(cls) if f.init}


def _value(hint: Any, data: object, where: str, error: Callable[[str], Exception], bounds: Mapping[str, Any]) -> object:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _union(arguments, data, where, error, bounds)
    if origin is Literal:
        for argument in arguments:
            if type(data) is type(argument) and data == argument:  # 20.0 and True equal whole numbers, but are none
                return data
        same_kind = data if any(type(data) is type(argument) for argument in arguments) else _shown(data)
        raise error(f"{where}: got {_shown(data)}{_nearest(same_kind, map(str, arguments))}")
    if origin in (tuple, list):
        if not isinstance(data, (list, tuple)):
            raise error(f"{where}: expected a list, got {_kind(data)}")
        return tuple(_value(arguments[0], item, f"{where}[{i}]", error, bounds) for i, item in enumerate(data))
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
            raise error(f"{where}: expected a mapping with names as keys, got {_kind(data)}")
        return {key: _value(arguments[1], item, f"{where}.{_plain(key)}", error, bounds) for key, item in data.items()}
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint, data, where, error)
    if hint is Any and isinstance(data, (Mapping, list, tuple)):
        _check_free(data, where, error)
        return data
    return _scalar(hint, data, where, error, bounds)


def _check_free(data: Any, where: str, error: Callable[[str], Exception]) -> None:
    """Data without a type of its own has at least values that can be printed and written again."""
    pairs = data.items() if isinstance(data, Mapping) else enumerate(data)
    for key, item in pairs:
        inner = f"{where}.{_plain(str(key))}"
        if isinstance(item, (Mapping, list, tuple)):
            _check_free(item, inner, error)
        else:
            _scalar(Any, item, inner, error, {})


def _union(
    options: tuple[Any, ...], data: object, where: str, error: Callable[[str], Exception], bounds: Mapping[str, Any]
) -> object:
    if data is None and type(None) in options:
        return None
    if tagged := [(tag, option) for option in options if (tag := _tag(option)) is not None]:
        return _tagged(tagged, data, where, error)
    failures = []
    for option in options:
        if option is not type(None):
            try:
                return _value(option, data, where, error, bounds)
            except Exception as failure:
                if not isinstance(failure, type(error(""))):
                    raise
                failures.append(failure)
    is_list = isinstance(data, (list, tuple))
    takes_lists = [typing.get_origin(option) in (tuple, list) for option in options if option is not type(None)]
    raise next((f for f, takes in zip(failures, takes_lists, strict=True) if takes == is_list), failures[0])


def _tag(option: Any) -> tuple[str, str] | None:
    """The key and the name by which a dataclass is told from others of a union: its first field, of one literal."""
    if not isinstance(option, type) or not dataclasses.is_dataclass(option):
        return None
    key, (_, hint) = next(iter(_fields(option).items()))
    names = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    return (key, names[0]) if len(names) == 1 else None


def _tagged(
    tagged: list[tuple[tuple[str, str], Any]], data: object, where: str, error: Callable[[str], Exception]
) -> object:
    if not isinstance(data, Mapping):
        raise error(f"{where}: expected a mapping, got {_kind(data)}")
    key, options = tagged[0][0][0], {name: option for (_, name), option in tagged}
    found = data.get(key)
    if isinstance(found, str) and found in options:
        return _dataclass(options[found], data, where, error)
    raise error(f"{where}: {key}: got {_shown(found)}{_nearest(found, options)}")


def _scalar(
    hint: Any, data: object, where: str, error: Callable[[str], Exception], bounds: Mapping[str, Any]
) -> object:
    if isinstance(data, int) and data.bit_length() > _MAX_BITS:
        raise error(f"{where}: expected a number below 2^{_MAX_BITS}, got {_kind(data)}")
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        data = float(data)
    if hint is not Any and (not isinstance(data, hint) or (isinstance(data, bool) and hint is not bool)):
        names = {"float": "a number", "int": "a whole number", "str": "text", "bool": "true or false"}
        raise error(f"{where}: expected {names.get(hint.__name__, hint.__name__)}, got {_kind(data)}")
    if isinstance(data, float) and not math.isfinite(data):
        raise error(f"{where}: expected a finite number, got {data}")
    if "min" in bounds and isinstance(data, (int, float)) and data < bounds["min"]:
        raise error(f"{where}: expected at least {bounds['min']}, got {data}")
    if "max" in bounds and isinstance(data, (int, float)) and data > bounds["max"]:
        raise error(f"{where}: expected at most {bounds['max']}, got {data}")
    if "choices" in bounds and data not in bounds["choices"]:
        raise error(f"{where}: got {_shown(data)}{_nearest(data, map(str, bounds['choices']))}")
    return data


def _kind(data: object) -> str:
    if isinstance(data, Mapping):
        return "a mapping"
    if isinstance(data, (list, tuple)):
        return "a list"
    return "nothing" if data is None else f"{type(data).__name__} {_shown(data)}"


def _shown(data: object) -> str:
    """A value inside a message: one line, and short whatever the file holds."""
    if isinstance(data, int) and data.bit_length() > _MAX_BITS:
        return f"of {data.bit_length()} bits"
    return repr(data)[:80]


def _plain(key: str) -> str:
    return key if key.isprintable() and len(key) <= 80 else _shown(key)


def _nearest(data: object, known: typing.Iterable[str]) -> str:
    return nearest(data[:80] if isinstance(data, str) else _shown(data), known)
