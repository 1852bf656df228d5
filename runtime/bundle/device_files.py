"""Files that a device adds to a bundle, such as calibrations: JSON with a version and a seal of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import BundleFormatError
from ...strict import parse_json
from ...whole_file import write_whole
from .manifest import MANIFEST_NAME, SEALED_SINCE
from .open_bundle import Bundle, read_json
from .seal import sealed_json, unsealed

# Of calibrations and of lists of plans alike. 1: first published schema. 2: sealed; else as 1, which is read where the
# bundle is of a schema without seals.
DEVICE_SCHEMA_VERSION = 2


def read_device_file(bundle: Bundle, name: str, mend: str) -> dict[str, Any] | None:
    """The object that the file ``name`` holds, without its seal; None where there is no such file.

    Raises BundleFormatError or BundleCorruptError, whose message ends with ``mend``.
    """
    path = bundle.path / name
    if not os.path.lexists(path):
        return None
    raw = read_json(bundle.path, name)
    try:
        data = parse_json(raw)
    except ValueError as failure:
        raise BundleFormatError(f"{path}: not JSON ({failure}); {mend}") from failure
    version = data.get("schema_version") if isinstance(data, dict) else None
    unsealed_too = bundle.manifest.schema_version < SEALED_SINCE
    if type(version) is not int or version not in (DEVICE_SCHEMA_VERSION, *((1,) if unsealed_too else ())):
        raise BundleFormatError(
            f"{path}: schema_version {str(version)[:80]!r}, expected {DEVICE_SCHEMA_VERSION}; use the nestforge "
            f"release that wrote it, or {mend}"
        )
    return data if version == 1 else unsealed(raw, data, str(path), mend)


def write_device_file(bundle: Bundle, name: str, data: Mapping[str, Any], lost: str) -> Path:
    """Writes ``data`` sealed, whole or not at all; never into another bundle that was put in this one's place.

    Raises OutputError, which says that ``lost`` was not kept, or BundleCorruptError.
    """
    bundle.require_unchanged(MANIFEST_NAME)
    path, raw = bundle.path / name, sealed_json(data)
    write_whole(path, lambda stream: stream.write(raw), lost)
    return path
