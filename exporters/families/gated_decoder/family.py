"""Decoders with a gated FFN, as Llama, Mistral, Qwen, Phi-3 and Gemma have it, up to Gemma 3n. See docs/models.md.

Axis per layer: ``ffn``, the neurons that gate and up make and down reads. One full-sequence pass answers at every
position; attention is causal, so what pads a text on its right changes nothing before it and no mask is needed. Modules
of sentence-transformers pool those tokens that a mask names.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

from ....bundle.entries.generation_entry import CachedLayer
from ....elastic import Axis, ElasticSpec, PrefixSlice, Submodel
from ...architecture import Architecture
from ...cached_form import CachedForm
from ...checkpoints.checkpoint import Checkpoint
from ...family import Family
from ...hugging_face.interface import attention_problems, with_modules
from ...sentence_transformers.read_modules import read_modules
from ...signature import Signature
from .architecture import DecoderArchitecture
from .forward_ops import forward_ops
from .layouts import LAYOUTS
from .nesting import decoder_nesting
from .read_architecture import names_in_files, read_architecture

if TYPE_CHECKING:  # plans are made without torch
    import torch

_MLP_NAME = re.compile(r".+\.layers\.(\d{1,9})\.mlp")


def read(checkpoint: Checkpoint) -> Architecture:
    """The decoder in ``checkpoint`` with its head, and with modules of sentence-transformers behind it."""
    architecture = read_architecture(checkpoint)
    modules = read_modules(checkpoint, architecture.hidden)
    signature = with_modules(_signature(checkpoint, architecture, masked=modules is not None), checkpoint, modules)

    names = names_in_files(checkpoint, architecture)

    def load() -> torch.nn.Module:
        from .load import load_decoder

        return load_decoder(checkpoint, architecture, signature, modules)

    return Architecture(
        spec=_spec(checkpoint, architecture),
        signature=signature,
        parameter_shapes=architecture.parameter_shapes,
        workload=partial(forward_ops, architecture),
        load=load,
        narrow=_narrow,
        names_in_files=names,
        stacked={names[tensor]: parts for tensor, parts in architecture.stacked.items() if tensor in names},
        modules=modules,
        cached=_cached(architecture),
        variant_problems=attention_problems(architecture.heads, architecture.kv_heads),
    )


FAMILY = Family("gated_decoder", tuple(LAYOUTS), read, reads_config_alone=True)


def _spec(checkpoint: Checkpoint, architecture: DecoderArchitecture) -> ElasticSpec:
    axes = tuple(Axis(f"layers.{layer}.ffn", width) for layer, width in enumerate(architecture.widths))
    slices = tuple(
        PrefixSlice(parameter, dim, axis.name)
        for layer, axis in enumerate(axes)
        for parameter, dim in architecture.ffn_slices(layer)
    )
    nesting = decoder_nesting(checkpoint, architecture)
    sparse = architecture.gemma3n.sparse if architecture.gemma3n else (False,) * len(axes)
    jointly_normalised = frozenset(axis.name for axis, told in zip(axes, sparse, strict=True) if told)
    return ElasticSpec(
        axes,
        slices,
        nesting.nested,
        depth=len(axes),
        granularities=nesting.granularities,
        jointly_normalised=jointly_normalised,
    )


def _signature(checkpoint: Checkpoint, architecture: DecoderArchitecture, masked: bool) -> Signature:
    positions, stated, shortened = architecture.positions, architecture.stated_positions, None
    if positions < stated:
        shortened = f"rotary positions change for texts of more, up to the {stated} stated"
    return architecture.interface.signature(checkpoint, positions, masked, shortened)


def _cached(architecture: DecoderArchitecture) -> CachedForm | None:
    heads, size, positions = architecture.kv_heads, architecture.head_dim, architecture.positions
    layers = tuple(
        CachedLayer(heads, size, None if window is None or window >= positions else window)
        for layer, window in enumerate(architecture.windows)
        if architecture.has_keys(layer)
    )
    return architecture.interface.cached_form(positions, layers)


def _narrow(module: torch.nn.Module, submodel: Submodel) -> None:
    for name, part in module.named_modules():
        if match := _MLP_NAME.fullmatch(name):
            mlp: Any = part
            mlp.intermediate_size = submodel[f"layers.{match[1]}.ffn"]
