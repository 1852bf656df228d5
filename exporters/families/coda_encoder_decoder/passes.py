"""Passes of a conditional T5 as the compiler traces and compares them: over a pair of texts, over a prompt alone, over
one new token and the cache.

Shapes: ``B`` rows, ``N`` tokens that the encoder reads, ``S`` of the decoder, ``A`` heads of size ``D``.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional

from ..coda.model.answering import take_variants
from ..t5.generating import cached_pass, empty_cache, own_keys, source_keys
from .model import CodaEncoderDecoder

# Behind the routes of a prompt that is shorter than the longest.
NO_TOKEN = -1
# Of a prompt that is traced, where a reduction asks for no more.
_EXAMPLE_TOKENS = 7


class ReadingPass(torch.nn.Module):
    """A pass that begins with the encoder of ``model``. One that is traced ``returns_routes`` behind its outputs: the
    tokens that every conditional layer chose."""

    def __init__(self, model: CodaEncoderDecoder, returns_routes: bool = False) -> None:
        super().__init__()
        self.model, self.returns_routes = model, returns_routes

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``inputs`` by position to outputs, and perhaps routes."""
        source, found = self.model.encoder.routed(*self.read(inputs))
        outputs = self.behind(source, inputs)
        if not self.returns_routes or not self.model.config.encoder.has_scores:
            return outputs
        return (*outputs, *(self.route(found[layer].chosen) for layer in sorted(found)))

    @abstractmethod
    def read(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What of ``inputs`` the encoder reads: ids and mask [B, N]."""

    @abstractmethod
    def behind(self, source: torch.Tensor, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs, given what the encoder made of its text, ``source`` [B, N, d]."""

    def route(self, chosen: torch.Tensor) -> torch.Tensor:
        """The ``chosen`` tokens [B, k] as an engine returns them."""
        return chosen


class Answering(ReadingPass):
    """Ids, mask and the decoder's ids to the logits of every position: what families hand over."""

    def read(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        return inputs[0], inputs[1]

    def behind(self, source: torch.Tensor, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return (self.model.written(source, *inputs[1:]),)


class SourceEncoder(ReadingPass):
    """``input_ids`` [1, N] to keys [1, A, D, N] and values [1, A, N, D] of each layer of the decoder in turn, with the
    interface of ``EncoderEntry``."""

    @property
    def example_tokens(self) -> int:
        """Of a prompt that it is traced with: so many that a layer computes more than one, for torch.export takes a
        number that is 1 there to be always 1."""
        return max(_EXAMPLE_TOKENS, int(self.model.encoder.reduction) + 1)

    def read(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        return inputs[0], None

    def behind(self, source: torch.Tensor, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:  # noqa: ARG002
        return source_keys(self.model.decoder, source)

    def route(self, chosen: torch.Tensor) -> torch.Tensor:
        """[1, k] filled up to the k of the longest prompt, so that an engine for any length returns one shape."""
        most = max(self.model.encoder.counts(self.model.config.encoder.most_tokens).values())
        return functional.pad(chosen, (0, most - chosen.shape[1]), value=NO_TOKEN)


class RecordedPass(ReadingPass):
    """The decoder's ``input_ids`` [B, S] behind ``source_ids`` [B, N] to logits [B, S, V], and per layer the keys and
    values [B, A, S, D] of these tokens."""

    def read(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        return inputs[1], None

    def behind(self, source: torch.Tensor, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        cache = empty_cache()
        logits = self.model.written(source, None, inputs[0], cache)
        return (logits, *own_keys(cache))


class CachedDecoder(torch.nn.Module):
    """The decoder of ``model`` with the interface of ``GenerationEntry``; to be traced."""

    def __init__(self, model: CodaEncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_at: torch.Tensor,
        source_lengths: torch.Tensor,
        *kept: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        words = self.model.words(input_ids)
        hidden, present = cached_pass(self.model.decoder, words, position_ids, logits_at, source_lengths, kept)
        return (self.model.logits(hidden), *present)


def lower(module: Answering, variants: Mapping[str, str]) -> Answering:
    """A copy of ``module`` on the same weights as a graph has it, in the encoder's ``variants``."""
    shared: dict[int, object] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    model = copy.deepcopy(module.model, shared)
    take_variants(model.encoder, variants)
    return Answering(model, returns_routes=True)
