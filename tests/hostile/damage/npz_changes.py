"""Damage to NPZ files: headers of members that lie, and tricks of the ZIP format around them."""

import io
import struct
import zipfile
from random import Random

from .changes import Change, damaged_bytes, damaged_json

_HEADERS = (
    "{{'descr': '<i8', 'fortran_order': False, 'shape': ({n},), }}",
    "{{'descr': '<f4', 'fortran_order': True, 'shape': ({n}, {n}), }}",
    "{{'descr': '|O', 'fortran_order': False, 'shape': (1,), }}",
    "{{'descr': [('a', '<i8'), ('b', '|O')], 'fortran_order': False, 'shape': (1,), }}",
    "{{'descr': '<U{n}', 'fortran_order': False, 'shape': (), }}",
    "{{'descr': '|V{n}', 'fortran_order': False, 'shape': (0,), }}",
    "{{'descr': '<M8[ns]', 'fortran_order': False, 'shape': (1, 16), }}",
    "{{'descr': '<i8', 'fortran_order': False, 'shape': (-1,), }}",
    "{{'descr': '<i8', 'fortran_order': False, 'shape': (True, 16), }}",
    "{{'descr': '>i8', 'fortran_order': False, 'shape': (1, 16), }}",
    "{{'descr': '<i8', 'fortran_order': False, 'shape': ({z}), }}",
    "{{'descr': '<c16', 'fortran_order': 1, 'shape': (1, 16), }}",
    "{deep}",
    "__import__('os')",
)
_NAMES = (
    *("identity.npy", "../up.npy", "/abs.npy", "a\nb.npy", "\x1b[2J.npy", "labels.npy", "x" * 3000 + ".npy"),
    *("no_suffix", ".npy"),
)


def damaged_npz(raw: bytes, rng: Random) -> Change:
    """One of: a member's header, values or name, members doubled, bombs, lies in the ZIP directory, plain bytes."""
    members = _members(raw)
    name = rng.choice(sorted(members))
    match rng.randrange(8):
        case 0 | 1:
            header, body = _split(members[name])
            size = rng.choice((0, 1, 16, 2**20, 2**31, 2**40, 2**62, 2**63, 2**64))
            zeros = ", ".join("0" * 40) + ","
            text = rng.choice((rng.choice(_HEADERS).format(n=size, z=zeros, deep="(" * 5000), _bent(header, rng)))
            members[name] = _npy(text, body)
            how = f"{name}: header {text[:80]}"
        case 2:
            header, body = _split(members[name])
            body, how = damaged_json(body, rng) if body[:1] == b"{" else damaged_bytes(body, rng)
            fitting = header if rng.random() < 0.5 else _resized(header, len(body))
            members[name] = _npy(fitting, body)
            how = f"{name}: {how}"
        case 3:
            new = rng.choice(_NAMES)
            members[new] = members.pop(name) if rng.random() < 0.5 else members[name]
            how = f"{name} as {new[:40]!r}"
        case 4:
            del members[name]
            how = f"{name} removed"
        case 5:
            count = rng.choice((2**20, 2**20, 2**20, 2**26))  # past the limits: lies in the directory, below
            return _bomb(members, rng.choice((name, "more.npy")), count), f"{count} zeros packed"
        case 6:
            changed = bytearray(_packed(members))
            at = changed.find(b"PK\x01\x02") + rng.choice((6, 8, 10, 16, 20, 24, 28, 30, 32, 42))
            changed[at : at + 4] = rng.choice((b"\x00" * 4, b"\xff" * 4, b"\x01\x00\x00\x00", b"\x63\x00\x63\x00"))
            return bytes(changed), f"directory at {at}"
        case _:
            return damaged_bytes(raw, rng)
    return _packed(members), how


def _members(raw: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _packed(members: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return target.getvalue()


def _bomb(members: dict[str, bytes], name: str, count: int) -> bytes:
    """``name`` as ``count`` zeros, packed to a thousandth."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for other, content in members.items():
            if other != name:
                archive.writestr(other, content)
        with archive.open(name, "w", force_zip64=True) as member:
            member.write(_npy(f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({count},), }}", b""))
            for _ in range(count // 2**20):
                member.write(bytes(2**20))
    return target.getvalue()


def _split(member: bytes) -> tuple[str, bytes]:
    size = struct.unpack("<H", member[8:10])[0]
    return member[10 : 10 + size].decode("latin-1").strip(), member[10 + size :]


def _npy(header: str, body: bytes) -> bytes:
    raw = header.encode("latin-1") + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(raw) % 2**16) + raw + body


def _resized(header: str, size: int) -> str:
    return f"{header[: header.index('(') + 1]}{size},), }}" if "|u1" in header else header


def _bent(header: str, rng: Random) -> str:
    at = rng.randrange(len(header))
    return header[:at] + rng.choice(("", "9", "-", "(", "'", "\x00", "L", "e9")) + header[at + 1 :]
