"""Files with a record for each host: which is this host's, and how a new one is put beside those of others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from ...errors import OutputError
from ...profiles.probe_host import probe_host
from .sealed_file import DEVICE_SCHEMA_VERSION

_MAX_HOSTS = 64
_MAX_NAME_LENGTH = 200


@dataclass(frozen=True)
class MeasuredHost:
    """What must be the same for figures to hold: the processor, the cores that may be used, and ONNX Runtime; of plans
    also the ``gpu`` with its release of TensorRT."""

    cpu: str
    architecture: str
    cores: int = field(metadata={"min": 1})
    onnxruntime: str | None = None
    gpu: str | None = None

    def __str__(self) -> str:
        release = f", ONNX Runtime {self.onnxruntime}" if self.onnxruntime else ""
        return f"{self.cpu}, {self.cores} cores{release}{f', {self.gpu}' if self.gpu else ''}"


class HostRecord(Protocol):
    """What ``host`` found with ``threads`` cores per run; ``created`` is the time in UTC."""

    @property
    def host(self) -> MeasuredHost: ...
    @property
    def threads(self) -> int: ...
    @property
    def created(self) -> str: ...


R = TypeVar("R", bound=HostRecord)


def this_host() -> MeasuredHost:
    """The identity of the host that this process runs on."""
    facts = probe_host()
    cpu = " ".join(facts.cpu.split())[:_MAX_NAME_LENGTH]
    return MeasuredHost(cpu, facts.architecture, facts.cores, facts.backends.get("onnxruntime"))


def nearest_record(records: Iterable[R], host: MeasuredHost, threads: int) -> R | None:
    """The record of ``host`` with this number of threads, or the nearest to it; None where it has none."""
    own = [each for each in records if each.host == host]
    return min(own, key=lambda each: (abs(each.threads - threads), each.threads), default=None)


def with_record(records: Sequence[R], new: R, path: Path) -> tuple[R, ...]:
    """``records`` of the file at ``path`` with ``new`` in the place of an earlier one of its host and threads.

    Raises OutputError where there are too many hosts.
    """
    others = [each for each in records if (each.host, each.threads) != (new.host, new.threads)]
    if len(others) >= _MAX_HOSTS:
        raise OutputError(
            f"{path}: holds the records of {len(others)} hosts, the most allowed; remove it, or give this host a copy "
            "of the bundle"
        )
    return tuple(sorted([*others, new], key=lambda each: (str(each.host), each.threads)))


def record_problems(schema_version: int, records: Sequence[HostRecord]) -> Iterator[str]:
    """What the types alone do not say of such a file."""
    if schema_version != DEVICE_SCHEMA_VERSION:
        yield f"schema_version {schema_version}, expected {DEVICE_SCHEMA_VERSION}"
    if len(records) > _MAX_HOSTS:
        yield f"{len(records)} hosts, expected at most {_MAX_HOSTS}"
    if len({(each.host, each.threads) for each in records}) < len(records):
        yield "a host with its number of threads stands twice"
    for number, each in enumerate(records):
        host = each.host
        names = (host.cpu, host.architecture, each.created, host.onnxruntime or "", host.gpu or "")
        if any(len(name) > _MAX_NAME_LENGTH for name in names):
            yield f"hosts[{number}]: a name of more than {_MAX_NAME_LENGTH} characters"
