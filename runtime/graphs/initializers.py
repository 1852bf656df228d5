"""The initializers of an engine that lie in the weight store, read from its graph without the onnx package.

An ONNX file is a protobuf message: fields of a number, a kind and a value. Only ``ModelProto.graph`` (7),
``GraphProto.initializer`` (5) and the fields of ``TensorProto`` below are looked at; whatever else is in the file is
searched as bytes for what names a file, and not read. The bytes may come from anywhere, so every length is checked
before it is used, and what only some readers accept (groups, tags of more than 32 bits) is refused.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from ...bundle.files import WEIGHTS_NAME, is_of_weights
from ...errors import BundleCorruptError

# ``TensorProto.DataType``: name, and bytes of one element.
_DTYPES = {
    1: ("float32", 4),
    2: ("uint8", 1),
    3: ("int8", 1),
    6: ("int32", 4),
    7: ("int64", 8),
    9: ("bool", 1),
    10: ("float16", 2),
    16: ("bfloat16", 2),
}
_GRAPH, _INITIALIZER = 7, 5
_DIMS, _DATA_TYPE, _NAME, _EXTERNAL_DATA, _DATA_LOCATION = 1, 2, 8, 13, 14
_KEY, _VALUE = 1, 2
_EXTERNAL = 1
_ENTRIES = ("location", "offset", "length")
# Without this text, as the ``key`` (1) of an entry, no tensor names a file. The tag and the length before it may be
# padded: readers drop the bits above 32.
_LOCATION = re.compile(b"location")
_KEY_BEFORE = re.compile(rb"(?:\x0a|\x8a\x80{0,8}[\x00-\x7f])(?:\x08|\x88\x80{0,8}[\x00-\x7f])\Z")
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_MAX_VARINT = 10
_MAX_NUMBER = 2**29 - 1
_COPIED_BYTES = 2**20
# Fields that are looked at in one file. A field takes two bytes of it, and a microsecond: an engine has some thousands.
_MAX_FIELDS = 2**19
# As many dimensions as numpy's arrays have.
_MAX_RANK = 64


@dataclass(frozen=True)
class Initializer:
    """One initializer of a graph whose values are ``bytes`` bytes of ``file`` of the weight store, from byte ``offset``
    on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    file: str


def files_of(initializers: Iterable[Initializer]) -> list[str]:
    """The files of the weight store that they lie in, each once."""
    return sorted({one.file for one in initializers})


def external_initializers(graph: bytes, where: str) -> tuple[Initializer, ...]:
    """The initializers of an ONNX file that lie in the weight store; those inside the file are left out.

    Raises BundleCorruptError for a file that is no protobuf message, for an initializer of an unknown type, in another
    file, or whose shape and length disagree, and for any other tensor outside the file; ``where`` begins the message.
    """
    found, limit = [], _Limit()
    try:
        for number, body in _fields(memoryview(graph), limit):
            if number != _GRAPH or not isinstance(body, memoryview):
                _require_inside(body, limit)
                continue
            for inner, part in _fields(body, limit):
                if inner != _INITIALIZER or not isinstance(part, memoryview):
                    _require_inside(part, limit)
                elif (initializer := _external(part, limit)) is not None:
                    found.append(initializer)
    except ValueError as failure:
        raise BundleCorruptError(f"{where}: {failure}; fetch the bundle again, or compile it again") from failure
    return tuple(found)


class _Limit:
    """Counts what is looked at in one file."""

    def __init__(self) -> None:
        self._left = _MAX_FIELDS

    def count(self) -> None:
        """Raises ValueError once there is too much."""
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"more than {_MAX_FIELDS} fields, which no engine has")


def _require_inside(part: int | memoryview, limit: _Limit) -> None:
    """Raises ValueError for a part of the file that holds a tensor outside it.

    Tensors lie at any depth: constants, the graphs of branches and loops, functions. Only the schema says what is a
    message and what a text, so whatever has the bytes of an entry that names a file is taken for one.
    """
    if isinstance(part, int):
        return
    for place in _LOCATION.finditer(part):
        limit.count()
        at = place.start()
        if _KEY_BEFORE.search(part[max(0, at - 2 * _MAX_VARINT) : at]):
            raise ValueError("a tensor that is no initializer of the graph lies outside the file")


def _external(tensor: memoryview, limit: _Limit) -> Initializer | None:
    name, data_type, location, dims = "", 0, 0, []
    entries: dict[str, str] = {}
    written = 0
    for number, value in _fields(tensor, limit):
        if isinstance(value, memoryview):
            if number == _NAME:
                name = _text(value)
            elif number == _DIMS:
                dims += [_signed(dim) for dim in _varints(value, limit)]
            elif number == _EXTERNAL_DATA:
                texts = ((n, v) for n, v in _fields(value, limit) if isinstance(v, memoryview))
                pair = {n: _text(v) for n, v in texts if n in (_KEY, _VALUE)}
                entries[pair.get(_KEY, "")] = pair.get(_VALUE, "")
                written += 1
        elif number == _DIMS:
            dims.append(_signed(value))
        elif number == _DATA_TYPE:
            data_type = value
        elif number == _DATA_LOCATION:
            location |= value  # whichever of several a reader takes
    label = f"initializer {name!r:.80}"
    if location not in (0, _EXTERNAL):
        raise ValueError(f"{label}: data location {location}, expected 0 or {_EXTERNAL}")
    if location != _EXTERNAL:
        return None
    if data_type not in _DTYPES:
        raise ValueError(f"{label}: type {data_type} is none that a weight store holds")
    if written != len(_ENTRIES) or entries.keys() != set(_ENTRIES):
        found = ", ".join(map(repr, entries))[:80]
        raise ValueError(f"{label}: external data has {found}; expected {', '.join(_ENTRIES)}, once each")
    file = entries["location"]
    if not is_of_weights(file):
        raise ValueError(f"{label}: lies in {file!r:.80}, expected {WEIGHTS_NAME}")
    dtype, size = _DTYPES[data_type]
    offset, length = (_count(entries[key], f"{label}: {key}") for key in ("offset", "length"))
    if len(dims) > _MAX_RANK:
        raise ValueError(f"{label}: {len(dims)} dimensions, more than {_MAX_RANK}")
    if min(dims, default=0) < 0 or prod(dims) * size != length:
        raise ValueError(f"{label}: {length} bytes, expected those of {dtype} {dims}")
    return Initializer(name, dtype, tuple(dims), offset, length, file)


def _fields(message: memoryview, limit: _Limit) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field: whole numbers, and the bytes of messages, texts and packed numbers."""
    at = 0
    # Numbers are read faster from bytes; only a message with a large tensor inside is not worth the copy.
    data = bytes(message) if len(message) < _COPIED_BYTES else message
    while at < len(data):
        limit.count()
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if not 0 < number <= _MAX_NUMBER:
            raise ValueError(f"no ONNX file: a field of number {number}")
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == _LENGTH:
            size, at = _varint(data, at)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            size = 8 if kind == _EIGHT_BYTES else 4
        else:
            raise ValueError(f"no ONNX file: a field of kind {kind}")
        if size > len(data) - at:
            raise ValueError("no ONNX file: a field is longer than the file")
        if kind == _LENGTH:
            yield number, message[at : at + size]
        at += size


def _varint(message: bytes | memoryview, at: int) -> tuple[int, int]:
    """The number at ``at`` and where it ends: seven bits a byte, low ones first, the eighth says that more follow."""
    if at < len(message) and message[at] < 0x80:  # nearly all of them
        return message[at], at + 1
    value = 0
    for position in range(_MAX_VARINT):
        if at + position >= len(message):
            raise ValueError("no ONNX file: it ends within a number")
        byte = message[at + position]
        value |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at + position + 1
    raise ValueError("no ONNX file: a number of more than ten bytes")


def _varints(packed: memoryview, limit: _Limit) -> Iterator[int]:
    at = 0
    while at < len(packed):
        limit.count()
        value, at = _varint(packed, at)
        yield value


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _text(raw: memoryview) -> str:
    return bytes(raw).decode()  # a UnicodeDecodeError is a ValueError


def _count(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ValueError(f"{what} is {text!r:.80}, expected a whole number")
    return int(text)
