"""Models with the configured attention: an encoder of BERT's shape, a decoder of GPT-2's, a translation model of both.

The last is the Transformer of Vaswani et al. (2017), figure 1, with learned positions and GELU. Shapes: ``B`` rows,
``S`` tokens (of a translation model those of the text that is written, ``N`` those of the one that is read), ``H``
hidden, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...checkpoints.checkpoint import Checkpoint, open_checkpoint
from ...checkpoints.own_folder import read_config, with_weights
from ...modules.attention import Positions, additive_mask, causal_mask, rotary
from ...modules.layers import Ffn, MaskedLmHead, VocabularyHead, draw_weights, on_same_weights
from .attention import Attend, Attention, Kept
from .config import Layout, MheConfig, MheDecoderConfig, MheEncoderConfig, MheEncoderDecoderConfig
from .forms import places_of

# Of every LayerNorm, as in BERT.
_ENCODER_EPS = 1e-12
# Of every LayerNorm, as in GPT-2.
_DECODER_EPS = 1e-5
# Of every LayerNorm, as in PyTorch's own Transformer.
_PAIR_EPS = 1e-5


class MheEncoder(torch.nn.Module):
    """Token ids to the outputs of the configured head.

    none: last hidden state [B, S, H]. masked_lm: logits [B, S, V]. classifier: logits [B, labels].
    """

    def __init__(self, config: MheEncoderConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.embeddings = NormedEmbeddings(config)
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
            logits: torch.Tensor = self.head(hidden, self.embeddings.word.weight)
            return logits
        if self.pooler is None or self.classifier is None:
            return hidden
        labels: torch.Tensor = self.classifier(torch.tanh(self.pooler(hidden[:, 0])))
        return labels


class MheDecoder(torch.nn.Module):
    """Token ids to the logits of the next token, at every position."""

    def __init__(self, config: MheDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = torch.nn.ModuleList(
            Layer(config, norm_first=True, epsilon=_DECODER_EPS) for _ in range(config.num_hidden_layers)
        )
        self.norm = torch.nn.LayerNorm(config.hidden_size, _DECODER_EPS)
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

    def turn(self, places: torch.Tensor) -> Positions | None:
        """Rotation of queries and keys [B, n, S, d] at ``places`` [S], or [B, 1, S], where positions are rotary."""
        return rotary(places, self.config.head_size) if self.config.position == "rotary" else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Last states [B, S, H] to logits [B, S, V]."""
        logits: torch.Tensor = self.lm_head(self.norm(hidden), self.embeddings.word.weight)
        return logits


class MheEncoderDecoder(torch.nn.Module):
    """Two texts to the logits of the token behind each one of the second."""

    def __init__(self, config: MheEncoderDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.encoder = Stack(lambda: Layer(config, norm_first=False, epsilon=_PAIR_EPS), config.num_hidden_layers)
        self.decoder = Stack(lambda: ReadingLayer(config, _PAIR_EPS), config.decoder_layers)
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
            hidden = layer(hidden, mask, layer.cross_attention.kept(source), source_mask)
        return self.logits(hidden)

    def encode(self, input_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Encoder states of ``input_ids`` [B, N], whose ``mask`` [B, 1, 1, N] is added to scores: [B, N, H]."""
        hidden: torch.Tensor = self.embeddings(input_ids)
        for layer in self.encoder.layers:
            hidden = layer(hidden, mask)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Last states [B, S, H] to logits [B, S, V]."""
        logits: torch.Tensor = self.lm_head(hidden, self.embeddings.word.weight)
        return logits


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
            updated: torch.Tensor = hidden + self.ffn(self.ffn_norm(hidden))
            return updated
        hidden = self.attention_norm(hidden + self.attention(hidden, mask, turn, attend))
        normed: torch.Tensor = self.ffn_norm(hidden + self.ffn(hidden))
        return normed


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
        source: Kept,
        source_mask: torch.Tensor | None,
        attend: Attend | None = None,
    ) -> torch.Tensor:
        """``hidden`` [B, S, H] to [B, S, H]. ``source`` are keys and values of N tokens, made by ``cross_attention``;
        ``source_mask`` [B, 1, 1, N] is added to their scores, ``mask`` and ``attend`` are those of ``attention``."""
        hidden = self.attention_norm(hidden + self.attention(hidden, mask, None, attend))
        hidden = self.cross_attention_norm(hidden + self.cross_attention(hidden, source_mask, kept=source))
        normed: torch.Tensor = self.ffn_norm(hidden + self.ffn(hidden))
        return normed


class Embeddings(torch.nn.Module):
    """Tokens, and where positions are learned, the vectors of those, added."""

    def __init__(self, config: MheConfig) -> None:
        super().__init__()
        self.word = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.position == "learned"
        self.position = torch.nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """``input_ids`` [B, S] at ``position_ids`` [B, S], by default from the first on, to [B, S, H]."""
        words: torch.Tensor = self.word(input_ids)
        if self.position is None:
            return words
        if position_ids is None:
            return words + self.position.weight[: input_ids.shape[1]]
        placed: torch.Tensor = words + self.position(position_ids)
        return placed


class NormedEmbeddings(Embeddings):
    """Embeddings, normalised."""

    def __init__(self, config: MheEncoderConfig) -> None:
        super().__init__(config)
        self.norm = torch.nn.LayerNorm(config.hidden_size, _ENCODER_EPS)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        normed: torch.Tensor = self.norm(super().forward(input_ids, position_ids))
        return normed


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


def load_model(folder: Path) -> torch.nn.Module:
    """The MheEncoder, MheDecoder or MheEncoderDecoder in ``folder``, in eval mode and float32, without gradients.

    Raises CheckpointError for a folder that holds none, or whose weights are missing, misfit or not finite.
    """
    checkpoint = open_checkpoint(folder)
    kinds: Mapping[object, type[MheConfig]] = {
        "mhe_decoder": MheDecoderConfig,
        "mhe_encoder_decoder": MheEncoderDecoderConfig,
    }
    return model_of(
        checkpoint, read_config(checkpoint, kinds.get(checkpoint.config.get("model_type"), MheEncoderConfig))
    )


def model_of(checkpoint: Checkpoint, config: MheConfig) -> torch.nn.Module:
    """The module that ``load_model`` returns for an open checkpoint with its configuration."""
    return with_weights(lambda: made(config), checkpoint)


def made(config: MheConfig) -> torch.nn.Module:
    """The model that ``config`` describes, with weights drawn at random."""
    if isinstance(config, MheEncoderDecoderConfig):
        return MheEncoderDecoder(config)
    if isinstance(config, MheDecoderConfig):
        return MheDecoder(config)
    assert isinstance(config, MheEncoderConfig)
    return MheEncoder(config)
