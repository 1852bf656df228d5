"""A causal language model as engines that generate: new tokens in, keys and values kept by the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..elastic import Bucket, Submodel
from ..runtime.bundle.entries.engine_entry import RoutingEntry
from ..runtime.bundle.entries.generation_entry import (
    CACHED,
    ENCODER,
    PROMPT_TOKENS,
    CachedLayer,
    EncoderEntry,
    GenerationEntry,
    window_of,
)
from ..workload import Op
from .part import Part

if TYPE_CHECKING:  # plans are made without torch
    import torch

# Rows that continue together at most, and new tokens of one row.
MOST_ROWS = 64
MOST_NEW_TOKENS = 512
# Of a head's size, for the operator that reads the cache.
_SIZE_MULTIPLE = 8


@dataclass(frozen=True, eq=False)
class EncoderForm:
    """How an encoder-decoder reads a prompt of up to ``positions`` tokens; its decoder begins with ``start``.

    ``module(module)`` is what ``Architecture.load`` returned with the interface of ``EncoderEntry``; ``workload`` is
    what that costs, ``step`` what one new token of the decoder does. ``axes`` and ``routes(submodel)`` as of ``Part``;
    of a prompt that is shorter than the longest, routes are filled with -1.
    """

    start: int
    positions: int
    module: Callable[[torch.nn.Module], torch.nn.Module]
    workload: Callable[[Submodel, Bucket], Sequence[Op]]
    step: Callable[[Submodel], Sequence[Op]]
    axes: tuple[str, ...] = ()
    routes: Callable[[Submodel], tuple[RoutingEntry, ...]] = lambda _: ()

    @property
    def bucket(self) -> Bucket:
        """What its engines take: one prompt."""
        return Bucket(1, self.positions, None, 1)

    @property
    def entry(self) -> EncoderEntry:
        """Its interface as the manifest has it, without engines."""
        return EncoderEntry(self.start, self.positions, ())


@dataclass(frozen=True, eq=False)
class CachedForm:
    """How a family's model generates; ``layers`` are the ones that have keys and values of their own, in order.

    ``module(module)`` is what ``Architecture.load`` returned with the interface of ``GenerationEntry``; it is traced
    and never run. ``recorded(module)`` takes ``input_ids`` ``[B, S]`` and makes the model's own pass over all of them;
    it returns ``logits`` ``[B, S, vocabulary]`` and, per layer, the keys and values that attention had
    (``[B, heads, S, size]``), of a layer with a window those of the last tokens that it sees. Behind an ``encoder`` it
    also takes the tokens that that reads, ``[B, N]``. ``variants`` are those of ``Architecture.variants`` in which
    ``module`` and that of the encoder are traced, of a model that reads folded tensors; ``recorded`` and the encoder's
    take a module in those too. ``head_axes`` are the elastic axes by which the heads of ``layers`` shrink, of a model
    whose heads do.
    """

    vocabulary: int
    positions: int
    layers: tuple[CachedLayer, ...]
    module: Callable[[torch.nn.Module], torch.nn.Module]
    recorded: Callable[[torch.nn.Module], torch.nn.Module]
    family_problem: str | None = None
    encoder: EncoderForm | None = None
    variants: Mapping[str, str] = field(default_factory=dict)
    head_axes: tuple[str, ...] = ()

    def at(self, submodel: Submodel) -> CachedForm:
        """This with the heads of ``submodel``."""
        if not self.head_axes:
            return self
        kept = (submodel[axis] for axis in self.head_axes)
        return replace(self, layers=tuple(replace(layer, heads=n) for layer, n in zip(self.layers, kept, strict=True)))

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
        sizes = sorted({layer.size for layer in self.layers if layer.size % _SIZE_MULTIPLE})
        if self.family_problem is None and sizes:
            return f"heads of size {sizes[0]}; expected a multiple of {_SIZE_MULTIPLE}"
        return self.family_problem

    @property
    def bucket(self) -> Bucket:
        """What its engines take: rows of one new token, or one row of several."""
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
            )
