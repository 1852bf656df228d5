"""GPT-2: learned positions, LayerNorms, an FFN without a gate. See docs/models.md.

Axis per layer: ``ffn``, the neurons that ``c_fc`` makes and ``c_proj`` reads. One full-sequence pass answers at every
position; attention is causal, so what pads a text on its right changes nothing before it and no mask is needed. Modules
of sentence-transformers pool those tokens that a mask names.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ....bucket import Bucket
from ....bundle.entries.generation_entry import CachedLayer
from ....elastic import Axis, ElasticSpec, PrefixSlice, Submodel
from ....workload import Op, elementwise, linear, lookup, pre_norm_layer
from ...architecture import Architecture
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.config import read_nesting
from ...family import Family
from ...hugging_face.interface import attention_problems, with_modules
from ...sentence_transformers.read_modules import read_modules
from .architecture import Gpt2Architecture, names_in_files, read_gpt2

if TYPE_CHECKING:  # plans are made without torch
    import torch


def read(checkpoint: Checkpoint) -> Architecture:
    """The model in ``checkpoint`` with its head, and with modules of sentence-transformers behind it."""
    architecture = read_gpt2(checkpoint)
    interface, layers = architecture.interface, len(architecture.widths)
    modules = read_modules(checkpoint, interface.hidden)
    signature = interface.signature(checkpoint, architecture.positions, masked=modules is not None)
    signature = with_modules(signature, checkpoint, modules)

    def load() -> torch.nn.Module:
        from .load import load_gpt2

        return load_gpt2(checkpoint, architecture, signature, modules)

    return Architecture(
        spec=_spec(checkpoint, architecture),
        signature=signature,
        parameter_shapes=architecture.parameter_shapes,
        workload=partial(_workload, architecture),
        load=load,
        names_in_files=names_in_files(checkpoint, architecture),
        transposed=architecture.transposed,
        modules=modules,
        cached=interface.cached_form(
            architecture.positions, (CachedLayer(architecture.heads, architecture.head_dim),) * layers
        ),
        variant_problems=attention_problems(architecture.heads, architecture.heads),
    )


FAMILY = Family("gpt2", ("gpt2",), read, reads_config_alone=True)


def _spec(checkpoint: Checkpoint, architecture: Gpt2Architecture) -> ElasticSpec:
    axes, slices = [], []
    for layer, width in enumerate(architecture.widths):
        axis, mlp = Axis(f"layers.{layer}.ffn", width), f"{architecture.interface.prefix}h.{layer}.mlp"
        axes.append(axis)
        slices += [PrefixSlice(f"{mlp}.c_fc.{kind}", 0, axis.name) for kind in ("weight", "bias")]
        slices.append(PrefixSlice(f"{mlp}.c_proj.weight", 1, axis.name))
    nesting = read_nesting(checkpoint, ("ffn",))
    return ElasticSpec(tuple(axes), tuple(slices), nesting.nested, depth=len(axes), granularities=nesting.granularities)


def _workload(architecture: Gpt2Architecture, submodel: Submodel, bucket: Bucket) -> list[Op]:
    interface, tokens = architecture.interface, bucket.tokens
    hidden, heads, size = interface.hidden, architecture.heads, architecture.head_dim
    ops = [lookup("embeddings", 2 * tokens * hidden)]
    for layer in range(len(architecture.widths)):
        at = f"layers.{layer}"
        ops += pre_norm_layer(at, bucket, hidden, heads, size, submodel[f"{at}.ffn"])
    ops.append(elementwise("norm", tokens * hidden, passes=4))
    if interface.head is not None:
        ops.append(linear(interface.head.module, tokens, hidden, interface.answers, interface.head.bias))
    return ops
