"""Files that a device adds to a bundle, such as calibrations: sealed JSON, some with a record for each host."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from ...errors import BundleCorruptError, BundleFormatError, OutputError
from ...outside_file import versioned_json
from ...profiles.backends import ONNXRUNTIME
from ...profiles.probe_host import probe_host
from ...strict import structure, unstructure
from ...whole_file import alone, write_whole
from ..files import sealed_json, unsealed
from ..manifest import MANIFEST_NAME
from ..open_bundle import Bundle, read_json
from ..read_manifest import MAX_JSON_BYTES

DEVICE_SCHEMA_VERSION = 1
_MAX_HOSTS = 64
_MAX_NAME_LENGTH = 200


@dataclass(frozen=True)
class MeasuredHost:
    """Conditions under which figures hold: the processor, the cores that may be used, and ONNX Runtime; of plans
    also ``others``, the GPU with its release of TensorRT, or what else engines of another back end run on."""

    cpu: str
    architecture: str
    cores: int = field(metadata={"min": 1})
    onnxruntime: str | None = None
    others: str | None = None

    def __str__(self) -> str:
        release = f", ONNX Runtime {self.onnxruntime}" if self.onnxruntime else ""
        return f"{self.cpu}, {self.cores} cores{release}{f', {self.others}' if self.others else ''}"


def read_device_file(bundle: Bundle, name: str, mend: str) -> dict[str, Any] | None:
    """The object that the file ``name`` holds, without its seal; None where there is no such file.

    Raises BundleFormatError or BundleCorruptError, whose message ends with ``mend``.
    """
    path = bundle.path / name
    if not os.path.lexists(path):
        return None
    raw = read_json(bundle.path, name)
    data = versioned_json(raw, DEVICE_SCHEMA_VERSION, str(path), mend, BundleFormatError)
    return unsealed(raw, data, str(path), mend)


def write_device_file(bundle: Bundle, name: str, data: Mapping[str, Any], lost: str) -> Path:
    """Writes ``data`` sealed, whole or not at all; never into another bundle that was put in this one's place.

    Raises OutputError, which says that ``lost`` was not saved, or BundleCorruptError.
    """
    bundle.require_unchanged(MANIFEST_NAME)
    path, raw = bundle.path / name, sealed_json(data)
    if len(raw) > MAX_JSON_BYTES:
        raise OutputError(
            f"{path}: would have {len(raw)} bytes, more than the {MAX_JSON_BYTES} that are read; {lost} was not saved, "
            "remove the file and make it again"
        )
    write_whole(path, lambda stream: stream.write(raw), lost)
    return path


def this_host() -> MeasuredHost:
    """The identity of the host that this process runs on."""
    facts = probe_host()
    cpu = " ".join(facts.cpu.split())[:_MAX_NAME_LENGTH]
    return MeasuredHost(cpu, facts.architecture, facts.cores, facts.backends.get(ONNXRUNTIME.name))


@dataclass(frozen=True)
class DeviceRecord(ABC):
    """Content of the file ``name`` of the bundle with this manifest.

    ``mend`` says what to do about one that cannot be read, ``lost`` what is not saved where it cannot be written.
    """

    name: ClassVar[str]
    mend: ClassVar[str]
    lost: ClassVar[str]

    schema_version: int
    manifest_sha256: str

    @classmethod
    def made_for(cls: type[D], bundle: Bundle, *content: Any) -> D:
        """One of ``bundle`` with the other fields' ``content``."""
        return cls(DEVICE_SCHEMA_VERSION, bundle.build.manifest_sha256, *content)

    @classmethod
    def read(cls: type[D], bundle: Bundle) -> D | None:
        """The one in the bundle's folder, or None where there is no such file.

        Raises BundleFormatError for what is malformed, BundleCorruptError for a wrong seal or one of another manifest.
        """
        data, where = read_device_file(bundle, cls.name, cls.mend), str(bundle.path / cls.name)
        if data is None:
            return None
        record = structure(cls, data, where, lambda problem: BundleFormatError(f"{problem}; {cls.mend}"))
        if record.manifest_sha256 != bundle.build.manifest_sha256:
            raise BundleCorruptError(f"{where}: belongs to another manifest than this bundle's; {cls.mend}")
        for problem in record.problems(bundle):
            raise BundleFormatError(f"{where}: {problem}; {cls.mend}")
        return record

    def write(self, bundle: Bundle, lost: str | None = None) -> Path:
        """Puts this into the bundle's folder, as ``write_device_file`` does; raises what that does."""
        return write_device_file(bundle, self.name, unstructure(self), lost or self.lost)

    @abstractmethod
    def problems(self, bundle: Bundle) -> Iterable[str]:
        """Checks beyond the types."""


D = TypeVar("D", bound=DeviceRecord)


@dataclass(frozen=True)
class HostRecord:
    """Findings of ``host`` with ``threads`` cores per run; ``created`` is the time in UTC."""

    host: MeasuredHost
    threads: int = field(metadata={"min": 1})
    created: str


R = TypeVar("R", bound=HostRecord)


@dataclass(frozen=True)
class HostRecords(DeviceRecord, Generic[R]):
    """A record for each host and number of threads."""

    hosts: tuple[R, ...]

    @classmethod
    def save(cls, bundle: Bundle, new: R) -> Path:
        """Puts ``new`` in the place of an earlier record of its host and threads, beside those of others.

        Raises OutputError where it cannot be written, or there are too many hosts; BundleError where what is there
        cannot be read.
        """
        with alone(bundle.path):
            kept = cls.read(bundle)
            others = [one for one in kept.hosts if (one.host, one.threads) != (new.host, new.threads)] if kept else []
            if len(others) >= _MAX_HOSTS:
                raise OutputError(
                    f"{bundle.path / cls.name}: holds the records of {len(others)} hosts, the most allowed; remove it, "
                    "or give this host a copy of the bundle"
                )
            hosts = tuple(sorted([*others, new], key=lambda one: (str(one.host), one.threads)))
            return cls.made_for(bundle, hosts).write(bundle)

    def of(self, host: MeasuredHost, threads: int) -> R | None:
        """The record of ``host`` with this number of threads, or the nearest to it; None where it has none."""
        own = [one for one in self.hosts if one.host == host]
        return min(own, key=lambda one: (abs(one.threads - threads), one.threads), default=None)

    @staticmethod
    @abstractmethod
    def record_problems(record: R, bundle: Bundle) -> Iterator[str]:
        """Checks of one record beyond its types."""

    def problems(self, bundle: Bundle) -> Iterator[str]:
        if len(self.hosts) > _MAX_HOSTS:
            yield f"{len(self.hosts)} hosts, expected at most {_MAX_HOSTS}"
        if len({(one.host, one.threads) for one in self.hosts}) < len(self.hosts):
            yield "a host with its number of threads stands twice"
        for number, one in enumerate(self.hosts):
            host = one.host
            names = (host.cpu, host.architecture, one.created, host.onnxruntime or "", host.others or "")
            if any(len(name) > _MAX_NAME_LENGTH for name in names):
                yield f"hosts[{number}]: a name of more than {_MAX_NAME_LENGTH} characters"
            for problem in self.record_problems(one, bundle):
                yield f"hosts[{number}]: {problem}"
