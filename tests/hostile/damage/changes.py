"""Ways to damage bytes and JSON text; each is drawn from a ``Random`` and says what it did."""

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

# (damaged, what was done)
Change = tuple[bytes, str]

_MAGIC = (
    *(b"\x00" * 4, b"\xff" * 4, b"\x00" * 8, b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x80" + b"\x00" * 7, b"\xff" * 10),
)
_HERE = "@@here@@"
# As JSON text, since much of it no parsed value could say.
_NUMBERS = (
    *("0", "-1", "1", "2", "16", "-0.0", "0.5", "1e-320", "1e308", "1e400", "-1e400", "NaN", "Infinity", "1E+2"),
    *(str(2**bits + plus) for bits in (26, 31, 32, 53, 63, 64, 100) for plus in (-1, 0)),
    *(str(-(2**bits)) for bits in (31, 63)),
    "1" + "0" * 5000,
)
_TEXTS = (
    *('""', '" "', '"\\u0000"', '"a\\nb"', '"\\u001b[2J\\u001b]0;x\\u0007"', '"\\ud800"', '"\\udfff\\ud800"'),
    *('"\\u202e"', '"\\u00b2"', '"10.\\u00b2"', '"\\u0661\\u0662"', '"\\uff11"', '"1_000"', '" 1 "', '"\\u2028"'),
    *('"\\ufeff"', '"\\u009b31m"', '"../../etc/passwd"', '"/dev/zero"', '"/proc/self/mem"', '".."', '"a/b"'),
    *('"weights.safetensors"', '"manifest.json"', '"%s%n{0}{}"', '"nan"', '"inf"', '"1e400"', '"None"', '"float32"'),
    *('"int64"', '"batch"', f'"{"x" * 5000}"', f'"{"é" * 300}"'),
)
_OTHERS = (
    *("null", "true", "false", "[]", "{}", "[[]]", "[null]", '{"": null}', '[1, "a", null]'),
    *(o * deep + c * deep for o, c in (("[", "]"), ('{"a":', "}")) for deep in (50, 900)),
    "[" * 100_000,
    '{"a":' * 950 + "1" + "}" * 950,
)


def damaged_bytes(raw: bytes, rng: Random) -> Change:
    """One of: bits flipped, cut off, grown, a part copied, removed, moved or overwritten."""
    if not raw:
        return b"\x00", "a byte where there was none"
    at, other = rng.randrange(len(raw)), rng.randrange(len(raw))
    size = min(rng.choice((1, 2, 8, 64, 512)), len(raw) - at)
    match rng.randrange(9):
        case 0 | 1:
            changed = bytearray(raw)
            count = rng.choice((1, 1, 2, 8))
            for _ in range(count):
                changed[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            return bytes(changed), f"{count} bits flipped"
        case 2:
            return raw[:at], f"cut at {at}"
        case 3:
            return raw + rng.randbytes(size), f"{size} bytes more"
        case 4:
            part = raw[other : other + size]
            return raw[:at] + part + raw[at + len(part) :], f"{len(part)} bytes of {other} at {at}"
        case 5:
            return raw[:at] + raw[other : other + size] + raw[at:], f"bytes of {other} inserted at {at}"
        case 6:
            return raw[:at] + raw[at + size :], f"{size} bytes removed at {at}"
        case 7:
            magic = rng.choice(_MAGIC)
            return raw[:at] + magic + raw[at + len(magic) :], f"{magic.hex()} at {at}"
        case _:
            noise = rng.randbytes(size)
            return raw[:at] + noise + raw[at + size :], f"{size} random bytes at {at}"


def damaged_json(raw: bytes, rng: Random) -> Change:
    """A value replaced, removed, doubled, moved or repeated somewhere in the tree; now and then the text's bytes."""
    if rng.random() < 0.15:
        return damaged_bytes(raw, rng)
    data = json.loads(raw)
    container, key, path = rng.choice(list(_places(data, "")))
    old, replaced = container[key], json.dumps(container[key])
    match rng.randrange(10):
        case 0 | 1 | 2 | 3:
            same_kind = _NUMBERS if isinstance(old, (int, float)) and not isinstance(old, bool) else _TEXTS
            text = rng.choice(same_kind if isinstance(old, (int, float, str)) else _OTHERS)
        case 4 | 5:
            text = rng.choice(_NUMBERS + _TEXTS + _OTHERS)
        case 6:
            donor, other, _ = rng.choice(list(_places(data, "")))
            text = json.dumps(donor[other])
        case 7:
            del container[key]
            return json.dumps(data).encode(), f"{path} removed"
        case 8 if isinstance(old, list) and old:
            times = rng.choice((2, 100, max(1, min(100_000, 2**21 // max(1, len(replaced))))))
            text = json.dumps(old * times)
        case 8 if isinstance(old, (int, float)) and not isinstance(old, bool):
            text = json.dumps(old * rng.choice((-1, 2, 1000, 0.5)) + rng.choice((-1, 0, 1)))
        case _ if isinstance(container, dict):
            name = rng.choice((json.dumps(key), rng.choice(_TEXTS)))
            text = f"{replaced}, {name}: {rng.choice((replaced, *_NUMBERS, *_TEXTS))}"
        case _:
            text = f"{replaced}, {replaced}"
    container[key] = _HERE
    return json.dumps(data).replace(f'"{_HERE}"', text).encode(), f"{path} = {text[:80]}"


def _places(data: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
    """Every place in a tree: its container, its key there, and its path for a reader."""
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in pairs:
        yield data, key, f"{path}/{key}"
        yield from _places(value, f"{path}/{key}")


def damaged_framed_json(raw: bytes, rng: Random) -> Change:
    """Safetensors: the header's JSON under a length that fits, its length, or the bytes behind it."""
    size = int.from_bytes(raw[:8], "little")
    header, body = raw[8 : 8 + size], raw[8 + size :]
    match rng.randrange(4):
        case 0 | 1:
            changed, how = damaged_json(header, rng)
            return len(changed).to_bytes(8, "little") + changed + body, f"header {how}"
        case 2:
            length = rng.choice((0, 1, size - 1, size + 1, len(raw), 2**31, 2**63, 2**64 - 1))
            return length.to_bytes(8, "little") + header + body, f"header length {length}"
        case _:
            changed, how = damaged_bytes(body, rng)
            return raw[: 8 + size] + changed, f"body {how}"


def damaged_lines(raw: bytes, rng: Random) -> Change:
    """JSON lines: one line's JSON, or lines doubled, removed, joined or of another encoding."""
    lines = raw.split(b"\n")
    at = rng.randrange(max(1, len(lines) - 1))
    match rng.randrange(6):
        case 0 | 1 | 2 if lines[at]:
            lines[at], how = damaged_json(lines[at], rng)
        case 3:
            lines[at], how = (
                rng.choice((b"", b"\xef\xbb\xbf{}", b"\xff\xfe{\x00}\x00", b"\x00", b"null", b"\r")),
                "a line",
            )
        case 4:
            lines, how = lines * rng.choice((2, 1000)), "lines repeated"
        case _:
            return damaged_bytes(raw, rng)
    return b"\n".join(lines), f"line {at}: {how}"


ChangeOf = Callable[[bytes, Random], Change]
