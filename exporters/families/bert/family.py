"""BERT encoders and the models that share BERT's module layout.

Axes per layer: ``ffn`` (rows of ``intermediate.dense``, columns of ``output.dense``) and ``heads`` (blocks of
``head_dim`` rows of query, key and value, the same columns of ``attention.output.dense``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ....elastic import Axis, Bucket, ElasticSpec, PrefixSlice, Submodel
from ....runtime.bundle.manifest import RowNeed, TensorSpec, TextEntry
from ....workload import Op, elementwise, linear, lookup, self_attention
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.elastic_config import read_nesting
from ...family import Family, Signature
from ...hugging_face.sentence_interface import with_modules
from ...sentence_transformers.read_modules import SentenceModules, read_modules
from .architecture import BertArchitecture, checked_shapes, names_in_files, read_bert
from .heads import Output
from .layouts import LAYOUTS

if TYPE_CHECKING:
    import torch

_ATTENTION = re.compile(r"(?:.+\.)?encoder\.layer\.(\d{1,9})\.attention\.self")


class BertFamily(Family):
    name: ClassVar[str] = "bert"
    model_types: ClassVar[tuple[str, ...]] = tuple(LAYOUTS)

    def describe(self, checkpoint: Checkpoint) -> ElasticSpec:
        architecture = read_bert(checkpoint)
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

    def signature(self, checkpoint: Checkpoint) -> Signature:
        architecture = read_bert(checkpoint)
        tokens = ("batch", "sequence")
        needs: RowNeed = "first_token" if architecture.causal else "token"
        inputs = [
            TensorSpec("input_ids", "int64", tokens, pad=architecture.pad, high=architecture.vocabulary),
            TensorSpec("attention_mask", "int64", tokens, pad=0, high=2, row_needs=needs),
        ]
        if architecture.types > 1:
            inputs.append(TensorSpec("token_type_ids", "int64", tokens, pad=0, high=architecture.types))
        text = None
        if (checkpoint.folder / "tokenizer.json").is_file():
            type_ids = "token_type_ids" if len(inputs) == 3 else None
            text = TextEntry("tokenizer.json", "input_ids", "attention_mask", type_ids, None)
        outputs = tuple(_outputs(architecture))
        signature = Signature(tuple(inputs), outputs, architecture.positions, "attention_mask", text)
        return with_modules(signature, checkpoint, self.sentence_modules(checkpoint))

    def sentence_modules(self, checkpoint: Checkpoint) -> SentenceModules | None:
        return read_modules(checkpoint, read_bert(checkpoint).hidden)

    def workload(self, checkpoint: Checkpoint, submodel: Submodel, bucket: Bucket) -> list[Op]:
        architecture = read_bert(checkpoint)
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

    def parameter_shapes(self, checkpoint: Checkpoint) -> Mapping[str, tuple[int, ...]]:
        return checked_shapes(checkpoint)

    def names_in_files(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        return names_in_files(checkpoint)

    def load(self, checkpoint: Checkpoint) -> torch.nn.Module:
        from .load import load_bert

        modules = self.sentence_modules(checkpoint)
        return load_bert(checkpoint, read_bert(checkpoint), self.signature(checkpoint), modules)

    def narrow(self, module: torch.nn.Module, submodel: Submodel) -> None:
        for name, part in module.named_modules():
            if match := _ATTENTION.fullmatch(name):
                heads = submodel[f"layers.{match[1]}.heads"]
                attention: Any = part
                attention.num_attention_heads = heads
                attention.all_head_size = heads * attention.attention_head_size


FAMILY = BertFamily()


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
