"""Multi-exit, slenderised BERT encoders (COST-EFF): every layer thin, an exit after some of them. See docs/cost-eff.md.

Axes: ``depth`` with the exits' layers as choices; per layer ``ffn`` and ``heads`` as in BERT, each at the width that
slenderising left; a layer without heads or without FFN channels has no such axis. The rank of a factorised embedding is
no axis: a lookup reads rows of ``[V, R]``, so a prefix of ``R`` is no contiguous part of the table, and the transpose
would make every lookup jump ``R`` times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ....bundle.entries.tensor_spec import TensorSpec
from ....bundle.manifest import Proof, TextEntry
from ....elastic import DEPTH, Axis, ElasticSpec, PrefixSlice, Submodel
from ....runtime.inputs.arrays import Arrays
from ...architecture import Architecture
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.config import Nesting, read_nesting
from ...family import Family
from ...signature import Signature
from .architecture import CostEffArchitecture
from .forward_ops import forward_ops
from .read_architecture import read_architecture
from .segments import CostEffExits, answer_specs
from .sidecar import read_sidecar

if TYPE_CHECKING:  # plans are made without torch
    import torch

_LAYER_OR_EXIT_NAME = re.compile(r"encoder\.layer\.(?P<layer>\d{1,9})\.|exits\.(?P<exit>\d{1,9})\.")


def read(checkpoint: Checkpoint) -> Architecture:
    """The model in ``checkpoint``, with its exits where their answers have an entropy."""
    sidecar = read_sidecar(checkpoint.folder)
    architecture = read_architecture(checkpoint, sidecar)
    signature, layers = _signature(checkpoint, architecture), architecture.exits.layers
    spec = _spec(architecture, read_nesting(checkpoint, ("ffn", "heads")))

    def load() -> torch.nn.Module:
        import torch

        from .model import Answering, CostEffModel
        from .weights import read_weights

        with torch.device("meta"):
            model = CostEffModel(architecture)
        model.load_state_dict(read_weights(checkpoint, architecture, spec), assign=True)
        return Answering(model).eval().requires_grad_(False)

    def prove_load(feeds: Arrays) -> Iterator[Proof]:
        from .prove_load import prove_factors, prove_kept

        stored = replace(architecture, layers=architecture.stored, kept={})
        yield from prove_kept(checkpoint, architecture, (spec, _spec(stored, Nesting())), feeds)
        yield from prove_factors(checkpoint, architecture, spec, feeds)

    return Architecture(
        spec=spec,
        signature=signature,
        parameter_shapes=architecture.parameter_shapes,
        workload=partial(forward_ops, architecture),
        load=load,
        narrow=_narrow,
        exits=CostEffExits(architecture, sidecar, signature.inputs, layers) if architecture.has_entropy else None,
        prove_load=prove_load,
    )


FAMILY = Family("cost_eff", ("cost_eff",), read)


def _signature(checkpoint: Checkpoint, architecture: CostEffArchitecture) -> Signature:
    tokens = ("batch", "sequence")
    inputs = [
        TensorSpec("input_ids", "int64", tokens, pad=architecture.pad, high=architecture.vocabulary),
        TensorSpec("attention_mask", "int64", tokens, pad=0, high=2, row_needs="token"),
    ]
    if architecture.types > 1:
        inputs.append(TensorSpec("token_type_ids", "int64", tokens, pad=0, high=architecture.types))
    text = None
    if checkpoint.tokenizer_files:
        type_ids = "token_type_ids" if architecture.types > 1 else None
        text = TextEntry("tokenizer.json", "input_ids", "attention_mask", type_ids, None)
    return Signature(tuple(inputs), answer_specs(architecture), architecture.positions, "attention_mask", text)


def _narrow(module: torch.nn.Module, submodel: Submodel) -> None:
    from .model import inner_model

    model = inner_model(module)
    assert submodel.depth is not None
    del model.encoder.layer[submodel.depth :]
    for layer in [name for name in model.exits if int(name) > submodel.depth]:
        del model.exits[layer]


def _spec(architecture: CostEffArchitecture, nesting: Nesting) -> ElasticSpec:
    axes = [Axis(DEPTH, len(architecture.layers), architecture.exits.layers)]
    slices = []
    min_depth = {}
    for name in architecture.parameter_shapes:
        if placed := _LAYER_OR_EXIT_NAME.match(name):
            min_depth[name] = int(placed["exit"]) if placed["exit"] else int(placed["layer"]) + 1
    for layer, widths in enumerate(architecture.layers):
        block = f"encoder.layer.{layer}"
        if widths.ffn:
            ffn = Axis(f"layers.{layer}.ffn", widths.ffn)
            axes.append(ffn)
            slices += [
                PrefixSlice(f"{block}.intermediate.dense.weight", 0, ffn.name),
                PrefixSlice(f"{block}.intermediate.dense.bias", 0, ffn.name),
                PrefixSlice(f"{block}.output.dense.weight", 1, ffn.name),
            ]
        if widths.heads:
            heads = Axis(f"layers.{layer}.heads", widths.heads)
            axes.append(heads)
            slices += [
                *(
                    PrefixSlice(f"{block}.attention.self.{part}.{kind}", 0, heads.name, architecture.head_size)
                    for part in ("query", "key", "value")
                    for kind in ("weight", "bias")
                ),
                PrefixSlice(f"{block}.attention.output.dense.weight", 1, heads.name, architecture.head_size),
            ]
    return ElasticSpec(
        tuple(axes),
        tuple(slices),
        nesting.nested,
        depth=len(architecture.layers),
        min_depth=min_depth,
        granularities=nesting.granularities,
    )
