"""What classes of decoders have behind the decoder, take and return, and how they generate (no torch here)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ...bundle.entries.generation_entry import CachedLayer
from ...bundle.entries.tensor_spec import TensorSpec
from ...bundle.manifest import TextEntry
from ...errors import CheckpointError
from ..architecture import EVERY_VARIANT
from ..cached_form import CachedForm
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import read_classes, read_pad
from ..sentence_transformers.modules import TOKENS
from ..sentence_transformers.read_modules import SentenceModules
from ..sentence_transformers.text_settings import with_text_settings
from ..signature import Signature
from .tensors import Shape, linear_shapes

if TYPE_CHECKING:  # plans are made without torch
    import torch


EMBEDDING, HIDDEN = "sentence_embedding", "last_hidden_state"
# 1 where a token is pooled; an input where a pooling leaves the tokens of prompts out.
POOLING_MASK = "pooling_mask"


@dataclass(frozen=True)
class DecoderHead:
    """What a class has behind the decoder: one linear layer, called ``module``, to tokens or to classes.

    ``outputs`` are the names of what it returns, ``prefix`` the attribute that holds the decoder. ``classes`` is the
    only number of classes that it can have. ``last``: it answers once a row, at the last token that is not padding.
    """

    module: str
    outputs: tuple[str, ...] = ("logits",)
    to: Literal["tokens", "classes"] = "classes"
    bias: bool = False
    last: bool = False
    classes: int | None = None
    prefix: str = "model"


NEXT_TOKEN = DecoderHead("lm_head", to="tokens")
SEQUENCE = DecoderHead("score", last=True)
TOKEN = DecoderHead("score", bias=True)
QUESTION = DecoderHead("qa_outputs", ("start_logits", "end_logits"), bias=True, classes=2)


@dataclass(frozen=True)
class DecoderInterface:
    """``head`` is None for the base model, which answers with its hidden states; ``pad`` fills ``input_ids``."""

    head: DecoderHead | None
    vocabulary: int
    hidden: int
    classes: int
    pad: int

    @property
    def prefix(self) -> str:
        """What stands before the decoder's names: nothing where it is the whole model."""
        return "" if self.head is None else f"{self.head.prefix}."

    @property
    def answers(self) -> int:
        """Numbers that the head returns for each position that it answers at, all outputs together."""
        if self.head is None:
            return self.hidden
        return self.vocabulary if self.head.to == "tokens" else self.classes

    def head_shapes(self, tied: bool) -> dict[str, Shape]:
        """Parameters of the head; a ``tied`` one to tokens is the embedding."""
        if self.head is None or (self.head.to == "tokens" and tied):
            return {}
        return linear_shapes(self.head.module, self.hidden, self.answers, self.head.bias)

    def signature(
        self, checkpoint: Checkpoint, positions: int, masked: bool, shortened: str | None = None
    ) -> Signature:
        """``masked``: what pools tokens must know them. A position before the first token would see none."""
        tokens = ("batch", "sequence")
        ids = TensorSpec("input_ids", "int64", tokens, pad=self.pad, high=self.vocabulary)
        stated = TensorSpec("attention_mask", "int64", tokens, pad=0, high=2, row_needs="first_token")
        mask = stated.name if masked else None
        text = TextEntry("tokenizer.json", ids.name, mask, None, None) if checkpoint.tokenizer_files else None
        inputs = (ids, stated) if masked else (ids,)
        return Signature(inputs, self._outputs(), positions, mask, text, shortened=shortened)

    def cached_form(self, positions: int, layers: tuple[CachedLayer, ...]) -> CachedForm | None:
        """How the model generates; ``layers`` are the ones that have keys and values of their own, in order. None where
        there is no head over the vocabulary."""
        if self.head is None or self.head.to != "tokens":
            return None

        def cached(module: torch.nn.Module) -> torch.nn.Module:
            from .generating import CachedDecoder

            return CachedDecoder(module.model, layers).eval()

        def recorded(module: torch.nn.Module) -> torch.nn.Module:
            from .generating import RecordedDecoder

            return RecordedDecoder(module.model, layers).eval()

        return CachedForm(self.vocabulary, positions, layers, cached, recorded)

    def _outputs(self) -> tuple[TensorSpec, ...]:
        head, tokens = self.head, ("batch", "sequence")
        if head is None:
            return (TensorSpec("last_hidden_state", "float32", (*tokens, self.hidden)),)
        if head.to == "tokens":
            return (TensorSpec("logits", "float32", (*tokens, self.answers), role="next_tokens"),)
        if len(head.outputs) > 1:  # one number each for every position
            return tuple(TensorSpec(name, "float32", tokens) for name in head.outputs)
        dims = ("batch",) if head.last else tokens
        return (TensorSpec("logits", "float32", (*dims, self.answers)),)


def read_interface(
    checkpoint: Checkpoint,
    classes: Mapping[str, DecoderHead | None],
    vocabulary: int,
    hidden: int,
    default_pad: int | None = None,
) -> DecoderInterface:
    """The interface of the class that config.json names, of those in ``classes``; without a name it is the base model,
    the first, as for transformers.

    Raises CheckpointError for another class, a number of labels that it cannot have, and a padding token that is none
    or that it lacks.
    """
    where = f"{checkpoint.folder / 'config.json'}"
    name = checkpoint.architecture or next(iter(classes))
    if name not in classes:
        raise CheckpointError(f"{where}: architectures: expected one of {', '.join(classes)}, got {name:.80}")
    head, pad, count = classes[name], read_pad(checkpoint, vocabulary, default_pad), read_classes(checkpoint)
    if head is not None and head.last and pad is None:
        raise CheckpointError(f"{where}: pad_token_id: {name} finds the end of a text by it; set it")
    if head is not None and head.classes not in (None, count):
        raise CheckpointError(f"{where}: num_labels: expected {head.classes} for {name}, got {count}")
    return DecoderInterface(head, vocabulary, hidden, count, pad or 0)


def attention_problems(heads: int, shared: int) -> dict[str, dict[str, str]]:
    """For ``Architecture.variant_problems``, of a model whose ``heads`` read ``shared`` pairs of keys and values."""
    if shared == 1 < heads:
        why = (
            "all heads share keys and values already, engines that generate keep one pair of them, and their queries "
            "have projections of their own, which leaves nothing to fold"
        )
    else:
        own = "each head has keys and values of its own" if shared == heads else f"{heads} heads share {shared} pairs"
        why = (
            f"{own}; making heads share one pair (multi-query attention) is another function, which takes retraining, "
            "and nestforge does not do that"
        )
    return {"attention": {EVERY_VARIANT: f"{why} (docs/mhe.md)"}}


def with_modules(signature: Signature, checkpoint: Checkpoint, modules: SentenceModules | None) -> Signature:
    """``signature`` of the transformer alone, which has a mask and returns its tokens, with the embedding that
    ``modules`` make of them, the tokens where modules change those first, and with what the folder says of texts."""
    if modules is None:
        return signature
    mask = next(spec for spec in signature.inputs if spec.name == signature.mask)
    pooling = replace(mask, name=POOLING_MASK, row_needs=None)  # of a prompt alone it leaves nothing
    inputs = (*signature.inputs, *([pooling] if modules.leaves_prompt_out else []))
    outputs = [*signature.outputs, TensorSpec(EMBEDDING, "float32", ("batch", modules.width))]
    if modules.token_width is not None:
        outputs.insert(-1, TensorSpec(TOKENS, "float32", ("batch", "sequence", modules.token_width)))
    text = signature.text
    if text is not None:
        pooled = POOLING_MASK if modules.leaves_prompt_out else None
        text = with_text_settings(checkpoint, replace(text, embedding=EMBEDDING), pooled)
    return replace(signature, inputs=inputs, outputs=tuple(outputs), text=text)
