"""Parts of a model that get engines of their own: the layers between two exits, or a decoder with a KV cache.

A language model generates by engines that take new tokens and keep no state: keys and values are the caller's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ..bucket import Bucket
from ..bundle.entries.engine_entry import ExitsEntry, RoutingEntry
from ..bundle.entries.generation_entry import (
    CACHED,
    ENCODER,
    PROMPT_TOKENS,
    CachedLayer,
    EncoderEntry,
    GenerationEntry,
    window_of,
)
from ..bundle.entries.tensor_spec import TensorSpec
from ..elastic import DEPTH, Submodel
from ..errors import PlanError
from ..workload import Op

if TYPE_CHECKING:  # plans are made without torch
    import torch


# Rows that continue together at most, and new tokens of one row.
MOST_ROWS = 64
MOST_NEW_TOKENS = 512
# A divisor of a head's size, for the operator that reads the cache.
SIZE_MULTIPLE = 8


@dataclass(frozen=True, eq=False)
class Part:
    """``name`` is what engines of it have as their ``segment``; submodels of less than ``min_depth`` layers lack it.
    Its engines have ``bucket`` in the place of the profile's, if that is stated.

    ``module(module)`` is the part of what ``Architecture.load`` returned, perhaps narrowed, on its weights: ``forward``
    takes the ``inputs`` by position and returns the ``outputs`` as a tuple; the user's module is attribute ``model``.
    Where the model is traced in ``variants`` of ``Architecture.variants``, it is given in those for that. ``axes`` with
    choices are those that change its graph; ``routes(submodel)`` are what it returns after its outputs once it is
    traced. ``elastic`` says by which axes dimensions of its inputs and outputs shrink, by their names, and ``depths``
    which of them submodels of fewer layers lack.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    workload: Callable[[Submodel, Bucket], Sequence[Op]]
    module: Callable[[torch.nn.Module], torch.nn.Module]
    min_depth: int = 0
    bucket: Bucket | None = None
    variants: Mapping[str, str] = field(default_factory=dict)
    axes: tuple[str, ...] = ()
    routes: Callable[[Submodel], tuple[RoutingEntry, ...]] = lambda _: ()
    elastic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    depths: Mapping[str, int] = field(default_factory=dict)

    def structure(self, submodel: Submodel) -> tuple[tuple[str, int], ...]:
        """The part of ``submodel``'s structure that changes its graph."""
        return tuple((axis, value) for axis, value in submodel.structure if axis in self.axes)

    def of(self, submodel: Submodel) -> Part:
        """This with inputs and outputs as ``submodel`` has them."""

        def cut(spec: TensorSpec) -> TensorSpec:
            axes = self.elastic.get(spec.name, {})
            return replace(spec, dims=tuple(submodel[axes[at]] if at in axes else n for at, n in enumerate(spec.dims)))

        def own(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
            least, depth = self.depths, submodel.depth
            return tuple(cut(spec) for spec in specs if depth is None or least.get(spec.name, 0) <= depth)

        return replace(self, inputs=own(self.inputs), outputs=own(self.outputs))

    def at(self, bucket: Bucket) -> Bucket:
        """The bucket that its engines have in the place of ``bucket``."""
        return self.bucket or bucket


class Exits(ABC):
    """The exits of one model and the segments between them. ``entry`` and ``workload`` must work without torch."""

    @abstractmethod
    def cut_at(self, layers: tuple[int, ...]) -> Exits:
        """The same model cut at the exits after ``layers`` alone, at least two of them, rising to its last."""

    @property
    @abstractmethod
    def entry(self) -> ExitsEntry:
        """Names, shapes and layers of every segment, as the manifest records them."""

    @abstractmethod
    def workload(self, submodel: Submodel, bucket: Bucket, segment: int) -> list[Op]:
        """The operations of one pass through segment number ``segment``."""

    @abstractmethod
    def segment(self, module: torch.nn.Module, segment: int) -> torch.nn.Module:
        """Segment number ``segment`` of ``module`` on its weights; that is what ``Architecture.load`` returned, perhaps
        narrowed.

        ``forward`` takes the segment's inputs by position and returns its outputs as a tuple; the user's module is
        attribute ``model``, as in ``Architecture.load``.
        """

    @property
    def parts(self) -> tuple[Part, ...]:
        """The segments, each by itself."""
        return tuple(
            Part(
                entry.name,
                entry.inputs,
                entry.outputs,
                partial(self.workload, segment=number),
                partial(self.segment, segment=number),
                entry.layer,
            )
            for number, entry in enumerate(self.entry.segments)
        )

    @abstractmethod
    def every_exit(self, module: torch.nn.Module) -> torch.nn.Module:
        """``module`` with the outputs of all its segments, in order: one uncut pass, which a chain must equal."""


def chosen_exits(exits: Sequence[int], wanted: Sequence[int] | None) -> tuple[int, ...]:
    """The exits to cut at: ``wanted`` and always the last one; without ``wanted`` all.

    Raises PlanError for a layer without an exit.
    """
    if wanted is None:
        return tuple(exits)
    for layer in wanted:
        if layer not in exits:
            raise PlanError(f"exits: this model has no exit after layer {layer}; it has {', '.join(map(str, exits))}")
    return tuple(sorted({*wanted, exits[-1]}))


class CacheAxes(NamedTuple):
    """The elastic axes by which the heads that a layer keeps shrink, and by which the numbers of each do; None where
    they do not."""

    heads: str | None = None
    size: str | None = None

    def of(self, layer: CachedLayer, submodel: Submodel) -> CachedLayer:
        """Cache of ``layer`` in ``submodel``."""
        heads = layer.heads if self.heads is None else submodel[self.heads]
        return replace(layer, heads=heads, size=layer.size if self.size is None else submodel[self.size])


@dataclass(frozen=True, eq=False)
class EncoderSpec:
    """How an encoder-decoder reads a prompt of up to ``positions`` tokens; its decoder begins with ``start``.

    ``module(module)`` is what ``Architecture.load`` returned with the interface of ``EncoderEntry``; ``workload`` is
    what that costs, ``step`` what one new token of the decoder does. ``axes`` and ``routes(submodel)`` as of ``Part``;
    of a prompt that is shorter than the longest, routes are filled with -1. ``cache_axes`` are the axes by which what
    each layer of the decoder reads of a prompt shrinks, if it does; ``layers`` is that where the caches have something
    else. A prompt that is an array is a row of ``input``, of which the decoder reads ``positions`` places;
    ``begin_ids`` as of ``EncoderEntry``.
    """

    start: int
    positions: int
    module: Callable[[torch.nn.Module], torch.nn.Module]
    workload: Callable[[Submodel, Bucket], Sequence[Op]]
    step: Callable[[Submodel], Sequence[Op]]
    axes: tuple[str, ...] = ()
    routes: Callable[[Submodel], tuple[RoutingEntry, ...]] = lambda _: ()
    cache_axes: tuple[CacheAxes, ...] = ()
    layers: tuple[CachedLayer, ...] | None = None
    input: TensorSpec | None = None
    begin_ids: tuple[int, ...] | None = None

    @property
    def bucket(self) -> Bucket:
        """Inputs of its engines: one prompt."""
        return Bucket(1, self.positions, None, None if self.input else 1)

    @property
    def entry(self) -> EncoderEntry:
        """Its interface as the manifest has it, without engines."""
        return EncoderEntry(self.start, self.positions, (), self.layers, input=self.input, begin_ids=self.begin_ids)


@dataclass(frozen=True, eq=False)
class CachedSpec:
    """How a family's model generates; ``layers`` are the ones that have keys and values of their own, in order.

    ``module(module)`` is what ``Architecture.load`` returned with the interface of ``GenerationEntry``; it is traced
    and never run. ``recorded(module)`` takes ``input_ids`` ``[B, S]`` and makes the model's own pass over all of them;
    it returns ``logits`` ``[B, S, vocabulary]`` and, per layer, the keys and values that attention had
    (``[B, heads, S, size]``), of a layer with a window those of the last tokens that it sees. Behind an ``encoder`` it
    also takes the tokens that that reads, ``[B, N]``. ``variants`` are those of ``Architecture.variants`` in which
    ``module`` and that of the encoder are traced, of a model that reads folded tensors; ``recorded`` and the encoder's
    take a module in those too. ``cache_axes`` are the elastic axes by which what each of ``layers`` keeps shrinks, if
    it does. ``states`` are the shapes of recurrent states of a row, which ``recorded`` returns last: engines then take
    one new token of a row. ``is_buffered``: attention is the model's own, over whole buffers that ONNX Runtime writes
    into in place. ``depths`` are the least depths of submodels that have them, where some lack some, which ``module``
    and ``recorded`` may be given where it ``takes_depth``.
    """

    vocabulary: int
    positions: int
    layers: tuple[CachedLayer, ...]
    module: Callable[[torch.nn.Module], torch.nn.Module]
    recorded: Callable[[torch.nn.Module], torch.nn.Module]
    family_problem: str | None = None
    encoder: EncoderSpec | None = None
    variants: Mapping[str, str] = field(default_factory=dict)
    cache_axes: tuple[CacheAxes, ...] = ()
    is_buffered: bool = False
    takes_depth: bool = False
    depths: tuple[int, ...] = ()
    states: tuple[tuple[int, ...], ...] = ()

    def at(self, submodel: Submodel) -> CachedSpec:
        """This with the heads of ``submodel``, and their sizes."""
        encoder = self.encoder
        if encoder is not None and (encoder.cache_axes or self.cache_axes):
            encoder = replace(encoder, layers=_narrowed(self.entry.source_layers, encoder.cache_axes, submodel))
        layers = _narrowed(self.layers, self.cache_axes, submodel)
        if self.depths and submodel.depth is not None:
            every = zip(layers, self.depths, strict=True)
            layers = tuple(layer if least <= submodel.depth else replace(layer, heads=0) for layer, least in every)
        return replace(self, layers=layers, encoder=encoder)

    def within(self, capacity: int) -> CachedSpec:
        """This for texts of at most ``capacity`` tokens."""
        return replace(self, positions=min(capacity, self.positions))

    @property
    def window(self) -> int | None:
        """How many tokens those layers see that do not see all."""
        return window_of(self.layers)

    @property
    def problem(self) -> str | None:
        """Why no engine can be made of it, as the family or the operator that reads the cache has it, or None."""
        sizes = sorted({layer.size for layer in self.layers if layer.size % SIZE_MULTIPLE})
        if self.family_problem is None and sizes:
            return f"heads of size {sizes[0]}; expected a multiple of {SIZE_MULTIPLE}"
        return self.family_problem

    @property
    def bucket(self) -> Bucket:
        """Inputs of its engines: rows of one new token, or one row of several."""
        if self.states:
            return Bucket(MOST_ROWS, 1, 1)
        return Bucket(MOST_ROWS, min(MOST_NEW_TOKENS, self.positions), 1, 1)

    @property
    def entry(self) -> GenerationEntry:
        """Its interface as the manifest has it, without engines."""
        encoder = None if self.encoder is None else self.encoder.entry
        return GenerationEntry(
            self.vocabulary, self.layers, self.positions, (), (), encoder=encoder, states=self.states
        )

    def parts(self, workload: Callable[[Submodel, Bucket], Sequence[Op]]) -> Iterator[Part]:
        """The parts of a model that has ``workload``; figures are those of one new token, of an encoder those of a
        prompt."""
        encoder, entry = self.encoder, self.entry
        yield Part(
            CACHED,
            *entry.interface,
            lambda s, _: workload(s, Bucket(1, 1)) if encoder is None else encoder.step(s),
            self.module,
            bucket=self.bucket,
            variants=self.variants,
            axes=(DEPTH,),
            elastic=dict(self._elastic()),
            depths=dict(self._depths()),
        )
        if encoder is not None:
            prompt = Bucket(1, min(PROMPT_TOKENS, encoder.positions))
            yield Part(
                ENCODER,
                *entry.encoder_interface,
                lambda s, _: encoder.workload(s, prompt),
                encoder.module,
                bucket=encoder.bucket,
                variants=self.variants,
                axes=encoder.axes,
                routes=encoder.routes,
                elastic=dict(_elastic_source(encoder.cache_axes)),
            )

    def _depths(self) -> Iterator[tuple[str, int]]:
        """``Part.depths`` of KV-cache engines."""
        for number, least in enumerate(self.depths):
            for name in ("past_key", "past_value", "present_key", "present_value"):
                yield f"{name}_{number}", least

    def _elastic(self) -> Iterator[tuple[str, Mapping[int, str]]]:
        """``Part.elastic`` of KV-cache engines."""
        for number, axes in enumerate(self.cache_axes):
            dims = _dims((1, axes.heads), (3, axes.size))
            for name in ("past_key", "past_value", "present_key", "present_value"):
                yield f"{name}_{number}", dims
        if self.encoder is not None:
            yield from _elastic_source(self.encoder.cache_axes)


def _narrowed(
    layers: Sequence[CachedLayer], cache_axes: Sequence[CacheAxes], submodel: Submodel
) -> tuple[CachedLayer, ...]:
    """Caches of ``layers`` in ``submodel``."""
    if not cache_axes:
        return tuple(layers)
    return tuple(axes.of(layer, submodel) for layer, axes in zip(layers, cache_axes, strict=True))


def _elastic_source(cache_axes: Sequence[CacheAxes]) -> Iterator[tuple[str, Mapping[int, str]]]:
    """``Part.elastic`` of what a decoder reads of a prompt: keys have their size in front of tokens."""
    for number, axes in enumerate(cache_axes):
        yield f"source_key_{number}", _dims((1, axes.heads), (2, axes.size))
        yield f"source_value_{number}", _dims((1, axes.heads), (3, axes.size))


def _dims(*axes: tuple[int, str | None]) -> Mapping[int, str]:
    return {dim: axis for dim, axis in axes if axis is not None}
