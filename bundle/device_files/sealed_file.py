"""Files that a device adds to a bundle, such as calibrations: JSON with a version and a seal of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ...errors import BundleCorruptError, BundleFormatError, OutputError
from ...strict import parse_json, structure
from ...whole_file import write_whole
from ..manifest import MANIFEST_NAME
from ..open_bundle import Bundle, read_json
from ..read_manifest import MAX_JSON_BYTES
from ..seal import sealed_json, unsealed

DEVICE_SCHEMA_VERSION = 1


class _OfManifest(Protocol):
    @property
    def manifest_sha256(self) -> str: ...


Record = TypeVar("Record", bound=_OfManifest)


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
    if type(version) is not int or version != DEVICE_SCHEMA_VERSION:
        raise BundleFormatError(
            f"{path}: schema_version {str(version)[:80]!r}, expected {DEVICE_SCHEMA_VERSION}; use the nestforge "
            f"release that wrote it, or {mend}"
        )
    return unsealed(raw, data, str(path), mend)


def read_record(
    bundle: Bundle,
    name: str,
    kind: type[Record],
    problems: Callable[[Record, Bundle], Iterable[str]],
    mend: str,
) -> Record | None:
    """The record of this very manifest that the file ``name`` holds, or None where there is no such file; ``problems``
    says what its types do not.

    Raises BundleFormatError for what is malformed, BundleCorruptError for a wrong seal or a record of another manifest.
    """
    data, where = read_device_file(bundle, name, mend), str(bundle.path / name)
    if data is None:
        return None
    record = structure(kind, data, where, lambda problem: BundleFormatError(f"{problem}; {mend}"))
    if record.manifest_sha256 != bundle.build.manifest_sha256:
        raise BundleCorruptError(f"{where}: belongs to another manifest than this bundle's; {mend}")
    for problem in problems(record, bundle):
        raise BundleFormatError(f"{where}: {problem}; {mend}")
    return record


def write_device_file(bundle: Bundle, name: str, data: Mapping[str, Any], lost: str) -> Path:
    """Writes ``data`` sealed, whole or not at all; never into another bundle that was put in this one's place.

    Raises OutputError, which says that ``lost`` was not kept, or BundleCorruptError.
    """
    bundle.require_unchanged(MANIFEST_NAME)
    path, raw = bundle.path / name, sealed_json(data)
    if len(raw) > MAX_JSON_BYTES:
        raise OutputError(
            f"{path}: would have {len(raw)} bytes, more than the {MAX_JSON_BYTES} that are read; {lost} was not kept, "
            "remove the file and make it again"
        )
    write_whole(path, lambda stream: stream.write(raw), lost)
    return path
