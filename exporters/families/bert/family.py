"""BERT encoders and the models that share BERT's module layout.

Axes per layer: ``ffn`` (rows of ``intermediate.dense``, columns of ``output.dense``) and ``heads`` (blocks of
``head_dim`` rows of query, key and value, the same columns of ``attention.output.dense``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ....bucket import Bucket
from ....bundle.entries.tensor_spec import RowNeed, TensorSpec
from ....bundle.manifest import TextEntry
from ....elastic import Axis, ElasticSpec, PrefixSlice, Submodel
from ....workload import Op, elementwise, linear, lookup, self_attention
from ...architecture import Architecture
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.config import read_nesting
from ...family import Family
from ...hugging_face.interface import attention_problems, with_modules
from ...sentence_transformers.read_modules import read_modules
from ...signature import Signature
from .architecture import BertArchitecture, names_in_files, read_bert
from .heads import Output
from .layouts import LAYOUTS

if TYPE_CHECKING:  # plans are made without torch
    import torch

_ATTENTION_NAME = re.compile(r"(?:.+\.)?encoder\.layer\.(\d{1,9})\.attention\.self")


def read(checkpoint: Checkpoint) -> Architecture:
    """The encoder in ``checkpoint`` with its head, and with modules of sentence-transformers behind it."""
    architecture = read_bert(checkpoint)
    modules = read_modules(checkpoint, architecture.hidden)
    signature = with_modules(_signature(checkpoint, architecture), checkpoint, modules)

    def load() -> torch.nn.Module:
        from .load import load_bert

        return load_bert(checkpoint, architecture, signature, modules)

    return Architecture(
        spec=_spec(checkpoint, architecture),
        signature=signature,
        parameter_shapes=architecture.parameter_shapes,
        workload=partial(_workload, architecture),
        load=load,
        narrow=_narrow,
        names_in_files=names_in_files(checkpoint, architecture),
        modules=modules,
        variant_problems=attention_problems(architecture.heads, architecture.heads),
    )


FAMILY = Family("bert", tuple(LAYOUTS), read)


def _spec(checkpoint: Checkpoint, architecture: BertArchitecture) -> ElasticSpec:
    axes, slices = [], []
    for layer in range(architecture.layers):
        block = f"{architecture.prefix}encoder.layer.{layer}."
        ffn = Axis(f"layers.{layer}.ffn", architecture.ffn)
        attention = Axis(f"layers.{layer}.heads", architecture.heads)
        axes += [ffn, attention]
        slices += [
            PrefixSlice(f"{block}intermediate.dense.weight", 0, ffn.name),
            PrefixSlice(f"{block}intermediate.dense.bias", 0, ffn.name),
            PrefixSlice(f"{block}output.dense.weight", 1, ffn.name),
            *(
                PrefixSlice(f"{block}attention.self.{part}.{kind}", 0, attention.name, architecture.head_dim)
                for part in ("query", "key", "value")
                for kind in ("weight", "bias")
            ),
            PrefixSlice(f"{block}attention.output.dense.weight", 1, attention.name, architecture.head_dim),
        ]
    nesting = read_nesting(checkpoint, ("ffn", "heads"))
    return ElasticSpec(
        tuple(axes), tuple(slices), nesting.nested, depth=architecture.layers, granularities=nesting.granularities
    )


def _signature(checkpoint: Checkpoint, architecture: BertArchitecture) -> Signature:
    tokens = ("batch", "sequence")
    needs: RowNeed = "first_token" if architecture.causal else "token"
    inputs = [
        TensorSpec("input_ids", "int64", tokens, pad=architecture.pad, high=architecture.vocabulary),
        TensorSpec("attention_mask", "int64", tokens, pad=0, high=2, row_needs=needs),
    ]
    if architecture.types > 1:
        inputs.append(TensorSpec("token_type_ids", "int64", tokens, pad=0, high=architecture.types))
    text = None
    if checkpoint.tokenizer_files:
        type_ids = "token_type_ids" if len(inputs) == 3 else None
        text = TextEntry("tokenizer.json", "input_ids", "attention_mask", type_ids, None)
    outputs = tuple(_outputs(architecture))
    return Signature(tuple(inputs), outputs, architecture.positions, "attention_mask", text)


def _workload(architecture: BertArchitecture, submodel: Submodel, bucket: Bucket) -> list[Op]:
    hidden, t = architecture.hidden, bucket.tokens
    ops = [
        lookup("embeddings", 3 * t * architecture.embedding),
        elementwise("embeddings.norm", t * architecture.embedding, passes=4),
    ]
    if architecture.embedding != hidden:
        ops.append(linear("embeddings.project", t, architecture.embedding, hidden))
    for layer in range(architecture.layers):
        at = f"layers.{layer}"
        heads, width = submodel[f"{at}.heads"], submodel[f"{at}.ffn"]
        ops += [
            *self_attention(f"{at}.attention", bucket, hidden, heads, architecture.head_dim),
            elementwise(f"{at}.attention.norm", t * hidden, passes=5),
            linear(f"{at}.ffn.up", t, hidden, width),
            elementwise(f"{at}.ffn.activation", t * width, passes=2),
            linear(f"{at}.ffn.down", t, width, hidden),
            elementwise(f"{at}.ffn.norm", t * hidden, passes=5),
        ]
    return [*ops, *_head_ops(architecture, bucket)]


def _narrow(module: torch.nn.Module, submodel: Submodel) -> None:
    for name, part in module.named_modules():
        if match := _ATTENTION_NAME.fullmatch(name):
            heads = submodel[f"layers.{match[1]}.heads"]
            attention: Any = part
            attention.num_attention_heads = heads
            attention.all_head_size = heads * attention.attention_head_size


def _outputs(architecture: BertArchitecture) -> Iterator[TensorSpec]:
    """What the class that config.json names returns."""
    if architecture.head is not None:
        yield from (_output(architecture, output) for output in architecture.head.outputs)
        return
    hidden = architecture.hidden
    yield TensorSpec("last_hidden_state", "float32", ("batch", "sequence", hidden))
    if architecture.pooler:
        yield TensorSpec("pooler_output", "float32", ("batch", hidden))


def _output(architecture: BertArchitecture, output: Output) -> TensorSpec:
    assert architecture.head is not None
    follows = architecture.head.follows and architecture.causal
    dims = tuple(dim if dim == "batch" or dim == "sequence" else architecture.size(dim) for dim in output.dims)
    return TensorSpec(output.name, "float32", dims, role="next_tokens" if follows else output.role)


def _head_ops(architecture: BertArchitecture, bucket: Bucket) -> Iterator[Op]:
    """Each linear layer of a head has an activation, a norm or nothing behind it: of its own size, or none."""
    if architecture.pooler:
        yield linear("pooler", bucket.batch, architecture.hidden, architecture.hidden)
    if architecture.head is None:
        return
    rows = {"token": bucket.tokens, "row": bucket.batch}
    for name, layer in architecture.head.layers.items():
        yield linear(name, rows[layer.at], architecture.size(layer.inputs), architecture.size(layer.outputs))
    for name, size in architecture.head.norms.items():
        yield elementwise(name, bucket.tokens * architecture.size(size), passes=6)  # with the activation before it
    if architecture.head.vocabulary is not None:
        yield linear(architecture.head.vocabulary, bucket.tokens, architecture.embedding, architecture.vocabulary)
