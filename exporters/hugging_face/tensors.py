"""Shapes of the parameters of usual layers, and which tensor of the weight files each is (no torch here).

Names are resolved as transformers does it. Files may hold the base model's names with its prefix or without, whatever
class ``config.json`` names: a classifier made from a bare encoder, an encoder read from a language model's folder. They
may also hold older names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from ...elastic import Axis, PrefixSlice
from ...errors import CheckpointError
from ..checkpoints.checkpoint import Checkpoint, compare_with_headers

Shape = tuple[int, ...]


# Parts of a name and their replacements, in this order.
Renamings = Sequence[tuple[str, str]]
# Names of TensorFlow's days; bert-base-uncased is still published so.
_LEGACY_RENAMINGS: Renamings = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))


class Parameters:
    """Every parameter of a module by its name there, in the module's order, and how the elastic ``axes`` slice them."""

    def __init__(self) -> None:
        self.shapes: dict[str, Shape] = {}
        self.axes: list[Axis] = []
        self.slices: list[PrefixSlice] = []

    def axis(self, name: str, size: int) -> str:
        """The name of an axis, which is added."""
        self.axes.append(Axis(name, size))
        return name

    def add(self, name: str, *shape: int, rows: str | None = None) -> None:
        """A parameter, of which the axis ``rows`` may slice the first dimension."""
        self.shapes[name] = shape
        if rows is not None:
            self.slices.append(PrefixSlice(name, 0, rows))

    def norm(self, name: str, width: int, bias: bool = True) -> None:
        """A LayerNorm, or without ``bias`` one that has a scale alone."""
        self.shapes |= {f"{name}.{part}": (width,) for part in (("weight", "bias") if bias else ("weight",))}

    def linear(
        self,
        name: str,
        inputs: int,
        outputs: int,
        bias: bool = True,
        rows: str | None = None,
        columns: str | None = None,
        unit: int = 1,
    ) -> None:
        """A linear layer; the axis ``rows`` slices what it makes, ``columns`` what it reads, ``unit`` to a step."""
        shapes: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
        if bias:
            shapes[f"{name}.bias"] = (outputs,)
        self.shapes |= shapes
        if rows is not None:
            self.slices += [PrefixSlice(parameter, 0, rows, unit) for parameter in shapes]
        if columns is not None:
            self.slices.append(PrefixSlice(f"{name}.weight", 1, columns, unit))


def held_tensors(
    checkpoint: Checkpoint,
    shapes: Mapping[str, Shape],
    prefix: str,
    unused: Callable[[str], object],
    renamed: Renamings = (),
) -> dict[str, str]:
    """``parameter_names`` of the files, which hold exactly the parameters of ``shapes``, where there are weights.

    Raises CheckpointError for a tensor that is missing, misfits, or has no place and is not ``unused`` (by its
    parameter's name).
    """
    names = parameter_names(checkpoint, shapes, prefix, renamed)
    if checkpoint.has_weights:
        compare_with_headers(checkpoint, shapes, names, unused)
    return names


def parameter_names(
    checkpoint: Checkpoint, parameters: Collection[str], prefix: str, renamed: Renamings = ()
) -> dict[str, str]:
    """Parameter to tensor, for every tensor of the files; those without a place keep their own name (renamed).

    ``parameters`` are the module's; ``prefix`` is the attribute under which its class keeps the base model.
    Raises CheckpointError where two tensors are the same parameter.
    """
    found: dict[str, str] = {}
    for name in checkpoint.tensors:
        parameter = _placed(_renamed(name, renamed), parameters, f"{prefix}.")
        if parameter in found:
            raise CheckpointError(
                f"{checkpoint.folder}: tensors {found[parameter]!r:.200} and {name!r:.200} are both parameter "
                f"{parameter}; keep one of them"
            )
        found[parameter] = name
    return found


def _renamed(name: str, renamed: Renamings) -> str:
    for old, new in (*_LEGACY_RENAMINGS, *renamed):
        name = name.replace(old, new)
    return name


def _placed(name: str, parameters: Collection[str], prefix: str) -> str:
    if name.startswith(prefix) and name.removeprefix(prefix) in parameters:
        return name.removeprefix(prefix)
    return f"{prefix}{name}" if f"{prefix}{name}" in parameters else name


# As in T5: the buckets of a relative bias, and the distance from which on all keys share the last of them.
RELATIVE_BUCKETS, RELATIVE_REACH = 32, 128
MOST_REACH = 65_536  # the largest distance in a table of buckets


def distance_bucket(distance: int, buckets: int, reach: int) -> int:
    """The bucket, of ``buckets``, of a key ``distance`` >= 0 tokens away; from ``reach`` on all share the last.

    Distances below half of ``buckets`` have one each.
    """
    exact = buckets // 2
    if distance < exact:
        return distance
    share = math.log(distance / exact) / math.log(reach / exact)
    return min(exact + int(share * (buckets - exact)), buckets - 1)
