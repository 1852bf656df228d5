"""T5's own modules: relative positions looked up, and what generates of it, with the keys and values that it keeps.

T5 is an encoder that makes the decoder's keys and values of a text, and a decoder that keeps its own. Shapes: ``B``
rows, ``S`` new tokens, ``A`` heads of size ``D``, ``N`` tokens that the encoder read.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ..checkpoints.config import offline_transformers
from ..modules.attention import hidden_beyond
from ..modules.cached_attention import Cache, CachePlaces, cache_places, cached_attention, caches_of, tokens_so_far
from ..modules.layers import View


def look_up_distances(stack: Any) -> None:
    """Makes one side of a T5 look its relative positions up, in a table of what its class's own function returns.

    Between two buckets the logarithm of a position is a whole number, which its last bit decides: an engine's logarithm
    may have another.
    """
    attention = stack.block[0].layer[0].SelfAttention
    farthest = attention.relative_attention_max_distance
    table: torch.Tensor = attention._relative_position_bucket(
        torch.arange(-farthest, farthest + 1),
        bidirectional=not attention.is_decoder,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=farthest,
    )

    def bucket_of(relative_position: torch.Tensor, **_how: Any) -> torch.Tensor:
        """Buckets of ``relative_position``, both int64 of any shape; all that are farther share the last ones."""
        return table[relative_position.clamp(-farthest, farthest) + farthest]

    # In the place of the class's own function, which a submodule of this name would not hide.
    attention.__dict__["_relative_position_bucket"] = bucket_of


def mend(module: Any, stacks: Collection[str], tied: bool) -> None:
    """Looks relative positions of all ``stacks`` up, and unties a head that equals the table, which transformers has
    tied, of a model that is not."""
    for stack in stacks:
        look_up_distances(module.get_submodule(stack))
    if "decoder" in stacks and not tied and module.lm_head.weight is module.shared.weight:
        module.lm_head.weight = torch.nn.Parameter(module.shared.weight.detach().clone(), requires_grad=False)


class T5Encoder(View):
    """T5 ``model`` up to what the decoder reads of a text, with the interface of ``EncoderEntry``."""

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``input_ids`` [1, N] to keys [1, A, D, N] and values [1, A, N, D] of each layer of the decoder in turn."""
        return source_keys(self.model.decoder, self.model.encoder(input_ids=input_ids).last_hidden_state)


class CachedT5(View):
    """The decoder of a T5 ``model`` with the interface of ``GenerationEntry``; to be traced."""

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


class RecordedT5(View):
    """One pass of a T5 ``model`` over whole texts, as transformers makes it."""

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
