"""Encoders with conditional adapters: only k of n tokens pass through a layer. See docs/coda.md.

Axes: ``ffn`` of every layer (rows of ``ffn.up`` and ``ffn.gate``, columns of ``ffn.down``) and ``coda.reduction``, the
r of ``k = ceil(n / r)``, offered at the values that the configuration lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from ....bundle.entries.tensor_spec import TensorSpec
from ....bundle.manifest import TextEntry
from ....elastic import Submodel
from ...architecture import Architecture
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.own_config import read_config
from ...checkpoints.stored_tensors import compare_with_headers
from ...family import Family
from ...signature import Signature
from .architecture.config import CodaConfig
from .architecture.forward_ops import forward_ops
from .architecture.inputs import IDS, MASK, PIXELS, TYPE_IDS
from .architecture.presets import PRESETS
from .architecture.selection import reduction_of
from .architecture.shapes import (
    TABLES,
    elastic_spec,
    parameter_group,
    parameter_shapes,
)
from .architecture.variant_ops import variant_ops
from .routes import TokenRoutes
from .task_form import coda_task_form

if TYPE_CHECKING:  # plans are made without torch
    import torch


def read(checkpoint: Checkpoint) -> Architecture:
    """The model in ``checkpoint``, whose weights may be absent altogether."""
    config = read_config(checkpoint, CodaConfig)
    shapes = parameter_shapes(config)
    if checkpoint.has_weights:
        compare_with_headers(checkpoint, shapes)

    def load() -> torch.nn.Module:
        from .folder import model_of
        from .model.answering import Answering

        model = model_of(checkpoint, config)
        model.reduction = config.offered[-1]
        return Answering(model)

    def narrow(module: torch.nn.Module, submodel: Submodel) -> None:
        from .model.encoder import CodaEncoder

        assert isinstance(module.model, CodaEncoder)
        module.model.reduction = reduction_of(config, submodel)

    return Architecture(
        spec=elastic_spec(config),
        signature=_signature(checkpoint, config),
        parameter_shapes=shapes,
        workload=partial(forward_ops, config),
        load=load,
        narrow=narrow,
        is_embedding=lambda parameter, _: parameter in TABLES,
        routing=TokenRoutes(config) if config.conditional else None,
        variants=partial(variant_ops, config),
        lower=_lower,
        tasks=coda_task_form(config),
        group_of=parameter_group,
    )


FAMILY = Family(
    "coda",
    ("coda_encoder",),
    read,
    reads_config_alone=True,
    presets={name: config.to_json() for name, config in PRESETS.items()},
)


def _signature(checkpoint: Checkpoint, config: CodaConfig) -> Signature:
    tokens, image = ("batch", "sequence"), config.image
    row = tokens if image is None else ("batch", image.tokens)
    if config.num_labels is None:
        output = TensorSpec("last_hidden_state", "float32", (*row, config.hidden_size))
    else:
        output = TensorSpec("logits", "float32", ("batch", config.num_labels), role="classes")
    static = "k, the tokens that its layers select, is one number for each length" if config.conditional else None
    if image is not None:
        pixels = TensorSpec(PIXELS, "float32", ("batch", image.channels, image.height, image.width), pad=0)
        return Signature((pixels,), (output,), static=static)
    inputs = [
        TensorSpec(IDS, "int64", tokens, pad=0, high=config.vocab_size),
        TensorSpec(MASK, "int64", tokens, pad=0, high=2, row_needs="token"),
    ]
    if config.type_vocab_size > 1:
        inputs.append(TensorSpec(TYPE_IDS, "int64", tokens, pad=0, high=config.type_vocab_size))
    text = None
    if checkpoint.tokenizer_files:
        text = TextEntry("tokenizer.json", IDS, MASK, TYPE_IDS if len(inputs) == 3 else None, None)
    return Signature(tuple(inputs), (output,), config.max_position_embeddings, MASK, text, static=static)


def _lower(module: torch.nn.Module, variants: Mapping[str, str]) -> torch.nn.Module:
    from .model.answering import Answering, lower

    assert isinstance(module, Answering)
    return lower(module, variants)
