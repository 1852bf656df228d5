"""Models with the configured attention: an encoder of BERT's shape, a decoder of GPT-2's, a translation model of both;
and decoders as they generate, and as they show the keys and values that a cache has of them.

The last model is the Transformer of Vaswani et al. (2017), figure 1, with learned positions and GELU. Shapes: ``B``
rows, ``S`` tokens (of a translation model those of the text that is written, ``N`` those of the one that is read),
``H`` hidden, ``V`` vocabulary, ``K`` heads of size ``d`` in a cache: one where the normal form holds, in which heads
share keys and values.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.own_folder import with_weights
from ...modules.attention import (
    Attend,
    CachePlaces,
    Positions,
    additive_mask,
    cache_places,
    caches_of,
    causal_mask,
    hidden_beyond,
    over_cache,
    rotary,
)
from ...modules.layers import (
    Answering,
    Embeddings,
    Ffn,
    MaskedLmHead,
    View,
    VocabularyHead,
    draw_weights,
    on_same_weights,
)
from .attention import Attention, KeysAndValues, in_form
from .config import Layout, MheConfig, MheDecoderConfig, MheEncoderConfig, MheEncoderDecoderConfig
from .forms import cached_form, places_of

# Epsilon of every LayerNorm of an encoder, as in BERT; and of other models, as in GPT-2 and in PyTorch's own
# Transformer.
_ENCODER_EPS, _EPS = 1e-12, 1e-5


class MheEncoder(torch.nn.Module):
    """Token ids to the outputs of the configured head.

    none: last hidden state [B, S, H]. masked_lm: logits [B, S, V]. classifier: logits [B, labels].
    """

    def __init__(self, config: MheEncoderConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.embeddings = Embeddings(config.vocab_size, hidden, config.places, epsilon=_ENCODER_EPS)
        self.layers = torch.nn.ModuleList(
            Layer(config, norm_first=False, epsilon=_ENCODER_EPS) for _ in range(config.num_hidden_layers)
        )
        self.head = (
            MaskedLmHead(hidden, hidden, config.vocab_size, _ENCODER_EPS, "gelu")
            if config.head == "masked_lm"
            else None
        )
        self.pooler = torch.nn.Linear(hidden, hidden) if config.num_labels else None
        self.classifier = torch.nn.Linear(hidden, config.num_labels) if config.num_labels else None
        draw_weights(self, mean=_mean)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """``input_ids`` and ``attention_mask`` [B, S] int64, 1 where a token counts, to the head's output."""
        hidden: torch.Tensor = self.embeddings(input_ids)
        mask = padding_mask(attention_mask, hidden)
        turn = None
        if self.config.position == "rotary":
            turn = rotary(torch.arange(input_ids.shape[1], device=hidden.device), self.config.head_size)
        for layer in self.layers:
            hidden = layer(hidden, mask, turn)
        if self.head is not None:
            return self.head(hidden, self.embeddings.word.weight)
        if self.pooler is None or self.classifier is None:
            return hidden
        return self.classifier(torch.tanh(self.pooler(hidden[:, 0])))


class MheDecoder(torch.nn.Module):
    """Token ids to the logits of the next token, at every position."""

    def __init__(self, config: MheDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config.vocab_size, config.hidden_size, config.places)
        self.layers = torch.nn.ModuleList(
            Layer(config, norm_first=True, epsilon=_EPS) for _ in range(config.num_hidden_layers)
        )
        self.norm = torch.nn.LayerNorm(config.hidden_size, _EPS)
        self.lm_head = VocabularyHead(config.hidden_size, config.vocab_size, config.tie_word_embeddings)
        draw_weights(self, mean=_mean)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``input_ids`` [B, S] int64 to logits [B, S, V]. Position ``t`` sees positions ``0..t``."""
        hidden = self.embeddings(input_ids)
        mask = causal_mask(input_ids.shape[1], hidden)[None, None]  # [1, 1, S, S]
        turn = self.turn(torch.arange(input_ids.shape[1], device=hidden.device))
        for layer in self.layers:
            hidden = layer(hidden, mask, turn)
        return self.logits(hidden)

    def begun(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, _new: CachePlaces
    ) -> tuple[torch.Tensor, None, Positions | None]:
        """For ``CachedLM``: the states of ``input_ids`` [B, S] at ``position_ids``, no mask, and their
        turn."""
        return self.embeddings(input_ids, position_ids=position_ids), None, self.turn(position_ids[:, None])

    def turn(self, places: torch.Tensor) -> Positions | None:
        """Rotation of queries and keys [B, n, S, d] at ``places`` [S], or [B, 1, S], where positions are rotary."""
        return rotary(places, self.config.head_size) if self.config.position == "rotary" else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Last states [B, S, H] to logits [B, S, V]."""
        return self.lm_head(self.norm(hidden), self.embeddings.word.weight)


class MheEncoderDecoder(torch.nn.Module):
    """Two texts to the logits of the token behind each one of the second."""

    def __init__(self, config: MheEncoderDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config.vocab_size, config.hidden_size, config.places)
        self.encoder = Stack(lambda: Layer(config, norm_first=False, epsilon=_EPS), config.num_hidden_layers)
        self.decoder = Stack(lambda: ReadingLayer(config, _EPS), config.decoder_layers)
        self.lm_head = VocabularyHead(config.hidden_size, config.vocab_size, config.tie_word_embeddings)
        draw_weights(self, mean=_mean)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor
    ) -> torch.Tensor:
        """``input_ids`` and ``attention_mask`` [B, N] int64, 1 where a token counts, and ``decoder_input_ids`` [B, S]
        to logits [B, S, V]. Position ``t`` of the second text sees its positions ``0..t``."""
        hidden = self.embeddings(decoder_input_ids)
        source_mask = padding_mask(attention_mask, hidden)
        source = self.encode(input_ids, source_mask)
        mask = causal_mask(hidden.shape[1], hidden)[None, None]  # [1, 1, S, S]
        layer: Any
        for layer in self.decoder.layers:
            hidden = layer(hidden, mask, layer.cross_attention.keys_and_values(source), source_mask)
        return self.logits(hidden)

    def encode(self, input_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Encoder states of ``input_ids`` [B, N], whose ``mask`` [B, 1, 1, N] is added to scores: [B, N, H]."""
        hidden: torch.Tensor = self.embeddings(input_ids)
        for layer in self.encoder.layers:
            hidden = layer(hidden, mask)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Last states [B, S, H] to logits [B, S, V]."""
        return self.lm_head(hidden, self.embeddings.word.weight)


class Stack(torch.nn.Module):
    """The layers of one side."""

    def __init__(self, layer: Callable[[], torch.nn.Module], count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layer() for _ in range(count))


class Layer(torch.nn.Module):
    """Attention and FFN, each added to its input: normalised after the sum as in BERT, or before, ``norm_first``, as in
    GPT-2."""

    def __init__(self, config: MheConfig, norm_first: bool, epsilon: float) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.attention: torch.nn.Module = Attention(config)
        self.attention_norm = torch.nn.LayerNorm(config.hidden_size, epsilon)
        self.ffn = Ffn(config.hidden_size, config.intermediate_size, "gelu")
        self.ffn_norm = torch.nn.LayerNorm(config.hidden_size, epsilon)

    def forward(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        turn: Positions | None = None,
        attend: Attend | None = None,
    ) -> torch.Tensor:
        """``hidden`` [B, S, H] to [B, S, H]; the rest is attention's."""
        if self.norm_first:
            hidden = hidden + self.attention(self.attention_norm(hidden), mask, turn, attend)
            return hidden + self.ffn(self.ffn_norm(hidden))
        hidden = self.attention_norm(hidden + self.attention(hidden, mask, turn, attend))
        return self.ffn_norm(hidden + self.ffn(hidden))


class ReadingLayer(torch.nn.Module):
    """A decoder's layer behind an encoder: attention over its own text and over the other, and an FFN, each added to
    its input and normalised after the sum (Vaswani et al. 2017, section 3.1)."""

    def __init__(self, config: MheConfig, epsilon: float) -> None:
        super().__init__()
        self.attention: Any = Attention(config)
        self.attention_norm = torch.nn.LayerNorm(config.hidden_size, epsilon)
        self.cross_attention: Any = Attention(config)
        self.cross_attention_norm = torch.nn.LayerNorm(config.hidden_size, epsilon)
        self.ffn = Ffn(config.hidden_size, config.intermediate_size, "gelu")
        self.ffn_norm = torch.nn.LayerNorm(config.hidden_size, epsilon)

    def forward(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        source: KeysAndValues,
        source_mask: torch.Tensor | None,
        attend: Attend | None = None,
    ) -> torch.Tensor:
        """``hidden`` [B, S, H] to [B, S, H]. ``source`` are keys and values of N tokens, made by ``cross_attention``;
        ``source_mask`` [B, 1, 1, N] is added to their scores, ``mask`` and ``attend`` are those of ``attention``."""
        hidden = self.attention_norm(hidden + self.attention(hidden, mask, None, attend))
        hidden = self.cross_attention_norm(hidden + self.cross_attention(hidden, source_mask, keys_and_values=source))
        return self.ffn_norm(hidden + self.ffn(hidden))


def padding_mask(attention_mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``attention_mask`` [B, S] to [B, 1, 1, S] in the dtype of ``like``, added to scores: 0 where a key counts.

    Every row of probabilities sums to 1, that of a row without a token too, which the fold of mhe_add's values needs.
    """
    return additive_mask(attention_mask > 0, like)[:, None, None]


def _mean(name: str) -> float:
    """Head embeddings start at 0 with little noise, and factors, which have the 1 of mhe_mul in them, at 1."""
    return 1.0 if "attention.factor." in name else 0.0


def turned(model: Any) -> Any:  # MheEncoder, MheDecoder or MheEncoderDecoder
    """A copy of ``model`` that is the same function in the other ``layout``: what may shrink is then the width of heads
    in place of their number, or their number again. That way it was not trained nested, and its configuration, the
    copy's ``config``, says so."""
    before: MheConfig = model.config
    layout: Layout = "heads_first" if before.width_first else "width_first"
    config, made = replace(before, layout=layout, nested=False, granularities=None), on_same_weights(model)
    for module in made.modules():
        if getattr(module, "config", None) is not None:
            module.config = config
    for place in places_of(before):
        attention = made.get_submodule(place.at)
        for name, parameter in list(attention.named_parameters()):
            part, _, kind = name.rpartition(".")
            if name == "output.weight":
                found = _turned_rows(parameter.T.contiguous(), before).T
            elif part in before.own_projections:
                found = _turned_rows(parameter, before)
            elif part in ("embedding", "factor"):
                found = parameter.T
            else:
                continue
            found = found.detach().clone(memory_format=torch.contiguous_format)
            setattr(attention.get_submodule(part), kind, torch.nn.Parameter(found, parameter.requires_grad))
    return made


def _turned_rows(rows: torch.Tensor, config: MheConfig) -> torch.Tensor:
    """The numbers of all heads, ``[n * d, ...]``, number by number where they are head by head, or back."""
    return rows.view(*config.table_shape, *rows.shape[1:]).transpose(0, 1).flatten(0, 1)


def answering(checkpoint: Checkpoint, config: MheConfig) -> Answering:
    """The model in ``checkpoint`` as families hand it over."""
    return Answering(with_weights(lambda: made(config), checkpoint))


_MODELS: Mapping[type[MheConfig], Callable[[Any], torch.nn.Module]] = {
    MheEncoderConfig: MheEncoder,
    MheDecoderConfig: MheDecoder,
    MheEncoderDecoderConfig: MheEncoderDecoder,
}


def made(config: MheConfig) -> torch.nn.Module:
    """The model that ``config`` describes, with weights drawn at random."""
    return _MODELS[type(config)](config)


class Recorded(View):
    """One pass of ``model``, in the forms that it has, over whole texts."""

    def __init__(self, model: Any) -> None:  # MheDecoder or MheEncoderDecoder
        super().__init__(on_same_weights(model))
        for layer in self._written:
            layer.attention = Recording(layer.attention)

    def forward(self, input_ids: torch.Tensor, source_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """``input_ids`` [B, S], perhaps behind ``source_ids`` [B, N], to logits [B, S, V], and per layer the keys and
        values [B, K, S, d] of these tokens."""
        if source_ids is None:
            logits = self.model(input_ids)
        else:
            logits = self.model(source_ids, torch.ones_like(source_ids), input_ids)
        return (logits, *(tensor for layer in self._written for tensor in layer.attention.last))

    @property
    def _written(self) -> Any:
        """The layers that read the text that is written."""
        return getattr(self.model, "decoder", self.model).layers


class Recording(torch.nn.Module):
    """``attention``, which keeps in ``last`` the keys and values that a cache would get of its last pass."""

    def __init__(self, attention: Any) -> None:  # Attention, or in a form of its own
        super().__init__()
        self.attention = attention
        self.cached = as_cached(attention)
        self.last: tuple[torch.Tensor, ...] = ()

    def forward(
        self, hidden: torch.Tensor, mask: torch.Tensor | None, turn: Positions | None, attend: None
    ) -> torch.Tensor:
        self.last = self.cached.keys_and_values(hidden, turn)
        return self.attention(hidden, mask, turn, attend)


def as_cached(attention: Any) -> Any:  # Attention, or in a form of its own
    """Module of the cached keys and values of ``attention``: of the literal one, its form in those."""
    return in_form(attention, cached_form(attention.config)) if isinstance(attention, Attention) else attention


class SourceEncoder(View):
    """``model`` up to what its decoder reads of a text, with the interface of ``EncoderEntry``."""

    def __init__(self, model: Any) -> None:  # MheEncoderDecoder
        super().__init__(model)
        self.made_by = torch.nn.ModuleList(as_cached(layer.cross_attention) for layer in model.decoder.layers)

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``input_ids`` [1, N] to keys [1, K, d, N] and values [1, K, N, d] of each layer of the decoder in turn."""
        source, found = self.model.encode(input_ids, None), list[torch.Tensor]()
        attention: Any
        for attention in self.made_by:
            key, value = attention.keys_and_values(source)
            found += [key.transpose(2, 3), value]
        return tuple(found)


class CachedDecoder(View):
    """The decoder of ``model``, in the form of engines that keep a cache, with the interface of ``GenerationEntry``; to
    be traced."""

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_at: torch.Tensor,
        source_lengths: torch.Tensor,
        *kept: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        model, new, present = self.model, cache_places(position_ids), list[torch.Tensor]()
        layers = model.decoder.layers
        sources, past = kept[: 2 * len(layers)], caches_of(kept[2 * len(layers) :])
        mask = hidden_beyond(source_lengths, sources[0].shape[3])
        hidden = model.embeddings(input_ids, position_ids=position_ids)
        for number, layer in enumerate(layers):
            keys, values = sources[2 * number : 2 * number + 2]
            hidden = layer(hidden, None, (keys.transpose(2, 3), values), mask, over_cache(past[number], new, present))
        return (model.logits(hidden[:, logits_at]), *present)
