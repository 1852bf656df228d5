"""``config.json`` of a conditional encoder with T5's decoder behind it, read strictly (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from ....elastic import Axis, Submodel
from ...checkpoints.elastic_config import MOST_LAYERS
from ...checkpoints.own_config import OwnConfig
from ...modules.relative_distance import RELATIVE_BUCKETS
from ..coda.architecture.config import CodaConfig
from ..t5.architecture import T5Architecture

# Before the encoder's own names, of parameters and of axes.
ENCODER = "encoder."


@dataclass(frozen=True, kw_only=True)
class CodaEncoderDecoderConfig(OwnConfig):
    """The ``encoder``, a model of texts without labels, and a decoder of ``num_decoder_layers`` dense layers with the
    encoder's table of tokens, width, heads, FFN and activation, as T5 has them.

    ``tie_word_embeddings``: the matrix back to the vocabulary is the table of tokens. ``scale_decoder_outputs``: what
    it reads is multiplied by ``hidden_size ** -0.5``, as in the first T5. A text that is written begins with
    ``decoder_start_token_id`` and ends with ``eos_token_id``. ``nested`` and ``granularities`` of the encoder say of
    both sides how they were trained.
    """

    encoder: CodaConfig
    num_decoder_layers: int = field(metadata={"min": 1, "max": MOST_LAYERS})
    tie_word_embeddings: bool
    scale_decoder_outputs: bool
    decoder_start_token_id: int = field(metadata={"min": 0})
    pad_token_id: int = field(default=0, metadata={"min": 0})
    eos_token_id: int | tuple[int, ...] | None = field(default=None, metadata={"min": 0})
    model_type: Literal["coda_encoder_decoder"] = "coda_encoder_decoder"

    @property
    def vocabulary(self) -> int:
        """Tokens of both texts."""
        assert self.encoder.vocab_size is not None
        return self.encoder.vocab_size

    @property
    def decoder(self) -> T5Architecture:
        """What determines the decoder's graph; of the encoder's layers it says nothing."""
        encoder = self.encoder
        return T5Architecture(
            vocabulary=self.vocabulary,
            hidden=encoder.hidden_size,
            heads=encoder.num_attention_heads,
            head_dim=encoder.head_size,
            ffn=encoder.intermediate_size,
            layers=0,
            decoder_layers=self.num_decoder_layers,
            buckets=RELATIVE_BUCKETS,
            gated=encoder.gated_ffn,
            tied=self.tie_word_embeddings,
            pad=self.pad_token_id,
            start=self.decoder_start_token_id,
        )

    def problem(self) -> str | None:
        """What makes no sense among the values, as ``key: problem``, or None."""
        if (found := self.encoder.problem()) is not None:
            return f"encoder: {found}"
        for key, usual in (
            ("image", None),
            ("num_labels", None),
            ("type_vocab_size", 0),
            ("norm", "rms"),
        ):
            stated = getattr(self.encoder, key)
            if stated != usual:
                return f"encoder: {key}: got {stated!s:.80} before a decoder of T5; expected {usual or 'none'}"
        ends = self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id or 0,)
        for key, tokens in (
            ("decoder_start_token_id", (self.decoder_start_token_id,)),
            ("pad_token_id", (self.pad_token_id,)),
            ("eos_token_id", ends),
        ):
            if max(tokens, default=0) >= self.vocabulary:
                return f"{key}: expected a token of the vocabulary, 0..{self.vocabulary - 1}, got {max(tokens)}"
        return None


def of_encoder(submodel: Submodel) -> Submodel:
    """``submodel`` of the whole model as one of its encoder alone, whose axes it calls by the encoder's names."""
    values = ((_own(axis), value) for axis, value in submodel.values if not axis.name.startswith("decoder."))
    return Submodel(tuple(values))


def _own(axis: Axis) -> Axis:
    return replace(axis, name=axis.name.removeprefix(ENCODER))
