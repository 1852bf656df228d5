"""Parameters, axes and operations of a conditional encoder with T5's decoder, from its configuration (no torch here).

Both sides say of themselves what they have: the encoder's names follow ``encoder.``.
"""

from __future__ import annotations

from dataclasses import replace

from ....bucket import Bucket
from ....elastic import ElasticSpec, Submodel
from ....workload import Op
from ...hugging_face.layer_shapes import Shape
from ..coda.architecture import forward_ops as encoder_ops
from ..coda.architecture import shapes as encoder_shapes
from ..coda.architecture.variant_ops import variant_ops as encoder_variant_ops
from ..t5.architecture import HEAD, ffn_axes
from ..t5.forward_ops import decoder_ops, source_ops
from .config import ENCODER, CodaEncoderDecoderConfig, of_encoder

TABLES = (*(f"{ENCODER}{table}" for table in encoder_shapes.TABLES), HEAD)


def parameter_shapes(config: CodaEncoderDecoderConfig) -> dict[str, Shape]:
    """Parameters of ``CodaEncoderDecoder``."""
    own = {f"{ENCODER}{name}": shape for name, shape in encoder_shapes.parameter_shapes(config.encoder).items()}
    others = config.decoder.parameter_shapes.items()
    return own | {name: shape for name, shape in others if name.startswith("decoder.") or name == HEAD}


def elastic_spec(config: CodaEncoderDecoderConfig) -> ElasticSpec:
    """``encoder.layers.N.ffn``, ``decoder.layers.N.ffn`` and, of several reductions, ``coda.reduction``."""
    own = encoder_shapes.elastic_spec(config.encoder)
    layers = [replace(axis, name=f"{ENCODER}{axis.name}") for axis in own.axes if axis.layer is not None]
    whole = [axis for axis in own.axes if axis.layer is None]
    cuts = [replace(cut, parameter=f"{ENCODER}{cut.parameter}", axis=f"{ENCODER}{cut.axis}") for cut in own.slices]
    axes, slices = ffn_axes(config.decoder)
    return replace(
        own, axes=(*layers, *axes, *whole), slices=(*cuts, *slices), depth=own.depth + config.num_decoder_layers
    )


def parameter_group(parameter: str) -> str | None:
    """The group that ``inspect`` counts ``parameter`` in: the encoder's, which tasks train."""
    return encoder_shapes.parameter_group(parameter) if parameter.startswith(ENCODER) else None


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
    return encoder_variant_ops(config.encoder, of_encoder(submodel), bucket)
