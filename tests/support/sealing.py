"""Changing files of a bundle as one who writes them would: hashes and seals fit again."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nestforge.bundle.manifest import BUILD_NAME, MANIFEST_NAME

TAIL = 68  # 64 digits, a quote, and the end of the object


def sealed_again(raw: bytes) -> bytes:
    """A sealed file whose bytes were changed, with the seal of what they are now."""
    return raw[:-TAIL] + hashlib.sha256(raw[:-TAIL]).hexdigest().encode() + raw[-4:]


def edited(raw: bytes, edit: Callable[[dict[str, Any]], object]) -> bytes:
    """The file after ``edit`` changed the object that it holds; one that was sealed is sealed again."""
    data = json.loads(raw)
    was_sealed = data.pop("seal", None) is not None
    edit(data)
    text = json.dumps(data, indent=1)
    return sealed_again(f'{text[:-2]},\n "seal": "{"0" * 64}"\n}}\n'.encode()) if was_sealed else text.encode()


def edit_sealed(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """``edited`` of the file at ``path``."""
    path.write_bytes(edited(path.read_bytes(), edit))


def edit_manifest(bundle: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """``edit`` changes the manifest, for which the build record then vouches."""
    path = bundle / MANIFEST_NAME
    data = json.loads(path.read_bytes())
    edit(data)
    raw = json.dumps(data).encode()
    path.write_bytes(raw)
    edit_sealed(bundle / BUILD_NAME, lambda record: record.update(manifest_sha256=hashlib.sha256(raw).hexdigest()))


def reseal(bundle: Path) -> None:
    """Hashes and sizes in the manifest are made to fit the changed files again."""

    def fit(manifest: dict[str, Any]) -> None:
        for entry in manifest["files"]:
            raw = (bundle / entry["path"]).read_bytes()
            entry.update(bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest())

    edit_manifest(bundle, fit)
