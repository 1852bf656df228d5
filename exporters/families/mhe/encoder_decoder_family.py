"""Translation models with MHE attention, or one that its paper compares with. See docs/mhe.md.

Axes of every layer of both sides as of encoders (encoder_family.py), and ``cross_heads`` or ``cross_head_width`` of the
decoder's attention to the encoder. The whole engine answers a pair of texts at every position of the second; both have
the bucket's length, since what pads the first is masked, and what pads the second on its right changes nothing before
it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ....bundle.entries.generation_entry import CachedLayer
from ....bundle.entries.tensor_spec import TensorSpec
from ...cached_form import CachedForm, EncoderForm
from ...checkpoints.checkpoint import Checkpoint
from ...signature import Signature
from .architecture.config import MheEncoderDecoderConfig
from .architecture.forms import CROSS, DECODER, ENCODER, cached_form, cached_heads, prompt_form
from .architecture.forward_ops import encoder_decoder_ops, encoding_ops, step_ops
from .architecture.shapes import encoder_decoder_shapes
from .kept import kept_axes
from .read import Kind, text_entry

if TYPE_CHECKING:  # plans are made without torch
    import torch


def _cached(config: MheEncoderDecoderConfig, spread: float) -> CachedForm:
    def encoder(module: torch.nn.Module) -> torch.nn.Module:
        from .model.translating import SourceEncoder

        return SourceEncoder(module.model).eval()

    def cached(module: torch.nn.Module) -> torch.nn.Module:
        from .model.translating import CachedDecoder

        return CachedDecoder(module.model).eval()

    def recorded(module: torch.nn.Module) -> torch.nn.Module:
        from .model.translating import RecordedPair

        return RecordedPair(module.model).eval()

    positions, kept = config.max_position_embeddings, cached_form(config)
    encoding, step = partial(encoding_ops, config, spread=spread), partial(step_ops, config)
    form = EncoderForm(config.decoder_start_token_id, positions, encoder, encoding, step, kept=kept_axes(config, CROSS))
    return CachedForm(
        config.vocab_size,
        positions,
        (CachedLayer(cached_heads(config), config.head_size),) * config.decoder_layers,
        cached,
        recorded,
        encoder=form,
        kept=kept_axes(config, DECODER),
        variants={ENCODER: prompt_form(config, spread), DECODER: kept, CROSS: kept} if config.has_tables else {},
    )


def _signature(checkpoint: Checkpoint, config: MheEncoderDecoderConfig) -> Signature:
    tokens = ("batch", "sequence")
    ids = TensorSpec("input_ids", "int64", tokens, pad=0, high=config.vocab_size)
    mask = TensorSpec("attention_mask", "int64", tokens, pad=0, high=2, row_needs="token")
    follows = TensorSpec("decoder_input_ids", "int64", tokens, pad=0, high=config.vocab_size)
    logits = TensorSpec("logits", "float32", (*tokens, config.vocab_size), role="next_tokens")
    text = text_entry(checkpoint, mask.name)
    if text is not None:
        text = replace(text, shifted=follows.name, start=config.decoder_start_token_id)
    return Signature((ids, mask, follows), (logits,), config.max_position_embeddings, mask.name, text)


FAMILY = Kind(MheEncoderDecoderConfig, encoder_decoder_shapes, _signature, encoder_decoder_ops, _cached).family(
    "mhe_encoder_decoder"
)
