"""A causal language model as engines that generate: new tokens in, keys and values kept by the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from ..bucket import Bucket
from ..bundle.entries.engine_entry import RoutingEntry
from ..bundle.entries.generation_entry import (
    CACHED,
    ENCODER,
    PROMPT_TOKENS,
    CachedLayer,
    EncoderEntry,
    GenerationEntry,
    window_of,
)
from ..elastic import Submodel
from ..workload import Op
from .parts import Part

if TYPE_CHECKING:  # plans are made without torch
    import torch

# Rows that continue together at most, and new tokens of one row.
MOST_ROWS = 64
MOST_NEW_TOKENS = 512
# Of a head's size, for the operator that reads the cache.
SIZE_MULTIPLE = 8


class KeptAxes(NamedTuple):
    """The elastic axes by which the heads that a layer keeps shrink, and by which the numbers of each do; None where
    they do not."""

    heads: str | None = None
    size: str | None = None

    def of(self, layer: CachedLayer, submodel: Submodel) -> CachedLayer:
        """Cache of ``layer`` in ``submodel``."""
        heads = layer.heads if self.heads is None else submodel[self.heads]
        return replace(layer, heads=heads, size=layer.size if self.size is None else submodel[self.size])


@dataclass(frozen=True, eq=False)
class EncoderForm:
    """How an encoder-decoder reads a prompt of up to ``positions`` tokens; its decoder begins with ``start``.

    ``module(module)`` is what ``Architecture.load`` returned with the interface of ``EncoderEntry``; ``workload`` is
    what that costs, ``step`` what one new token of the decoder does. ``axes`` and ``routes(submodel)`` as of ``Part``;
    of a prompt that is shorter than the longest, routes are filled with -1. ``kept`` are the axes by which what each
    layer of the decoder reads of a prompt shrinks, if it does; ``layers`` is that where the caches have something else.
    """

    start: int
    positions: int
    module: Callable[[torch.nn.Module], torch.nn.Module]
    workload: Callable[[Submodel, Bucket], Sequence[Op]]
    step: Callable[[Submodel], Sequence[Op]]
    axes: tuple[str, ...] = ()
    routes: Callable[[Submodel], tuple[RoutingEntry, ...]] = lambda _: ()
    kept: tuple[KeptAxes, ...] = ()
    layers: tuple[CachedLayer, ...] | None = None

    @property
    def bucket(self) -> Bucket:
        """Inputs of its engines: one prompt."""
        return Bucket(1, self.positions, None, 1)

    @property
    def entry(self) -> EncoderEntry:
        """Its interface as the manifest has it, without engines."""
        return EncoderEntry(self.start, self.positions, (), self.layers)


@dataclass(frozen=True, eq=False)
class CachedForm:
    """How a family's model generates; ``layers`` are the ones that have keys and values of their own, in order.

    ``module(module)`` is what ``Architecture.load`` returned with the interface of ``GenerationEntry``; it is traced
    and never run. ``recorded(module)`` takes ``input_ids`` ``[B, S]`` and makes the model's own pass over all of them;
    it returns ``logits`` ``[B, S, vocabulary]`` and, per layer, the keys and values that attention had
    (``[B, heads, S, size]``), of a layer with a window those of the last tokens that it sees. Behind an ``encoder`` it
    also takes the tokens that that reads, ``[B, N]``. ``variants`` are those of ``Architecture.variants`` in which
    ``module`` and that of the encoder are traced, of a model that reads folded tensors; ``recorded`` and the encoder's
    take a module in those too. ``kept`` are the elastic axes by which what each of ``layers`` keeps shrinks, if it
    does.
    """

    vocabulary: int
    positions: int
    layers: tuple[CachedLayer, ...]
    module: Callable[[torch.nn.Module], torch.nn.Module]
    recorded: Callable[[torch.nn.Module], torch.nn.Module]
    family_problem: str | None = None
    encoder: EncoderForm | None = None
    variants: Mapping[str, str] = field(default_factory=dict)
    kept: tuple[KeptAxes, ...] = ()

    def at(self, submodel: Submodel) -> CachedForm:
        """This with the heads of ``submodel``, and their sizes."""
        encoder = self.encoder
        if encoder is not None and (encoder.kept or self.kept):
            encoder = replace(encoder, layers=_narrowed(self.entry.source_layers, encoder.kept, submodel))
        return replace(self, layers=_narrowed(self.layers, self.kept, submodel), encoder=encoder)

    def within(self, capacity: int) -> CachedForm:
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
        return Bucket(MOST_ROWS, min(MOST_NEW_TOKENS, self.positions), 1, 1)

    @property
    def entry(self) -> GenerationEntry:
        """Its interface as the manifest has it, without engines."""
        encoder = None if self.encoder is None else self.encoder.entry
        return GenerationEntry(self.vocabulary, self.layers, self.positions, (), (), encoder=encoder)

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
            elastic=dict(self._elastic()),
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
                elastic=dict(_elastic_source(encoder.kept)),
            )

    def _elastic(self) -> Iterator[tuple[str, Mapping[int, str]]]:
        """``Part.elastic`` of engines that keep a cache."""
        for number, axes in enumerate(self.kept):
            dims = _dims((1, axes.heads), (3, axes.size))
            for name in ("past_key", "past_value", "present_key", "present_value"):
                yield f"{name}_{number}", dims
        if self.encoder is not None:
            yield from _elastic_source(self.encoder.kept)


def _narrowed(layers: Sequence[CachedLayer], kept: Sequence[KeptAxes], submodel: Submodel) -> tuple[CachedLayer, ...]:
    """Caches of ``layers`` in ``submodel``."""
    if not kept:
        return tuple(layers)
    return tuple(axes.of(layer, submodel) for layer, axes in zip(layers, kept, strict=True))


def _elastic_source(kept: Sequence[KeptAxes]) -> Iterator[tuple[str, Mapping[int, str]]]:
    """``Part.elastic`` of what a decoder reads of a prompt: keys have their size in front of tokens."""
    for number, axes in enumerate(kept):
        yield f"source_key_{number}", _dims((1, axes.heads), (2, axes.size))
        yield f"source_value_{number}", _dims((1, axes.heads), (3, axes.size))


def _dims(*axes: tuple[int, str | None]) -> Mapping[int, str]:
    return {dim: axis for dim, axis in axes if axis is not None}
