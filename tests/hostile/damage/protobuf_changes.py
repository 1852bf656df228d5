"""Damage to a protobuf message (an ONNX file) that stays a protobuf message: fields changed, moved, doubled, removed.

Nothing is known of the schema: a field of bytes whose content parses as a message is taken for one, as often as not.
Groups (wire types 3 and 4) and tags of more than 32 bits are among the changes: some readers step over them.
"""

from random import Random

from .changes import Change, damaged_bytes

Field = tuple[int, int, bytes | int]  # number, wire type, value

_VARINT, _EIGHT, _BYTES, _GROUP, _END, _FOUR = range(6)
_NUMBERS = (0, 1, 2, 3, 7, 16, 31, 100, 2**26, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
_TEXTS = (
    *(b"", b"\x00", b"a\nb", b"\x1b[2J", b"\xff\xfe", b"\xed\xa0\x80", "²".encode(), b"x" * 5000, b".."),
    *(b"../manifest.json", b"/proc/self/mem", b"weights.safetensors", b"tokenizer.json", b"Loop", b"If", b"Scan"),
    *(b"Expand", b"ConstantOfShape", b"Add", b"MatMul", b"Reshape", b"ai.onnx.ml", b"com.microsoft", b"-1"),
    *(b"18446744073709551615", b"1e9"),
)


def damaged_protobuf(raw: bytes, rng: Random) -> Change:
    """One to three fields changed, anywhere in the tree; now and then bytes, as ``damaged_bytes``."""
    if rng.random() < 0.15:
        return damaged_bytes(raw, rng)
    told = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        raw, how = _changed(raw, rng, "")
        told.append(how)
    return raw, "; ".join(told)


def _changed(raw: bytes, rng: Random, path: str) -> Change:
    fields = parsed(raw)
    if not fields:
        return damaged_bytes(raw, rng)
    at = rng.randrange(len(fields))
    number, kind, value = fields[at]
    path = f"{path}/{number}"
    if isinstance(value, bytes) and rng.random() < 0.8 and parsed(value):
        inner, how = _changed(value, rng, path)
        fields[at] = (number, kind, inner)
        return encoded(fields), how
    match rng.randrange(10):
        case 0:
            del fields[at]
            how = "removed"
        case 1:
            times = rng.choice((1, 1, 50))
            fields[at:at] = [fields[at]] * times
            how = f"{times} times more"
        case 2:
            other = rng.randrange(len(fields))
            fields[at], fields[other] = fields[other], fields[at]
            how = f"changed places with field {other}"
        case 3:
            number = rng.choice((0, 1, 2, 5, 7, 8, 13, 14, 20, 100, 2**28))
            fields[at] = (number, kind, value)
            how = f"under number {number}"
        case 4:
            group = rng.choice(((_GROUP, _END), (_GROUP,), (_END,)))
            fields[at:at] = [(1000, mark, b"") for mark in group]
            how = f"behind a group's marks {group}"
        case 5:
            fields[at] = (number + 2**29, kind, value)
            how = "under a number of 30 bits, which some readers drop to 29"
        case _ if isinstance(value, bytes):
            new, how = (rng.choice(_TEXTS), "another text") if rng.random() < 0.6 else damaged_bytes(value, rng)
            fields[at] = (number, kind, new)
        case _:
            new_value = rng.choice((*_NUMBERS, (value + 1) % 2**64, (value - 1) % 2**64))
            fields[at] = (number, kind, new_value)
            how = f"{value} -> {new_value}"
    return encoded(fields), f"{path} {how}"


def parsed(raw: bytes) -> list[Field]:
    """The fields of a message, or none where ``raw`` is no message."""
    fields: list[Field] = []
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        number, kind = tag >> 3, tag & 7
        value: bytes | int
        if at < 0 or number == 0:
            return []
        if kind == _VARINT:
            value, at = _varint(raw, at)
        elif kind in (_EIGHT, _FOUR):
            size = 8 if kind == _EIGHT else 4
            value, at = int.from_bytes(raw[at : at + size], "little"), at + size
        elif kind in (_GROUP, _END):
            value = b""
        elif kind == _BYTES:
            size, at = _varint(raw, at)
            if at < 0 or size > len(raw) - at:
                return []
            value, at = raw[at : at + size], at + size
        else:
            return []
        if at < 0 or at > len(raw):
            return []
        fields.append((number, kind, value))
    return fields


def encoded(fields: list[Field]) -> bytes:
    out = bytearray()
    for number, kind, value in fields:
        out += _as_varint(number << 3 | kind)
        if isinstance(value, bytes):
            out += _as_varint(len(value)) + value if kind == _BYTES else b""
        elif kind == _VARINT:
            out += _as_varint(value)
        else:
            size = 8 if kind == _EIGHT else 4
            out += (value % 2 ** (8 * size)).to_bytes(size, "little")
    return bytes(out)


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while 0 <= at < len(raw) and shift < 70:
        value |= (raw[at] & 0x7F) << shift
        at += 1
        if raw[at - 1] < 0x80:
            return value & (2**64 - 1), at
        shift += 7
    return 0, -1


def _as_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
