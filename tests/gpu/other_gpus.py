"""``python other_gpus.py ARCH LIBRARY``: zeroes the machine code of a CUDA library that is for other GPUs than sm_ARCH.

Packed, it is a quarter as large then. Headers stay, and the loader finds the code for its GPU where it was. The layout
is that of ONNX Runtime's library for CUDA 13: in the section ``.nv_fatbin`` containers of entries, each with a header
that names kind, size and architecture. A library that has no code for ARCH in this layout is refused.
"""

import struct
import sys
from pathlib import Path

_CONTAINER = b"\x50\xed\x55\xba"
_MACHINE_CODE = 2  # the other kind is PTX


def zero_other_gpus(data: bytearray, arch: int) -> tuple[int, int]:
    """Bytes of code that stay and that are zeroed in the ELF file ``data``. Raises ValueError for another layout."""
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("no 64-bit ELF file")
    kept = cut = found = 0
    for begin, end in _sections(data, b".nv_fatbin"):
        at = begin
        while at < end:
            if data[at : at + 4] != _CONTAINER:
                at += 8
                continue
            header, size = struct.unpack_from("<HQ", data, at + 6)
            entry, at = at + header, at + header + size
            while entry < at:
                kind, _, head, payload = struct.unpack_from("<HHIQ", data, entry)
                (of,) = struct.unpack_from("<I", data, entry + 28)
                if head + payload == 0:
                    raise ValueError("an entry of no size")
                if kind == _MACHINE_CODE and of != arch:
                    data[entry + head : entry + head + payload] = bytes(payload)
                    cut += payload
                else:
                    kept += payload
                    found += kind == _MACHINE_CODE
                entry += head + payload
    if not found:
        raise ValueError(f"no machine code for sm_{arch}")
    return kept, cut


def _sections(data: bytearray, wanted: bytes) -> list[tuple[int, int]]:
    (table,) = struct.unpack_from("<Q", data, 40)
    count, names = struct.unpack_from("<HH", data, 60)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + 64 * number) for number in range(count)]
    found = []
    for section in sections:
        name = sections[names][4] + section[0]
        if data[name : data.index(0, name)] == wanted:
            found.append((section[4], section[4] + section[5]))
    return found


def main() -> None:
    arch, path = int(sys.argv[1]), Path(sys.argv[2])
    data = bytearray(path.read_bytes())
    kept, cut = zero_other_gpus(data, arch)
    path.write_bytes(data)
    print(f"kept {kept / 1e6:.0f} MB of GPU code, zeroed {cut / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
