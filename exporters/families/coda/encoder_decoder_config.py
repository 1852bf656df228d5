"""``config.json`` of a conditional encoder with T5's decoder behind it, and what follows from it (no torch here).

Both sides say of themselves what they have: the encoder's names follow ``encoder.``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from ....bucket import Bucket
from ....elastic import Axis, ElasticSpec, Submodel
from ....workload import Op
from ...checkpoints.config import MOST_LAYERS
from ...checkpoints.own_folder import OwnConfig
from ...hugging_face.tensors import RELATIVE_BUCKETS, Shape
from ..t5 import HEAD, T5Model, decoder_ops, source_ops
from . import ops as encoder_ops
from .config import CodaConfig

# Before the encoder's own names, of parameters and of axes.
ENCODER = "encoder."
TABLES = (*(f"{ENCODER}{table}" for table in encoder_ops.TABLES), HEAD)


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
    def decoder(self) -> T5Model:
        """Settings that determine the decoder's graph; of the encoder's layers it says nothing."""
        encoder = self.encoder
        return T5Model(
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
        """First problem among the values, as ``key: problem``, or None."""
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


def parameter_shapes(config: CodaEncoderDecoderConfig) -> dict[str, Shape]:
    """Parameters of ``CodaEncoderDecoder``."""
    own = {f"{ENCODER}{name}": shape for name, shape in encoder_ops.parameter_shapes(config.encoder).items()}
    others = config.decoder.parameters.shapes.items()
    return own | {name: shape for name, shape in others if name.startswith("decoder.") or name == HEAD}


def elastic_spec(config: CodaEncoderDecoderConfig) -> ElasticSpec:
    """``encoder.layers.N.ffn``, ``decoder.layers.N.ffn`` and, of several reductions, ``coda.reduction``."""
    own = encoder_ops.elastic_spec(config.encoder)
    layers = [replace(axis, name=f"{ENCODER}{axis.name}") for axis in own.axes if axis.layer is not None]
    whole = [axis for axis in own.axes if axis.layer is None]
    cuts = [replace(cut, parameter=f"{ENCODER}{cut.parameter}", axis=f"{ENCODER}{cut.axis}") for cut in own.slices]
    added = config.decoder.parameters
    return replace(
        own,
        axes=(*layers, *added.axes, *whole),
        slices=(*cuts, *added.slices),
        depth=own.depth + config.num_decoder_layers,
    )


def parameter_group(parameter: str) -> str | None:
    """The group that ``inspect`` counts ``parameter`` in: the encoder's, which tasks train."""
    return encoder_ops.parameter_group(parameter) if parameter.startswith(ENCODER) else None


def forward_ops(config: CodaEncoderDecoderConfig, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """Encoder and decoder, each over as many tokens, and the head. Raises as the encoder's own."""
    ops = encoder_ops.forward_ops(config.encoder, of_encoder(submodel), bucket)
    return [*ops, *decoder_ops(config.decoder, submodel, bucket)]


def encoding_ops(config: CodaEncoderDecoderConfig, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """The encoder, and the keys and values that every layer of the decoder makes of its answer."""
    ops = encoder_ops.forward_ops(config.encoder, of_encoder(submodel), bucket)
    return [*ops, *source_ops(config.decoder, bucket)]


def variant_ops(config: CodaEncoderDecoderConfig, submodel: Submodel, bucket: Bucket) -> dict[str, dict[str, list[Op]]]:
    """The encoder's variants of reading and writing selected tokens."""
    return encoder_ops.variant_ops(config.encoder, of_encoder(submodel), bucket)
