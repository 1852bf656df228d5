"""An export of any kind: its inputs and outputs, the precision that its file has, its answers, and where the
kind has them the values inside and the weights; and which input and output of it is which of the model: by ``--map``,
by name, then by shape and dtype; said."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
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


# Names that exporters and toolkits give to the same output.
_SAME = (
    ("last_hidden_state", "hidden_states", "token_embeddings", "encoder_outputs"),
    ("sentence_embedding", "embeddings", "embedding", "pooled"),
    ("logits", "output", "scores", "lm_logits"),
    ("pooler_output", "pooled_output"),
)
# Usual inputs by their kind of numbers and rank.
_RANKS = {"input_ids": ("int", 2), "pixel_values": ("float", 4), "inputs": ("int", 2), "x": ("float", None)}
PAST = re.compile(r"(?:past|cache)")


@dataclass(frozen=True)
class Match:
    """``name`` of the export is ``model`` of the model, and ``how`` that was found."""

    name: str
    model: str
    how: str


def require_names(exports: Sequence[Export], given: Mapping[str, str]) -> None:
    """Raises InputError unless every name in ``given`` is an input or output of one of ``exports``."""
    names = {port.name: None for export in exports for port in (*export.inputs, *export.outputs)}
    for name in given:
        if name not in names:
            raise InputError(f"`map={{'{name}': '{given[name]}'}}`: the export has {', '.join(names)}")


def match_inputs(export: Export, names: Sequence[str], given: Mapping[str, str]) -> list[Match]:
    """Every input of ``export`` but those of a cache. Raises InputError where one matches nothing."""
    found: list[Match] = []
    for port in export.inputs:
        if PAST.search(port.name) and port.name not in names:
            continue
        free = [name for name in names if name not in {match.model for match in found}]
        match = _stated(port.name, names, given) or _by_name(port.name, names) or _only_one(port, free, export)
        if match is None:
            raise InputError(
                f"{export.label}: input {port} matches no input of the model; the model takes {', '.join(names)}; say "
                f"which with `map={{'{port.name}': 'NAME'}}`"
            )
        found.append(match)
    return found


def match_outputs(
    export: Export, answered: Arrays, expected: Arrays, given: Mapping[str, str]
) -> tuple[list[Match], list[str]]:
    """Outputs of ``export`` and those of the model, by what both ``answered`` on one case; and the export's outputs
    that are compared with nothing. Raises InputError where nothing matches."""
    found: list[Match] = []
    pairings: Sequence[Callable[[str, Sequence[str]], Match | None]] = (
        lambda name, free: _stated(name, free, given),
        _by_name,
        _by_meaning,
        lambda name, free: _by_shape(name, answered[name], free, expected),
    )
    for pairing in pairings:
        for name in [name for name in answered if name not in {match.name for match in found}]:
            free = [each for each in expected if each not in {match.model for match in found}]
            found += [match] if (match := pairing(name, free)) else []
    if not found:
        theirs, ours = (
            ", ".join(f"{name} {list(array.shape)}" for name, array in list(side.items())[:8])
            for side in (answered, expected)
        )
        raise InputError(
            f"{export.label}: no output matches one of the model: it gives {theirs}; the model gives {ours}; say "
            "which with `map={'a': 'b'}`, or give the model that was exported"
        )
    order = list(answered)
    found.sort(key=lambda match: order.index(match.name))
    return found, [name for name in answered if name not in {match.name for match in found}]


def _stated(name: str, names: Sequence[str], given: Mapping[str, str]) -> Match | None:
    if name in given and given[name] not in names:
        raise InputError(f"`map={{'{name}': '{given[name]}'}}`: the model has {', '.join(names)}")
    return Match(name, given[name], "as stated") if name in given else None


def _by_name(name: str, names: Sequence[str]) -> Match | None:
    if name in names:
        return Match(name, name, "by name")
    plain = {_plain(each): each for each in names}
    return Match(name, plain[_plain(name)], "by name, spelled otherwise") if _plain(name) in plain else None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _by_meaning(name: str, names: Sequence[str]) -> Match | None:
    others = (other for same in _SAME if name in same for other in same if other in names)
    return next((Match(name, other, "by meaning of the name") for other in others), None)


def _only_one(port: Port, free: Sequence[str], export: Export) -> Match | None:
    """An input of an unknown name, where one input of the model is left that has its kind of numbers and rank."""
    kind = "float" if port.dtype.startswith("float") else "int"
    rank = len(port.dims) if port.dims is not None else None
    is_alone = all(each is port or each.dtype != port.dtype for each in export.inputs)
    for name, (wanted, size) in _RANKS.items() if is_alone else ():
        if name in free and wanted == kind and (size is None or rank in (None, size)):
            return Match(port.name, name, "by shape and dtype")
    return Match(port.name, free[0], "the only one left") if len(free) == len(export.inputs) == 1 else None


def _by_shape(name: str, array: Array, free: Sequence[str], expected: Arrays) -> Match | None:
    same = [each for each in free if expected[each].shape == array.shape]
    if not same and len(free) == len(expected) == 1 and array.shape[-1:] == expected[free[0]].shape[-1:]:
        return Match(name, free[0], "the only one, of the same width")  # whose length may be frozen
    how = "by shape" if len(same) == 1 else f"by shape, the first of {', '.join(same)}"
    return Match(name, same[0], how) if same else None
