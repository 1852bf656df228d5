"""Elastic axes and submodels: words that every part of nestforge shares (no torch here).

An *axis* is one dimension of the universal model that may shrink. It is always a prefix: value ``n`` keeps the first
``n`` steps (neurons, heads). A *submodel* gives every axis a value.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby, islice, repeat

from .bucket import Bucket
from .errors import PlanError

# The axis that counts the layers which run, of models that can answer after some of them.
DEPTH = "depth"
# Layers of a submodel, and a number to which its embedding may be cut.
Pairs = tuple[tuple[int, int], ...]
# The axis of the sequence that a submodel takes, of models that are another function at each.
SEQUENCE = "sequence"
# The id of the one submodel that a model without axes has.
_ID_WITHOUT_AXES = "universal"
_LAYER_AXIS = re.compile(r"(?:(?:encoder|decoder)\.)?layers\.(\d{1,9})\.(.+)", re.ASCII)
_LAYER_PARAMETER = re.compile(r"(?:.+\.)??(layers?\.\d+)\.")
# Behind a digit a dot can be no part of a kind: ``ffn32.int8-dynamic`` beside ``moe.experts8``.
_ID_PRECISION = re.compile(rf"(?P<values>.*\d|{_ID_WITHOUT_AXES})\.(?P<precision>[a-z][a-z0-9-]*)", re.ASCII)
_ID_PART = re.compile(r"(?P<kind>[a-z][a-z_.]*)(?P<runs>\d{1,9}(?:x\d{1,9})?(?:_\d{1,9}(?:x\d{1,9})?)*)", re.ASCII)


@dataclass(frozen=True)
class Axis:
    """One elastic dimension, such as ``layers.3.ffn`` (1536 neurons) or ``layers.3.heads`` (12 heads); of a model with
    two sides ``encoder.layers.3.ffn`` or ``decoder.layers.3.ffn``, which are of one kind.

    ``choices`` are the only values of an axis that changes the graph itself, such as ``depth``, where a model has
    exits; they rise to ``size``, or fall to it where a larger value keeps less, such as a reduction. Every other axis
    takes each value of ``1..size``. Its layer runs in submodels of ``min_depth`` layers or more, where those are not
    simply the first.
    """

    name: str
    size: int
    choices: tuple[int, ...] | None = None
    min_depth: int | None = None

    @property
    def kind(self) -> str:
        """``ffn`` for ``layers.3.ffn``; the whole name where there is no layer."""
        match = _LAYER_AXIS.fullmatch(self.name)
        return match[2] if match else self.name

    @property
    def layer(self) -> int | None:
        match = _LAYER_AXIS.fullmatch(self.name)
        return int(match[1]) if match else None

    def runs_at(self, depth: int | None) -> bool:
        """Whether its layer is among those of a submodel of so many layers, None where that has all."""
        layer = self.layer
        return depth is None or layer is None or depth >= (layer + 1 if self.min_depth is None else self.min_depth)

    @property
    def falls(self) -> bool:
        """Whether a larger value keeps less."""
        return self.choices is not None and self.choices[:1] > (self.size,)

    def share(self, value: float) -> float:
        """How much of the whole ``value`` keeps: 1 at ``size``."""
        return self.size / value if self.falls else value / self.size

    def at(self, share: float) -> float:
        """The value that would keep ``share`` of the whole, not rounded to one that the axis takes."""
        return self.size / share if self.falls else share * self.size


@dataclass(frozen=True)
class PrefixSlice:
    """Dimension ``dim`` of ``parameter`` shrinks with ``axis``: value ``n`` keeps its first ``n * unit`` elements."""

    parameter: str
    dim: int
    axis: str
    unit: int = 1


@dataclass(frozen=True)
class Order:
    """Steps that are ranked, and permuted, together: those of ``axis``, or of one layer where layers are independent.

    ``slices`` shrink with the axis. ``followers`` have the same steps and keep them all: ``unit`` elements of dimension
    ``dim`` each, like those of a slice.
    """

    name: str
    axis: Axis
    slices: tuple[PrefixSlice, ...]
    followers: tuple[PrefixSlice, ...] = ()


@dataclass(frozen=True)
class Submodel:
    """One point: a value for every axis, in the axes' order, and the ``precision`` of its engines, by name.

    Axes of layers behind its depth have their full size, so that one function has one id. None is the highest precision
    of a bundle, which goes unsaid, so that no id follows from how many there are.
    """

    values: tuple[tuple[Axis, int], ...]
    precision: str | None = None

    def __getitem__(self, axis_name: str) -> int:
        return self._by_name[axis_name]

    @property
    def depth(self) -> int | None:
        """How many layers run, or None where every submodel has all of them."""
        return self._by_name.get(DEPTH)

    def at(self, bucket: Bucket) -> Bucket:
        """The bucket that this submodel has in the place of ``bucket``: as long as its own sequence, if it has one."""
        own = self._by_name.get(SEQUENCE)
        return bucket if own is None else Bucket(bucket.batch, own, bucket.min_batch)

    @cached_property
    def _by_name(self) -> dict[str, int]:
        return {axis.name: value for axis, value in self.values}

    @cached_property
    def id(self) -> str:
        """Readable, stable and parseable: ``ffn768x4_1536x2-heads6x4_12x2``; ``ffn1536-heads12`` where uniform,
        ``ffn1536-heads12.int8`` in another precision, and ``universal`` of a model without axes."""
        parts = []
        for kind in dict.fromkeys(axis.kind for axis, _ in self.values):
            runs = [(v, len(list(g))) for v, g in groupby(v for axis, v in self.values if axis.kind == kind)]
            parts.append(kind + (str(runs[0][0]) if len(runs) == 1 else "_".join(f"{v}x{n}" for v, n in runs)))
        values = "-".join(parts) or _ID_WITHOUT_AXES
        return values if self.precision is None else f"{values}.{self.precision}"

    @property
    def is_universal(self) -> bool:
        return self.precision is None and all(value == axis.size for axis, value in self.values)

    @property
    def deepest(self) -> Submodel:
        """The submodel of these widths that has every layer."""
        values = ((axis, axis.size if axis.name == DEPTH else value) for axis, value in self.values)
        return replace(self, values=tuple(values))

    @property
    def has_all_widths(self) -> bool:
        """Whether nothing but layers tells it from the universal model."""
        return self.deepest.is_universal

    @property
    def structure(self) -> tuple[tuple[str, int], ...]:
        """The values that change the traced graph itself: submodels alike in them differ in extents, and precision."""
        return tuple((axis.name, value) for axis, value in self.values if axis.choices)

    def by_kind(self) -> dict[str, list[int]]:
        """``{"ffn": [768, 768, 1536], "heads": [6, 6, 12]}``: values per kind, in layer order."""
        table: dict[str, list[int]] = {}
        for axis, value in self.values:
            table.setdefault(axis.kind, []).append(value)
        return table


@dataclass(frozen=True)
class ElasticSpec:
    """Axes of one universal model, and which parameters shrink with it.

    ``depth`` is the number of layers that an answer passes through, for tolerances. ``widths`` are the axis kinds
    counted in neurons, which levels round to the hardware's multiple; other kinds are cut in whole steps, or to a
    multiple of the kind's own in ``multiples``.
    ``min_depth`` maps a parameter to the least depth of a submodel that has it; every submodel has those left out.
    ``granularities`` are the levels that training sampled, by axis kind as fractions of the size, rising to 1; None
    where they are not known. ``jointly_normalised`` names the axes whose steps are measured against each other, by a
    mean over them: there a step that is cut is not a step of zeros. ``order_followers`` are parameters that follow an
    axis's order and keep every step, such as the scores of experts. ``per_layer_order`` names axes of the whole model
    whose steps in one layer have nothing to do with those in another, so that each layer has its own order. ``folded``
    are tensors that some engines read in place of parameters, made of those, to how they shrink, None where they do
    not; they are neither counted nor ranked. ``precisions`` are those that submodels may have, the highest first; none
    where there is no choice.
    """

    axes: tuple[Axis, ...]
    slices: tuple[PrefixSlice, ...]
    trained_nested: bool = False
    depth: int = 1
    widths: frozenset[str] = frozenset({"ffn"})
    min_depth: Mapping[str, int] = field(default_factory=dict, hash=False)
    granularities: Mapping[str, tuple[float, ...]] | None = field(default=None, hash=False)
    jointly_normalised: frozenset[str] = frozenset()
    order_followers: tuple[PrefixSlice, ...] = ()
    per_layer_order: frozenset[str] = frozenset()
    folded: Mapping[str, PrefixSlice | None] = field(default_factory=dict, hash=False)
    multiples: Mapping[str, int] = field(default_factory=dict, hash=False)
    precisions: tuple[str, ...] = ()

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(axis.kind for axis in self.axes))

    @property
    def prefix_axes(self) -> tuple[Axis, ...]:
        """The axes along which submodels differ in extents alone; axes with choices change the graph."""
        return tuple(axis for axis in self.axes if axis.choices is None)

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        """Everything that may be permuted without changing the function, in the order of the axes."""
        found: list[Order] = []
        for axis in self.axes:
            slices, followers = (
                [cut for cut in cuts if cut.axis == axis.name] for cuts in (self.slices, self.order_followers)
            )
            if axis.name not in self.per_layer_order:
                found += [Order(axis.name, axis, tuple(slices), tuple(followers))] if slices else []
                continue
            for layer in dict.fromkeys(_layer_of(cut.parameter) for cut in slices):
                own = tuple(cut for cut in slices if _layer_of(cut.parameter) == layer)
                beside = tuple(cut for cut in followers if _layer_of(cut.parameter) == layer)
                found.append(Order(f"{layer}.{axis.name}" if layer else axis.name, axis, own, beside))
        return tuple(found)

    def whole_along(self, axes: Collection[str]) -> ElasticSpec:
        """This for submodels that all have the full size of ``axes``: nothing is cut or ordered along those."""
        return replace(
            self,
            slices=tuple(cut for cut in self.slices if cut.axis not in axes),
            order_followers=tuple(cut for cut in self.order_followers if cut.axis not in axes),
            folded={name: None if cut is not None and cut.axis in axes else cut for name, cut in self.folded.items()},
        )

    def universal(self) -> Submodel:
        return Submodel(tuple((axis, axis.size) for axis in self.axes))

    def submodel(self, values: Mapping[str, int]) -> Submodel:
        """The submodel with these axis values; axes left out keep their full size.

        Raises PlanError for an unknown axis, and for a value that an axis does not take.
        """
        unknown = values.keys() - {axis.name for axis in self.axes}
        if unknown:
            raise PlanError(f"unknown axis {sorted(unknown)[0]!r}: this model has {', '.join(self.kinds)} per layer")
        for axis in self.axes:
            value = values.get(axis.name, axis.size)
            if axis.choices is not None and value not in axis.choices:
                raise PlanError(f"axis {axis.name}: expected one of {', '.join(map(str, axis.choices))}, got {value}")
            if axis.choices is None and not 1 <= value <= axis.size:
                raise PlanError(f"axis {axis.name}: expected 1..{axis.size}, got {value}")
        return canonical((axis, values.get(axis.name, axis.size)) for axis in self.axes)

    def from_kinds(self, table: Mapping[str, Iterable[int]]) -> Submodel:
        """The submodel with these values per kind, one per layer: the inverse of ``Submodel.by_kind``."""
        values: dict[str, int] = {}
        for kind, widths in table.items():
            axes = [axis for axis in self.axes if axis.kind == kind]
            if not axes:
                raise PlanError(f"unknown axis kind {kind!r}: this model has {', '.join(self.kinds) or 'none'}")
            widths = list(islice(widths, len(axes) + 1))  # an id may name billions
            if len(widths) == 1:
                widths *= len(axes)
            if len(widths) != len(axes):
                got = len(widths) if len(widths) < len(axes) else "more"
                raise PlanError(f"axis kind {kind}: expected {len(axes)} values, one per layer, got {got}")
            values.update({axis.name: width for axis, width in zip(axes, widths, strict=True)})
        return self.submodel(values)

    def parse(self, submodel_id: str) -> Submodel:
        """The submodel that ``submodel_id`` names; kinds left out keep their full size, and a precision left out is the
        highest."""
        if match := _ID_PRECISION.fullmatch(submodel_id):
            precision = self.named_precision(submodel_id, match["precision"])
            return replace(self._parse_values(match["values"]), precision=precision)
        return self._parse_values(submodel_id)

    def named_precision(self, submodel_id: str, precision: str) -> str | None:
        """The ``precision`` that ``submodel_id`` ends in, None for the highest. Raises PlanError for one that there is
        not."""
        if precision not in self.precisions:
            expected = f"one of {', '.join(self.precisions)}" if self.precisions else "an id that names none"
            raise PlanError(f"submodel {submodel_id[:80]!r}: unknown precision {precision[:80]!r}; expected {expected}")
        return None if precision == self.precisions[0] else precision

    def _parse_values(self, submodel_id: str) -> Submodel:
        table: dict[str, Iterable[int]] = {}
        if submodel_id == _ID_WITHOUT_AXES and not self.axes:
            return self.universal()
        for part in submodel_id.split("-"):
            match = _ID_PART.fullmatch(part)
            if not match or match["kind"] in table:
                raise PlanError(
                    f"submodel {submodel_id[:80]!r}: cannot read {part[:80]!r}; expected ids like {self.universal().id}"
                )
            runs = [run.partition("x") for run in match["runs"].split("_")]
            table[match["kind"]] = chain.from_iterable(repeat(int(value), int(n or 1)) for value, _, n in runs)
        return self.from_kinds(table)

    def has(self, parameter: str, submodel: Submodel) -> bool:
        """Whether ``submodel`` is deep enough to have ``parameter``."""
        return submodel.depth is None or self.min_depth.get(parameter, 0) <= submodel.depth

    def shape_of(self, parameter: str, full_shape: tuple[int, ...], submodel: Submodel) -> tuple[int, ...]:
        """Shape of ``parameter`` in ``submodel``, given its shape in the universal model."""
        shape = list(full_shape)
        for cut in self.slices_of(parameter):
            shape[cut.dim] = submodel[cut.axis] * cut.unit
        return tuple(shape)

    @property
    def stored_slices(self) -> tuple[PrefixSlice, ...]:
        """The slices of everything that the weight store may have: parameters, and tensors made of them."""
        return (*self.slices, *(cut for cut in self.folded.values() if cut is not None))

    def slices_of(self, parameter: str) -> tuple[PrefixSlice, ...]:
        return self._by_parameter.get(parameter, ())

    @cached_property
    def _by_parameter(self) -> dict[str, tuple[PrefixSlice, ...]]:
        table: dict[str, tuple[PrefixSlice, ...]] = {}
        for cut in self.stored_slices:
            table[cut.parameter] = (*table.get(cut.parameter, ()), cut)
        return table


def _layer_of(parameter: str) -> str:
    """``layers.3`` for ``layers.3.moe.router.weight``; empty where a parameter lies in no layer."""
    match = _LAYER_PARAMETER.match(parameter)
    return match[1] if match else ""


def canonical(values: Iterable[tuple[Axis, int]]) -> Submodel:
    """The submodel with these values, those of layers behind its depth at full size."""
    values = tuple(values)
    depth = next((value for axis, value in values if axis.name == DEPTH), None)
    if depth is None:
        return Submodel(values)
    return Submodel(tuple((axis, value if axis.runs_at(depth) else axis.size) for axis, value in values))
