"""The seal of a file that no manifest can list: the SHA-256 of its own content, as its last field.

The build record, calibrations and lists of plans are written where they are used, after the manifest and one without
the other. Each is one file that is replaced in one step, so what vouches for it is in it: between a file and a
seal elsewhere an interruption would leave a bundle that does not open. docs/bundle-format.md, section 2.11.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ..errors import BundleCorruptError

SEAL = "seal"
_SEAL_PREFIX = f'"{SEAL}": "'.encode()
_SEAL_DIGITS = 64
_SEAL_SUFFIX = b'"\n}\n'


def to_json(data: Any) -> bytes:
    """JSON as every file of a bundle has it: sorted keys, one indent, a final newline."""
    text = json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    # Half of a surrogate pair, as Python reads names of files that are not UTF-8, becomes JSON's own escape of it.
    return text.encode(errors="backslashreplace")


def sealed_json(data: Mapping[str, Any]) -> bytes:
    """``data``, a JSON object of at least one field, as the bytes of a sealed file."""
    content = to_json(data).removesuffix(b"\n}\n") + b",\n " + _SEAL_PREFIX
    return content + hashlib.sha256(content).hexdigest().encode() + _SEAL_SUFFIX


def unsealed(raw: bytes, data: Mapping[str, Any], where: str, mend: str) -> dict[str, Any]:
    """``data``, which was read from ``raw``, without its seal. Raises BundleCorruptError unless that is right."""
    content, digits = (
        raw[: -_SEAL_DIGITS - len(_SEAL_SUFFIX)],
        raw[-_SEAL_DIGITS - len(_SEAL_SUFFIX) : -len(_SEAL_SUFFIX)],
    )
    if SEAL not in data or not content.endswith(_SEAL_PREFIX) or not raw.endswith(_SEAL_SUFFIX):
        raise BundleCorruptError(f"{where}: has no seal at its end, or was changed since it was sealed; {mend}")
    if hashlib.sha256(content).hexdigest().encode() != digits:
        raise BundleCorruptError(f"{where}: its seal is not that of its content; {mend}")
    return {key: value for key, value in data.items() if key != SEAL}
