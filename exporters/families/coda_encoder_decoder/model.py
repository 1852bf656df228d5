"""A conditional encoder and T5's decoder: two texts to the logits of the token behind each one of the second.

All n tokens leave the encoder, and the decoder reads all of them (section 3 of Conditional Adapters, arXiv 2304.04947).
Shapes: ``B`` rows, ``N`` tokens of the text that is read, ``S`` of the one that is written, ``d`` hidden, ``V`` tokens
of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ...checkpoints.offline_transformers import offline_transformers
from ...modules.relative_distance import RELATIVE_BUCKETS, RELATIVE_REACH
from ..coda.model.encoder import CodaEncoder
from .config import CodaEncoderDecoderConfig

# transformers' names.
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new"}


class CodaEncoderDecoder(torch.nn.Module):
    """``decoder`` is the stack of transformers' T5, without a table of its own: its tokens are the encoder's.
    ``encoder.reduction`` is the r at which conditional layers compute."""

    def __init__(self, config: CodaEncoderDecoderConfig) -> None:
        super().__init__()
        self.config, shape = config, config.decoder
        self.encoder = CodaEncoder(config.encoder, any_length=True)
        self.decoder: Any = _t5_decoder(config)
        head = None if config.tie_word_embeddings else torch.nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.lm_head = head

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor
    ) -> torch.Tensor:
        """``input_ids`` and ``attention_mask`` [B, N] int64, 1 where a token counts, and ``decoder_input_ids`` [B, S]
        to logits [B, S, V]. Position ``t`` of the second text sees its positions ``0..t``. Raises as the encoder."""
        return self.written(self.encoder(input_ids, attention_mask), attention_mask, decoder_input_ids)

    def written(
        self,
        source: torch.Tensor,
        attention_mask: torch.Tensor | None,
        decoder_input_ids: torch.Tensor,
        cache: Any | None = None,
    ) -> torch.Tensor:
        """The logits [B, S, V] of ``decoder_input_ids`` [B, S] behind what the encoder made, ``source`` [B, N, d].
        A ``cache`` of transformers keeps keys and values."""
        answer = self.decoder(
            inputs_embeds=self.words(decoder_input_ids),
            encoder_hidden_states=source,
            encoder_attention_mask=attention_mask,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return self.logits(answer.last_hidden_state)

    @property
    def words(self) -> torch.nn.Embedding:
        """The table of tokens of both texts."""
        words = self.encoder.embeddings.word
        assert isinstance(words, torch.nn.Embedding)
        return words

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Last states [B, S, d] to logits [B, S, V]."""
        if self.config.scale_decoder_outputs:
            hidden = hidden * hidden.shape[-1] ** -0.5
        weight = self.words.weight if self.lm_head is None else self.lm_head.weight
        return functional.linear(hidden, weight)


def _t5_decoder(config: CodaEncoderDecoderConfig) -> Any:
    transformers, shape = offline_transformers(), config.decoder
    from transformers.models.t5.modeling_t5 import T5Stack

    stack_config = transformers.T5Config(
        vocab_size=1,  # of the table that is left out
        d_model=shape.hidden,
        d_kv=shape.head_dim,
        d_ff=shape.ffn,
        num_layers=shape.decoder_layers,
        num_heads=shape.heads,
        relative_attention_num_buckets=RELATIVE_BUCKETS,
        relative_attention_max_distance=RELATIVE_REACH,
        dropout_rate=0.0,
        layer_norm_epsilon=config.encoder.norm_eps,
        feed_forward_proj="gated-relu" if shape.gated else "relu",
        is_decoder=True,
        is_encoder_decoder=True,
        pad_token_id=0,
    )
    stack_config.dense_act_fn = _ACTIVATIONS[config.encoder.activation]
    decoder: Any = T5Stack(stack_config)
    decoder.embed_tokens = None
    return decoder
