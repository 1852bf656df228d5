"""A conditional T5: an encoder with conditional adapters, and a dense decoder that reads it. See docs/coda.md.

Axes: ``ffn`` of every layer of both sides, and ``coda.reduction`` of the encoder. The whole engine answers a pair of
texts at every position of the second; both have the bucket's length, since what pads the first is masked, and what pads
the second on its right changes nothing before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ....bucket import Bucket
from ....bundle.entries.engine_entry import RoutingEntry
from ....bundle.entries.generation_entry import CachedLayer
from ....elastic import Axis, ElasticSpec, Submodel
from ....workload import Op
from ...architecture import Architecture, Replay
from ...checkpoints.checkpoint import Checkpoint, compare_with_headers
from ...checkpoints.own_folder import read_config
from ...family import Deferred, own_family
from ...hugging_face.tensors import Shape
from ...parts import CachedSpec, EncoderSpec
from ...signature import next_token_logits, text_signature
from ..t5 import HEAD, decoder_ops, source_ops, step_ops
from . import ops
from .config import ENCODER, REDUCTION, CodaEncoderDecoderConfig
from .family import PRESETS as ENCODERS
from .family import TokenRoutes, coda_task_spec, static_reason

if TYPE_CHECKING:
    import torch

    from . import encoder_decoder
else:
    encoder_decoder = Deferred(".encoder_decoder", __package__)


TABLES = (*(f"{ENCODER}{table}" for table in ops.TABLES), HEAD)
# Operators on prompts, whose lengths are known when they are read: products with ones would be of all tokens squared.
_BY_INDEX = {ops.DISPATCH: "gather", ops.COMBINE: "scatter"}


def read(checkpoint: Checkpoint) -> Architecture:
    """The model in ``checkpoint``, whose weights may be absent altogether."""
    config = read_config(checkpoint, CodaEncoderDecoderConfig)
    encoder, shapes = config.encoder, parameter_shapes(config)
    if checkpoint.has_weights:
        compare_with_headers(checkpoint, shapes)
    return Architecture(
        spec=elastic_spec(config),
        signature=text_signature(
            checkpoint,
            [next_token_logits(config.vocabulary)],
            encoder.most_tokens,
            config.vocabulary,
            config.pad_token_id,
            "token",
            start=config.decoder_start_token_id,
            static=static_reason(encoder),
        ),
        parameter_shapes=shapes,
        workload=partial(forward_ops, config),
        load=lambda: encoder_decoder.answering(checkpoint, config),
        narrow=lambda module, submodel: encoder_decoder.narrow(module, ops.reduction_of(encoder, submodel)),
        is_embedding=lambda parameter, _: parameter in TABLES,
        cached=_cached(config),
        routing=PairRoutes(encoder) if encoder.conditional else None,
        variants=lambda submodel, bucket: ops.variant_ops(encoder, of_encoder(submodel), bucket),
        lower=encoder_decoder.lower,
        tasks=coda_task_spec(encoder, ENCODER),
        group_of=parameter_group,
    )


def _cached(config: CodaEncoderDecoderConfig) -> CachedSpec:
    encoder, shape = config.encoder, config.decoder
    positions = encoder.most_tokens
    form = EncoderSpec(
        config.decoder_start_token_id,
        positions,
        lambda module: encoder_decoder.SourceEncoder(module.model, module.returns_routes),
        partial(encoding_ops, config),
        partial(step_ops, shape),
        axes=(REDUCTION,),
        routes=partial(PairRoutes(encoder).of_any_length, longest=positions),
    )
    stated = encoder.tokens_selected is not None
    layers = (CachedLayer(shape.heads, shape.head_dim),) * shape.decoder_layers
    return CachedSpec(
        config.vocabulary,
        positions,
        layers,
        lambda module: encoder_decoder.CachedDecoder(module.model, layers, reads=layers).eval(),
        lambda module: encoder_decoder.RecordedPass(module.model),
        encoder=form,
        variants=_BY_INDEX,
        family_problem="tokens_selected says k of rows of some lengths, and a prompt has any" if stated else None,
    )


@dataclass(frozen=True)
class PairRoutes(TokenRoutes):
    """Those of the encoder, of submodels of the pair."""

    def entries(self, submodel: Submodel, bucket: Bucket) -> tuple[RoutingEntry, ...]:
        return super().entries(of_encoder(submodel), bucket)

    def of_any_length(self, submodel: Submodel, longest: int) -> tuple[RoutingEntry, ...]:
        return super().of_any_length(of_encoder(submodel), longest)

    def metadata(self, submodel: Submodel, bucket: Bucket) -> Mapping[str, int | str]:
        return super().metadata(of_encoder(submodel), bucket)

    def replay(
        self, module: torch.nn.Module, inputs: Sequence[torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> Replay:
        return encoder_decoder.replay_pass(module, inputs, given)


def of_encoder(submodel: Submodel) -> Submodel:
    """``submodel`` of the whole model as one of its encoder alone, whose axes it calls by the encoder's names."""
    values = ((_own(axis), value) for axis, value in submodel.values if not axis.name.startswith("decoder."))
    return Submodel(tuple(values))


def _own(axis: Axis) -> Axis:
    return replace(axis, name=axis.name.removeprefix(ENCODER))


def parameter_shapes(config: CodaEncoderDecoderConfig) -> dict[str, Shape]:
    """Parameters of ``CodaEncoderDecoder``."""
    own = {f"{ENCODER}{name}": shape for name, shape in ops.parameters(config.encoder).shapes.items()}
    others = config.decoder.parameters.shapes.items()
    return own | {name: shape for name, shape in others if name.startswith("decoder.") or name == HEAD}


def elastic_spec(config: CodaEncoderDecoderConfig) -> ElasticSpec:
    """``encoder.layers.N.ffn``, ``decoder.layers.N.ffn`` and, of several reductions, ``coda.reduction``."""
    own = ops.elastic_spec(config.encoder)
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
    return ops.parameter_group(parameter) if parameter.startswith(ENCODER) else None


def forward_ops(config: CodaEncoderDecoderConfig, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """Encoder and decoder, each over as many tokens, and the head. Raises as the encoder's own."""
    return [*_encoder_ops(config, submodel, bucket), *decoder_ops(config.decoder, submodel, bucket)]


def _encoder_ops(config: CodaEncoderDecoderConfig, submodel: Submodel, bucket: Bucket) -> list[Op]:
    return ops.forward_ops(config.encoder, of_encoder(submodel), bucket)


def encoding_ops(config: CodaEncoderDecoderConfig, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """The encoder, and the keys and values that every layer of the decoder makes of its answer."""
    return [*_encoder_ops(config, submodel, bucket), *source_ops(config.decoder, bucket)]


# The published T5 v1.1 with a conditional encoder, and a decoder as deep as that.
PRESETS: Mapping[str, CodaEncoderDecoderConfig] = {
    f"{name}-with-decoder": CodaEncoderDecoderConfig(
        encoder=encoder,
        num_decoder_layers=encoder.num_hidden_layers,
        tie_word_embeddings=False,
        scale_decoder_outputs=False,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    for name, encoder in ENCODERS.items()
}
FAMILY = own_family("coda_encoder_decoder", read, PRESETS)
