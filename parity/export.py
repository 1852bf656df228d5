"""An export of any kind: its inputs and outputs, the precision that its file has, its answers, and where the
kind has them the values inside and the weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..profiles.precision import Precision
from ..runtime.inputs.arrays import Array, Arrays


@dataclass(frozen=True)
class Port:
    """An input or output as the export declares it; a dimension is its size, or a name where it is dynamic."""

    name: str
    dtype: str
    dims: tuple[int | str, ...] | None = None

    def __str__(self) -> str:
        shape = "?" if self.dims is None else ",".join(map(str, self.dims))
        return f"{self.name} {self.dtype}[{shape}]"


@dataclass(frozen=True)
class Value:
    """One intermediate value of an export: its name, the node and operator that made it, the module that the exporter
    left for that node (None without), and the value on one case."""

    name: str
    node: str
    operator: str
    module: str | None
    array: Array


class Export(ABC):
    """One graph that answers. ``folder``'s other graphs are exports of their own."""

    label: str
    kind: str
    inputs: Sequence[Port]
    outputs: Sequence[Port]
    precision: Precision = "fp32"
    files: tuple[Path, ...] = ()
    # Rows and length of the largest input that it says it takes.
    largest: tuple[int, int] | None = None
    # The submodel of a bundle that this is, beside the one that is the whole model.
    submodel: str | None = None

    def ready(self) -> None:  # noqa: B027  (most are, once opened)
        """Whatever comes before the first answer. Raises InputError for a graph that nothing runs."""

    def rest(self) -> None:  # noqa: B027  (most hold little)
        """Gives back what the next answer opens again."""

    @abstractmethod
    def run(self, feeds: Arrays) -> dict[str, Array]:
        """Outputs by name. Raises InputError with what the runtime said."""

    def values(self, feeds: Arrays, sizes: Collection[int]) -> Iterator[Value]:  # noqa: ARG002
        """Intermediate values of as many numbers as ``sizes`` say, in the order of the graph; none where the kind shows
        none."""
        return iter(())

    def weights(self, size: int) -> Iterator[Array]:  # noqa: ARG002
        """Constants of so many numbers, in float32; none where the kind shows none."""
        return iter(())

    def module_of(self, node: str) -> tuple[str | None, str]:  # noqa: ARG002
        """The module that the exporter left for a ``node``, and its operator."""
        return None, ""

    def close(self) -> None:  # noqa: B027  (most hold nothing that outlives them)
        """Gives back what it holds."""

    def port(self, name: str) -> Port | None:
        return next((port for port in self.inputs if port.name == name), None)


def module_in(name: str) -> str | None:
    """The module in a node's name, where it is a path (``/encoder/layer.0/attention/self/query/MatMul``)."""
    return ".".join(name.split("/")[1:-1]) or None if name.startswith("/") else None
