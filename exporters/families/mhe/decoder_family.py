"""Causal language models with MHE attention, or one that its paper compares with. See docs/mhe.md.

Axes as of encoders (encoder_family.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....bundle.entries.generation_entry import CachedLayer
from ....bundle.entries.tensor_spec import TensorSpec
from ...cached_form import CachedForm
from ...checkpoints.checkpoint import Checkpoint
from ...signature import Signature
from .architecture.config import MheDecoderConfig
from .architecture.forms import ATTENTION, cached_form, cached_heads
from .architecture.forward_ops import decoder_ops
from .architecture.shapes import decoder_shapes
from .kept import kept_axes
from .read import Kind, text_entry

if TYPE_CHECKING:  # plans are made without torch
    import torch


def _cached(config: MheDecoderConfig, _: float) -> CachedForm:
    def cached(module: torch.nn.Module) -> torch.nn.Module:
        from .model.generating import CachedLM

        return CachedLM(module.model).eval()

    def recorded(module: torch.nn.Module) -> torch.nn.Module:
        from .model.generating import RecordedLM

        return RecordedLM(module.model).eval()

    layers = (CachedLayer(cached_heads(config), config.head_size),) * config.num_hidden_layers
    return CachedForm(
        config.vocab_size,
        config.max_position_embeddings,
        layers,
        cached,
        recorded,
        variants={ATTENTION: cached_form(config)} if config.has_tables else {},
        kept=kept_axes(config, ATTENTION),
    )


def _signature(checkpoint: Checkpoint, config: MheDecoderConfig) -> Signature:
    tokens = ("batch", "sequence")
    # No mask: attention is causal, so padding on the right changes nothing before it.
    ids = TensorSpec("input_ids", "int64", tokens, pad=0, high=config.vocab_size)
    logits = TensorSpec("logits", "float32", (*tokens, config.vocab_size), role="next_tokens")
    return Signature((ids,), (logits,), config.max_position_embeddings, text=text_entry(checkpoint, None))


FAMILY = Kind(MheDecoderConfig, decoder_shapes, _signature, decoder_ops, _cached).family("mhe_decoder")
