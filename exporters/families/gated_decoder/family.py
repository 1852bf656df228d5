"""Decoders with a gated FFN, as Llama, Mistral, Qwen and Gemma have it, up to Gemma 3n. See docs/models.md.

Axis per layer: ``ffn``, the neurons that gate and up make and down reads. One full-sequence pass answers at every
position; attention is causal, so what pads a text on its right changes nothing before it and no mask is needed. Modules
of sentence-transformers pool those tokens that a mask names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ....elastic import Axis, Bucket, ElasticSpec, PrefixSlice, Submodel
from ....runtime.bundle.manifest import TensorSpec, TextEntry
from ....workload import Op
from ...checkpoints.checkpoint import Checkpoint
from ...family import Family, Signature
from ...hugging_face.sentence_interface import with_modules
from ...sentence_transformers.read_modules import SentenceModules, read_modules
from .architecture import DecoderArchitecture
from .forward_ops import forward_ops
from .layouts import LAYOUTS
from .nesting import decoder_nesting
from .read_architecture import names_in_files, read_architecture

if TYPE_CHECKING:
    import torch

_MLP = re.compile(r".+\.layers\.(\d{1,9})\.mlp")


class GatedDecoderFamily(Family):
    name: ClassVar[str] = "gated_decoder"
    model_types: ClassVar[tuple[str, ...]] = tuple(LAYOUTS)
    reads_config_alone: ClassVar[bool] = True

    def describe(self, checkpoint: Checkpoint) -> ElasticSpec:
        architecture = read_architecture(checkpoint)
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

    def signature(self, checkpoint: Checkpoint) -> Signature:
        architecture = read_architecture(checkpoint)
        tokens, vocabulary = ("batch", "sequence"), architecture.vocabulary
        ids = TensorSpec("input_ids", "int64", tokens, pad=architecture.pad, high=vocabulary)
        has_text = (checkpoint.folder / "tokenizer.json").is_file()
        modules = self.sentence_modules(checkpoint)
        # What pools tokens must know them. A position before the first token would see none.
        stated = TensorSpec("attention_mask", "int64", tokens, pad=0, high=2, row_needs="first_token")
        mask = None if modules is None else stated
        name = mask.name if mask else None
        text = TextEntry("tokenizer.json", ids.name, name, None, None) if has_text else None
        inputs = (ids,) if mask is None else (ids, mask)
        signature = Signature(inputs, _outputs(architecture), architecture.positions, name, text)
        return with_modules(signature, checkpoint, modules)

    def sentence_modules(self, checkpoint: Checkpoint) -> SentenceModules | None:
        return read_modules(checkpoint, read_architecture(checkpoint).hidden)

    def workload(self, checkpoint: Checkpoint, submodel: Submodel, bucket: Bucket) -> list[Op]:
        return forward_ops(read_architecture(checkpoint), submodel, bucket)

    def parameter_shapes(self, checkpoint: Checkpoint) -> Mapping[str, tuple[int, ...]]:
        return read_architecture(checkpoint).parameter_shapes

    def names_in_files(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        return names_in_files(checkpoint)

    def load(self, checkpoint: Checkpoint) -> torch.nn.Module:
        from .load import load_decoder

        modules = self.sentence_modules(checkpoint)
        return load_decoder(checkpoint, read_architecture(checkpoint), self.signature(checkpoint), modules)

    def narrow(self, module: torch.nn.Module, submodel: Submodel) -> None:
        for name, part in module.named_modules():
            if match := _MLP.fullmatch(name):
                mlp: Any = part
                mlp.intermediate_size = submodel[f"layers.{match[1]}.ffn"]


FAMILY = GatedDecoderFamily()


def _outputs(architecture: DecoderArchitecture) -> tuple[TensorSpec, ...]:
    head, tokens = architecture.head, ("batch", "sequence")
    if head is None:
        return (TensorSpec("last_hidden_state", "float32", (*tokens, architecture.hidden)),)
    if head.to == "tokens":
        return (TensorSpec("logits", "float32", (*tokens, architecture.answers), role="next_tokens"),)
    if len(head.outputs) > 1:  # one number each for every position
        return tuple(TensorSpec(name, "float32", tokens) for name in head.outputs)
    dims = ("batch",) if head.last else tokens
    return (TensorSpec("logits", "float32", (*dims, architecture.answers)),)
