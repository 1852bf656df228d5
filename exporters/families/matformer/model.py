"""MatLM and MatViT: nested language and vision models, of whose layers any first neurons and heads are a layer.

MatLM is a decoder; positions, biases and norm weights as configured. MatViT has a [CLS] token, learned positions and
biases everywhere. Both are pre-norm. Shapes: ``B`` rows or images, ``S`` tokens (of an image its ``P`` patches and
one), ``H`` hidden, ``A`` heads of size ``D``, ``V`` vocabulary, ``K`` classes, ``C`` channels, and ``T`` tokens that a
cache holds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.own_folder import with_weights
from ...hugging_face.tensors import RELATIVE_BUCKETS, RELATIVE_REACH, distance_bucket
from ...modules.attention import Attend, CachePlaces, NestedAttention, Positions, causal_mask, rotary, tokens_so_far
from ...modules.layers import Answering, Ffn, View, VocabularyHead, draw_weights
from .config import MatformerConfig, MatformerVitConfig, NestedConfig


class MatformerLM(torch.nn.Module):
    """Token ids to the logits of the next token, at every position.

    Weights are drawn as GPT-2's are (normal, 0.02; what closes a residual branch divided by ``sqrt(2 L)``; biases 0,
    norms 1).
    """

    def __init__(self, config: MatformerConfig) -> None:
        super().__init__()
        self.config = config
        size, has_weights = config.hidden_size, config.norm_weights
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, size)
        relative = config.position == "relative_bias"
        self.layers = torch.nn.ModuleList(
            Layer(config, width, _LANGUAGE_EPS, config.bias, has_weights, relative) for width in config.widths
        )
        self.norm = torch.nn.LayerNorm(size, _LANGUAGE_EPS, elementwise_affine=has_weights)
        self.lm_head = VocabularyHead(size, config.vocab_size, config.tie_word_embeddings, config.bias)
        draw_weights(self, (2 * config.num_hidden_layers) ** -0.5)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``input_ids`` [B, S] int64 to logits [B, S, V]. Position ``t`` sees positions ``0..t``."""
        hidden = self.embed_tokens(input_ids)  # [B, S, H]
        places = places_of(self.config, input_ids.shape[1], hidden)
        for layer in self.layers:
            hidden = layer(hidden, places)
        return self.logits(hidden)

    def begun(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, new: CachePlaces
    ) -> tuple[torch.Tensor, Places]:
        """For ``CachedLM``: the states of ``input_ids`` [B, S] at ``position_ids``, and their places behind
        those before ``new``."""
        if self.config.position == "rotary":
            places = Places(turn=rotary(position_ids[:, None], self.config.head_dim))
        else:
            places = Places(buckets=buckets_between(position_ids, tokens_so_far(new)))
        return self.embed_tokens(input_ids), places

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Last states [B, S, H] to logits [B, S, V]."""
        return self.lm_head(self.norm(hidden), self.embed_tokens.weight)


# Epsilons of LayerNorms: torch's own, and that of the vision transformers that MatViT follows.
_LANGUAGE_EPS, _VISION_EPS = 1e-5, 1e-6


class MatformerViT(torch.nn.Module):
    """Pixels to the logits of the classes and the embedding of the image.

    Linear weights are drawn as MatLM's are, the patch projection by its fan-in.
    """

    def __init__(self, config: MatformerVitConfig) -> None:
        super().__init__()
        self.config = config
        hidden, patch = config.hidden_size, config.patch_size
        self.patch = torch.nn.Conv2d(config.num_channels, hidden, patch, stride=patch)
        self.cls_token = torch.nn.Parameter(torch.zeros(1, 1, hidden))
        self.position_embedding = torch.nn.Parameter(torch.zeros(1, config.patches + 1, hidden))
        self.layers = torch.nn.ModuleList(Layer(config, width, _VISION_EPS) for width in config.widths)
        self.norm = torch.nn.LayerNorm(hidden, _VISION_EPS)
        self.head = torch.nn.Linear(hidden, config.num_labels)
        draw_weights(self, (2 * config.num_hidden_layers) ** -0.5, kept=("patch.weight",))

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``pixel_values`` [B, C, height, width] float32 to logits [B, K] and the [CLS] state after the final norm
        [B, H]."""
        patches = self.patch(pixel_values).flatten(2).transpose(1, 2)  # [B, P, H]
        tokens = torch.cat((self.cls_token.expand(patches.shape[0], -1, -1), patches), dim=1)  # [B, S, H]
        hidden = tokens + self.position_embedding
        for layer in self.layers:
            hidden = layer(hidden, Places())
        embedding = self.norm(hidden[:, 0])
        return self.head(embedding), embedding


class Layer(torch.nn.Module):
    """Attention and FFN, each on the normalised state and added to it."""

    def __init__(
        self,
        config: NestedConfig,
        width: int,
        epsilon: float,
        bias: bool = True,
        has_norm_weights: bool = True,
        has_relative_bias: bool = False,
    ) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_attention_heads
        self.relative_bias = RelativeBias(heads) if has_relative_bias else None
        self.attention_norm = torch.nn.LayerNorm(size, epsilon, elementwise_affine=has_norm_weights)
        self.attention = NestedAttention(size, heads, config.head_dim, bias)
        self.ffn_norm = torch.nn.LayerNorm(size, epsilon, elementwise_affine=has_norm_weights)
        self.ffn = Ffn(size, width, config.activation, bias)

    def forward(self, hidden: torch.Tensor, places: Places, attend: Attend | None = None) -> torch.Tensor:
        """``hidden`` [B, S, H] to [B, S, H]."""
        mask = places.mask
        if self.relative_bias is not None:
            bias = self.relative_bias(places.buckets)  # [A, S, S]
            mask = bias if mask is None else mask + bias
        hidden = hidden + self.attention(self.attention_norm(hidden), mask, places.turn, attend)
        return hidden + self.ffn(self.ffn_norm(hidden))


class Places(NamedTuple):
    """Places as attention of every layer sees them: ``mask`` [S, S] to add to scores; ``turn`` of queries and keys
    by rotary positions; ``buckets`` [S, S] of a relative bias."""

    mask: torch.Tensor | None = None
    turn: Positions | None = None
    buckets: torch.Tensor | None = None


def places_of(config: MatformerConfig, length: int, like: torch.Tensor) -> Places:
    """The places of ``length`` tokens, on the device and in the dtype of ``like``."""
    mask = causal_mask(length, like)
    if config.position == "rotary":
        return Places(mask, rotary(torch.arange(length, device=like.device), config.head_dim))
    return Places(mask, buckets=distance_buckets(length, like.device))


class RelativeBias(torch.nn.Module):
    """Relative position biases as in T5, for a causal model: ``weight`` [A, 32], one learned number per head and bucket
    of distances, so that the first heads are a prefix.

    Keys nearer than half the buckets have one each; further ones share buckets that grow with the logarithm of the
    distance, and from ``RELATIVE_REACH`` tokens on all share the last.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(heads, RELATIVE_BUCKETS))

    def forward(self, buckets: torch.Tensor) -> torch.Tensor:
        """``buckets`` int64 of any shape, such as [S, S], to what each head adds to its scores, [A, S, S]."""
        chosen = self.weight.index_select(1, buckets.flatten())  # [A, S * S]
        return chosen.view(-1, *buckets.shape)


def distance_buckets(length: int, device: torch.device) -> torch.Tensor:
    """Bucket of every query and key, ``[S, S]`` int64; keys behind their query, which it does not see, are in 0."""
    place = torch.arange(length, device=device)
    return buckets_between(place, place)


def buckets_between(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Bucket of each of ``queries``, places [..., S] int64, and each of ``keys`` [T], ``[..., S, T]`` int64."""
    distance = (queries[..., None] - keys).clamp(min=0, max=RELATIVE_REACH)
    buckets = [distance_bucket(step, RELATIVE_BUCKETS, RELATIVE_REACH) for step in range(RELATIVE_REACH + 1)]
    by_distance = torch.tensor(buckets, device=keys.device)
    return by_distance.index_select(0, distance.flatten()).view(distance.shape)


class OneInput(Answering):
    """``Answering`` of one input, which graphs call ``inputs``."""

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return super().forward(inputs)


class RecordedLM(View):
    """One pass of ``model``, a MatformerLM, over whole texts."""

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``input_ids`` [B, S] to logits [B, S, V], and per layer keys and values [B, A, S, D]."""
        model, kept = self.model, list[torch.Tensor]()
        hidden = model.embed_tokens(input_ids)
        places = places_of(model.config, input_ids.shape[1], hidden)

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
        ) -> torch.Tensor:
            kept.extend((key, value))
            return functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)

        for layer in model.layers:
            hidden = layer(hidden, places, attend=attend)
        return (model.logits(hidden), *kept)


def answering(checkpoint: Checkpoint, config: NestedConfig) -> OneInput:
    """The model in ``checkpoint`` as families hand it over."""
    if isinstance(config, MatformerVitConfig):
        return OneInput(with_weights(lambda: MatformerViT(config), checkpoint))
    assert isinstance(config, MatformerConfig)
    return OneInput(with_weights(lambda: MatformerLM(config), checkpoint))
