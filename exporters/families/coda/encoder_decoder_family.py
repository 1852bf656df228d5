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
from ....bundle.entries.tensor_spec import TensorSpec
from ....elastic import Submodel
from ....errors import ParityError
from ...architecture import Architecture, Replay, Routing
from ...checkpoints.checkpoint import Checkpoint, compare_with_headers
from ...checkpoints.own_folder import read_config
from ...family import Family
from ...parts import CachedForm, EncoderForm
from ...signature import Signature, text_entry
from ..t5 import step_ops
from .config import IDS, MASK, REDUCTION
from .encoder_decoder_config import (
    ENCODER,
    TABLES,
    CodaEncoderDecoderConfig,
    elastic_spec,
    encoding_ops,
    forward_ops,
    of_encoder,
    parameter_group,
    parameter_shapes,
    variant_ops,
)
from .family import PRESETS as ENCODERS
from .family import TokenRoutes, coda_task_form
from .ops import COMBINE, DISPATCH, reduction_of

if TYPE_CHECKING:  # plans are made without torch
    import torch


_WRITTEN = "decoder_input_ids"
# Of prompts, whose lengths are known when they are read: products with ones would be of all tokens squared.
_BY_INDEX = {DISPATCH: "gather", COMBINE: "scatter"}


def read(checkpoint: Checkpoint) -> Architecture:
    """The model in ``checkpoint``, whose weights may be absent altogether."""
    config = read_config(checkpoint, CodaEncoderDecoderConfig)
    shapes = parameter_shapes(config)
    if checkpoint.has_weights:
        compare_with_headers(checkpoint, shapes)

    def load() -> torch.nn.Module:
        from .encoder_decoder import Answering, model_of

        model = model_of(checkpoint, config)
        model.encoder.reduction = config.encoder.offered[-1]
        return Answering(model)

    def narrow(module: torch.nn.Module, submodel: Submodel) -> None:
        from .encoder_decoder import Answering

        assert isinstance(module, Answering)
        module.model.encoder.reduction = reduction_of(config.encoder, submodel)

    return Architecture(
        spec=elastic_spec(config),
        signature=_signature(checkpoint, config),
        parameter_shapes=shapes,
        workload=partial(forward_ops, config),
        load=load,
        narrow=narrow,
        is_embedding=lambda parameter, _: parameter in TABLES,
        cached=_cached(config),
        routing=PairRoutes(config) if config.encoder.conditional else None,
        variants=partial(variant_ops, config),
        lower=_lower,
        tasks=coda_task_form(config.encoder, ENCODER),
        group_of=parameter_group,
    )


def _signature(checkpoint: Checkpoint, config: CodaEncoderDecoderConfig) -> Signature:
    tokens, vocabulary, pad = ("batch", "sequence"), config.vocabulary, config.pad_token_id
    ids = TensorSpec(IDS, "int64", tokens, pad=pad, high=vocabulary)
    mask = TensorSpec(MASK, "int64", tokens, pad=0, high=2, row_needs="token")
    written = TensorSpec(_WRITTEN, "int64", tokens, pad=pad, high=vocabulary)
    logits = TensorSpec("logits", "float32", (*tokens, vocabulary), role="next_tokens")
    text = text_entry(checkpoint, IDS, MASK)
    if text is not None:
        text = replace(text, shifted=_WRITTEN, start=config.decoder_start_token_id)
    static = "k, the tokens that its encoder's layers select, is one number for each length"
    return Signature(
        (ids, mask, written),
        (logits,),
        config.encoder.max_position_embeddings,
        MASK,
        text,
        static=static if config.encoder.conditional else None,
    )


def _cached(config: CodaEncoderDecoderConfig) -> CachedForm:
    def encoder(module: torch.nn.Module) -> torch.nn.Module:
        from .encoder_decoder import Answering, SourceEncoder

        assert isinstance(module, Answering)
        return SourceEncoder(module.model, module.returns_routes).eval()

    def cached(module: torch.nn.Module) -> torch.nn.Module:
        from .encoder_decoder import Answering, CachedDecoder

        assert isinstance(module, Answering)
        return CachedDecoder(module.model).eval()

    def recorded(module: torch.nn.Module) -> torch.nn.Module:
        from .encoder_decoder import Answering, RecordedPass

        assert isinstance(module, Answering)
        return RecordedPass(module.model).eval()

    positions, shape = config.encoder.most_tokens, config.decoder
    form = EncoderForm(
        config.decoder_start_token_id,
        positions,
        encoder,
        partial(encoding_ops, config),
        partial(step_ops, shape),
        axes=(REDUCTION,),
        routes=PairRoutes(config).of_prompts,
    )
    layers = (CachedLayer(shape.heads, shape.head_dim),) * shape.decoder_layers
    stated = config.encoder.tokens_selected is not None
    return CachedForm(
        config.vocabulary,
        positions,
        layers,
        cached,
        recorded,
        encoder=form,
        variants=_BY_INDEX,
        family_problem="tokens_selected says k of rows of some lengths, and a prompt has any" if stated else None,
    )


def _lower(module: torch.nn.Module, variants: Mapping[str, str]) -> torch.nn.Module:
    from .encoder_decoder import Answering, lower

    assert isinstance(module, Answering)
    return lower(module, variants)


@dataclass(frozen=True)
class PairRoutes(Routing):
    """The encoder's ``TokenRoutes``, where it has a conditional layer."""

    config: CodaEncoderDecoderConfig

    def entries(self, submodel: Submodel, bucket: Bucket) -> tuple[RoutingEntry, ...]:
        """Those of the encoder."""
        return self._own.entries(of_encoder(submodel), bucket)

    def of_prompts(self, submodel: Submodel) -> tuple[RoutingEntry, ...]:
        """Those of one prompt of any length, each as long as that of the longest."""
        return self._own.of_any_length(of_encoder(submodel), self.config.encoder.most_tokens)

    def metadata(self, submodel: Submodel, bucket: Bucket) -> Mapping[str, int | str]:
        return self._own.metadata(of_encoder(submodel), bucket)

    def orders(self, name: str) -> Mapping[int, str]:
        return self._own.orders(name)

    def replay(
        self, module: torch.nn.Module, inputs: Sequence[torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> Replay:
        from .encoder_decoder import NO_TOKEN, ReadingPass
        from .passes import replay

        assert isinstance(module, ReadingPass)
        encoder, read = module.model.encoder, module.read(inputs)
        most = max(encoder.counts(read[0].shape[1]).values(), default=0)
        for name, places in given.items():
            if (places[:, most:] != NO_TOKEN).any():
                raise ParityError(f"{name}: expected {NO_TOKEN} behind {most} tokens")
        shown = {name: places[:, :most] for name, places in given.items()}
        return replay(encoder, read, shown, lambda source: module.behind(source, inputs))

    @property
    def _own(self) -> TokenRoutes:
        return TokenRoutes(self.config.encoder)


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
FAMILY = Family(
    "coda_encoder_decoder",
    ("coda_encoder_decoder",),
    read,
    reads_config_alone=True,
    presets={name: config.to_json() for name, config in PRESETS.items()},
)
