"""Opening a bundle: schema, names, sizes and, on request, every byte; docs/bundle-format.md holds the rules.

A bundle may come from anywhere, so nothing outside its folder is touched and nothing is read before its size is known.
Later openings read the files that were opened here, or are refused.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ..argument_types import checked
from ..errors import BundleCorruptError, BundleFormatError
from ..outside_file import folder_problem
from .build_record import BuildRecord
from .entries.task_entry import MergedTask
from .files import FETCH_AGAIN, FileIdentity, identity_at, regular_file, stream_sha256
from .manifest import BUILD_NAME, MANIFEST_NAME, REPORT_NAME, Manifest
from .read_manifest import MAX_JSON_BYTES, read_build_record, read_manifest

Check = Literal["fast", "full"]


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. ``path`` is absolute and no link, so that engines resolve their weights beside themselves, and
    that a link which is switched to another bundle changes nothing.

    ``opened`` are the files as they were found, by name, and ``hashed`` the names of those whose every byte was
    checked; of a bundle that is still being written both are empty, and its files may change. ``merged`` is what
    engines that tasks are merged into are opened with; None of a bundle whose engines take tasks as inputs, or none.
    """

    path: Path
    manifest: Manifest
    build: BuildRecord
    opened: dict[str, FileIdentity] = field(default_factory=dict, repr=False, compare=False)
    hashed: set[str] = field(default_factory=set, repr=False, compare=False)
    merged: MergedTask | None = field(default=None, repr=False, compare=False)

    def with_merged(self, task: MergedTask) -> Bundle:
        """This bundle as the engines alone that tasks are merged into, opened with ``task`` in their weights."""
        return replace(self, manifest=self.manifest.of_merged, merged=task)

    def file(self, name: str) -> Path:
        """Path of a file that the manifest lists. Raises BundleCorruptError unless it is the one that was opened."""
        self.require_unchanged(name)
        return self.path / name

    @property
    def weights(self) -> tuple[Path, ...]:
        """Paths of the files of the weight store, as of ``file``."""
        return tuple(map(self.file, self.manifest.weight_names))

    def sha256(self, name: str) -> str | None:
        """The statement of the manifest or build record on the file ``name``; None where neither lists it."""
        listed = {entry.path: entry.sha256 for entry in self.manifest.files}
        return self.build.manifest_sha256 if name == MANIFEST_NAME else listed.get(name)

    def require_unchanged(self, *names: str) -> None:
        """Raises BundleCorruptError unless the files ``names`` are the ones that were opened, not written to since.

        One whose rights, owner or links changed is hashed, once for each change.
        """
        for name in names:
            known = self.opened.get(name)
            if known is None or (now := identity_at(self.path / name)) == known:
                continue
            if now is None or not now.may_have_bytes_of(known) or not self._has_listed_bytes(name):
                raise BundleCorruptError(
                    f"{self.path / name}: removed, replaced or written to since the bundle was opened; open it again"
                )
            self.opened[name] = now  # as it was before it was hashed: what happened meanwhile is seen next time

    def _has_listed_bytes(self, name: str) -> bool:
        with regular_file(self.path / name) as (file, _):
            return stream_sha256(file) == self.sha256(name)

    @contextmanager
    def held(self, *names: str) -> Iterator[None]:
        """Holds the files ``names`` that the block reads to those that were opened. Raises BundleCorruptError."""
        self.require_unchanged(*names)
        yield
        self.require_unchanged(*names)

    def require_hashes(self, *names: str) -> None:
        """Checks every byte of the files ``names``, once for each opened bundle. Raises BundleCorruptError."""
        for entry in self.manifest.files:
            if entry.path in names and entry.path not in self.hashed:
                with self.held(entry.path), regular_file(self.path / entry.path) as (file, _):
                    _require_hash(self.path / entry.path, file, entry.sha256)
                self.hashed.add(entry.path)

    def __repr__(self) -> str:
        counts = f"{len(self.manifest.submodels)} submodels, {len(self.manifest.engines)} engines"
        return f"Bundle({str(self.path)!r}: {self.manifest.name}, {counts})"


@checked
def open_bundle(path: str | os.PathLike[str], check: Check = "fast") -> Bundle:
    """Reads the manifest and the build record, and checks the files.

    ``fast``: the manifest by the hash in the build record, that by its seal, every listed file by kind and size.
    ``full``: the SHA-256 of their bytes and of the report as well; what devices added is checked by ``verify`` and a
    full ``load``. Raises BundleFormatError or BundleCorruptError, InputError for arguments of another type.
    """
    folder = Path(path)
    if problem := folder_problem("bundle", folder):
        raise BundleFormatError(problem)
    folder = folder.resolve()
    opened: dict[str, FileIdentity] = {}
    raw, opened[MANIFEST_NAME] = _read_json(folder / MANIFEST_NAME)
    manifest = read_manifest(raw, str(folder / MANIFEST_NAME))
    record, opened[BUILD_NAME] = _read_json(folder / BUILD_NAME)
    build = read_build_record(record, str(folder / BUILD_NAME), manifest)
    digest = hashlib.sha256(raw).hexdigest()
    if digest != build.manifest_sha256:
        raise BundleCorruptError(
            f"{folder / MANIFEST_NAME}: sha256 {digest}, {BUILD_NAME} expects {build.manifest_sha256}; {FETCH_AGAIN}"
        )
    for entry in manifest.files:
        with regular_file(folder / entry.path) as (_, identity):
            if identity.size != entry.bytes:
                raise BundleCorruptError(
                    f"{folder / entry.path}: {identity.size} bytes, expected {entry.bytes}; {FETCH_AGAIN}"
                )
            opened[entry.path] = identity
    bundle = Bundle(folder, manifest, build, opened)
    if check == "full":
        bundle.require_hashes(*(entry.path for entry in manifest.files))
        if build.report_sha256 is not None:
            with regular_file(folder / REPORT_NAME) as (file, _):
                _require_hash(folder / REPORT_NAME, file, build.report_sha256)
    return bundle


BundleOrPath = str | os.PathLike[str] | Bundle


def bundle_of(bundle: BundleOrPath) -> Bundle:
    """``bundle`` where it is open, else the one of that path. Raises as ``open_bundle`` does."""
    return bundle if isinstance(bundle, Bundle) else open_bundle(bundle)


def read_json(folder: Path, name: str) -> bytes:
    """The bytes of a JSON file of a bundle, which are not too many. Raises BundleFormatError or BundleCorruptError."""
    return _read_json(folder / name)[0]


def _read_json(path: Path) -> tuple[bytes, FileIdentity]:
    with regular_file(path) as (file, identity):
        if identity.size > MAX_JSON_BYTES:
            raise BundleFormatError(f"{path}: {identity.size} bytes, more than the {MAX_JSON_BYTES} allowed")
        return file.read(identity.size), identity


def _require_hash(path: Path, file: io.BufferedReader, expected: str) -> None:
    digest = stream_sha256(file)
    if digest != expected:
        raise BundleCorruptError(f"{path}: sha256 {digest}, expected {expected}; {FETCH_AGAIN}")
