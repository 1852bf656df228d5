"""Models of transformers as they generate with a KV cache, and as they show the keys and values that they keep.

Classes of decoders call attention by a name in their configuration, with queries and keys already turned to their
positions. T5 is an encoder that makes the decoder's keys and values of a text, and a decoder that keeps its own.

Shapes: ``B`` rows, ``S`` new tokens, ``A`` heads of size ``D``, ``N`` tokens that an encoder read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...bundle.entries.generation_entry import CachedLayer, window_of
from ..checkpoints.config import offline_transformers
from ..modules.attention import hidden_beyond
from ..modules.cached_attention import (
    Cache,
    CachePlaces,
    cache_places,
    cached_attention,
    caches_of,
    places_in_window,
    reading_attention,
    tokens_so_far,
)

_NAME = "nestforge"
# Attention of every layer while a pass lasts, by query, key, value and the keywords of its class.
_attending: list[Callable[..., torch.Tensor]] = []


class CachedDecoder(torch.nn.Module):
    """``model``, a class with a head over the vocabulary, with the interface of ``GenerationEntry``; to be traced.
    ``layers`` are those that have keys and values of their own."""

    def __init__(self, model: Any, layers: Sequence[CachedLayer]) -> None:
        super().__init__()
        self.model, self.layers = model, layers

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_at: torch.Tensor, *kept: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """``kept``: where layers have a window the places of new tokens in their buffers, and the cache."""
        in_text = in_window = cache_places(position_ids)
        if window_of(self.layers) is not None:
            in_window, kept = places_in_window(kept[0], input_ids.shape[1]), kept[1:]
        given = caches_of(kept)
        present: list[tuple[torch.Tensor, Cache, CachePlaces]] = []  # keys of new tokens, the cache with them, at

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
            bent = (how["scaling"], how.get("softcap"), how.get("sliding_window"))
            for own, cache, places in present:
                if own is key:  # those of an earlier layer, which has written them
                    return reading_attention(query, cache, places, *bent)
            number = len(present)
            places = in_text if self.layers[number].window is None else in_window
            found, after = cached_attention(query, Cache(key, value), given[number], places, *bent)
            present.append((key, after, places))
            return found

        with _attention(self.model, attend):
            answer = self.model(input_ids=input_ids, position_ids=position_ids, logits_to_keep=logits_at)
        return (answer.logits, *(tensor for _, cache, _ in present for tensor in cache))


class RecordedDecoder(torch.nn.Module):
    """One pass of ``model`` over whole texts, as transformers makes it; ``layers`` as of CachedDecoder."""

    def __init__(self, model: Any, layers: Sequence[CachedLayer]) -> None:
        super().__init__()
        self.model, self.layers = model, layers

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``input_ids`` [B, S] to logits [B, S, V], and keys and values [B, heads, S, size] of each layer that has its
        own; of one with a window those of the last tokens that it sees."""
        cache = offline_transformers().DynamicCache()  # without a configuration: every layer keeps every token
        answer = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True)
        kept = [
            tensor if own.window is None else tensor[:, :, -own.window :]
            for own, layer in zip(self.layers, cache.layers, strict=True)
            for tensor in (layer.keys, layer.values)
        ]
        return (answer.logits, *kept)


@contextmanager
def _attention(model: Any, attend: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Within it attention of every layer of ``model`` is ``attend``, and no mask is made."""
    offline_transformers().AttentionInterface.register(_NAME, _attend)
    config, own = model.config, model.config._attn_implementation
    config._attn_implementation = _NAME
    _attending.append(attend)
    try:
        yield
    finally:
        _attending.pop()
        config._attn_implementation = own


def _attend(
    _module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **how: Any
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls: ``[B, A, S, D]`` and ``[B, K, S, D]`` to ``[B, S, A, D]``."""
    return _attending[-1](query, key, value, how), None


class T5Encoder(torch.nn.Module):
    """T5 ``model`` up to what the decoder reads of a text, with the interface of ``EncoderEntry``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``input_ids`` [1, N] to keys [1, A, D, N] and values [1, A, N, D] of each layer of the decoder in turn."""
        return source_keys(self.model.decoder, self.model.encoder(input_ids=input_ids).last_hidden_state)


class CachedT5(torch.nn.Module):
    """The decoder of a T5 ``model`` with the interface of ``GenerationEntry``; to be traced."""

    def __init__(self, model: Any) -> None:
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
        model, words = self.model, self.model.decoder.embed_tokens(input_ids)
        hidden, present = cached_pass(model.decoder, words, position_ids, logits_at, source_lengths, kept)
        if model.config.scale_decoder_outputs:
            hidden = hidden * model.model_dim**-0.5
        return (model.lm_head(hidden), *present)


class RecordedT5(torch.nn.Module):
    """One pass of a T5 ``model`` over whole texts, as transformers makes it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, source_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The decoder's ``input_ids`` [B, S] behind ``source_ids`` [B, N] to logits [B, S, V], and per layer the keys
        and values [B, A, S, D] of these tokens."""
        cache = empty_cache()
        answer = self.model(input_ids=source_ids, decoder_input_ids=input_ids, past_key_values=cache, use_cache=True)
        return (answer.logits, *own_keys(cache))


def empty_cache() -> Any:
    """A cache of transformers for a pass of a decoder behind an encoder."""
    transformers = offline_transformers()
    return transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())


def own_keys(cache: Any) -> tuple[torch.Tensor, ...]:
    """The decoder's own tokens in ``cache`` behind a pass: per layer keys and values [B, A, S, D]."""
    return tuple(tensor for layer in cache.self_attention_cache.layers for tensor in (layer.keys, layer.values))


def source_keys(decoder: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Keys and values that the layers of ``decoder`` make of an encoder's answer [1, N, H], as ``T5Encoder`` has it."""
    found: list[torch.Tensor] = []
    for block in decoder.block:
        cross = block.layer[1].EncDecAttention
        found += [_heads(cross, cross.k(hidden)).transpose(2, 3), _heads(cross, cross.v(hidden))]
    return tuple(found)


def cached_pass(
    decoder: Any,
    hidden: torch.Tensor,
    position_ids: torch.Tensor,
    logits_at: torch.Tensor,
    source_lengths: torch.Tensor,
    kept: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The layers of ``decoder`` over the ``hidden`` vectors [B, S, H] of new tokens: the last states of those that
    ``logits_at`` asks for, and the cache after them. The other arguments are those of ``GenerationEntry``."""
    layers, present = len(decoder.block), list[torch.Tensor]()
    sources, past = kept[: 2 * layers], caches_of(kept[2 * layers :])
    places = cache_places(position_ids)
    bias = _position_bias(decoder.block[0].layer[0].SelfAttention, position_ids, places)
    beyond = hidden_beyond(source_lengths, sources[0].shape[3])
    for number, block in enumerate(decoder.block):
        own, cross, ffn = block.layer
        found, after = _own_attention(own.SelfAttention, own.layer_norm(hidden), past[number], places, bias)
        present += [*after]
        hidden = hidden + found
        keys, values = sources[2 * number : 2 * number + 2]
        query = _heads(cross.EncDecAttention, cross.EncDecAttention.q(cross.layer_norm(hidden)))
        seen = torch.softmax(torch.matmul(query, keys) + beyond, dim=-1)
        hidden = hidden + cross.EncDecAttention.o(torch.matmul(seen, values).transpose(1, 2).flatten(2))
        hidden = ffn(hidden)
    return decoder.final_layer_norm(hidden[:, logits_at]), present


def _heads(attention: Any, x: torch.Tensor) -> torch.Tensor:
    """``[B, S, A * D]`` as ``[B, A, S, D]``."""
    return x.view(*x.shape[:2], attention.n_heads, attention.key_value_proj_dim).transpose(1, 2)


def _own_attention(
    attention: Any, hidden: torch.Tensor, past: Cache, places: CachePlaces, bias: torch.Tensor
) -> tuple[torch.Tensor, Cache]:
    query, key, value = (_heads(attention, part(hidden)) for part in (attention.q, attention.k, attention.v))
    found, after = cached_attention(query, Cache(key, value), past, places, attention.scaling, bias=bias)
    return attention.o(found.flatten(2)), after


def _position_bias(attention: Any, position_ids: torch.Tensor, places: CachePlaces) -> torch.Tensor:
    """Addend of every score for the distance of its tokens: [B, A, S, T], T the tokens of the longest row."""
    distance = tokens_so_far(places) - position_ids[:, :, None]  # [B, S, T]
    buckets = attention._relative_position_bucket(
        distance,
        bidirectional=False,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    bias: torch.Tensor = attention.relative_attention_bias(buckets).permute(0, 3, 1, 2)
    return bias
