"""Classes of transformers: heads behind the base model, inputs, outputs and generation (no torch here)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from re import Pattern
from typing import TYPE_CHECKING, Any, Literal

from ...bucket import Bucket
from ...bundle.entries.generation_entry import CachedLayer
from ...bundle.entries.tensor_spec import Role, RowNeed, TensorSpec
from ...workload import Op, elementwise, linear
from ..architecture import EVERY_VARIANT
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import read_classes, read_pad
from ..family import Deferred
from ..parts import CachedSpec
from ..signature import Signature, text_signature
from .tensors import Parameters, Shape

if TYPE_CHECKING:
    import torch

    from . import generating
else:
    generating = Deferred(".generating", __package__)

EMBEDDING, HIDDEN = "sentence_embedding", "last_hidden_state"
# Places of words on a page, left, top, right and bottom, and the key of how many places there are.
BOXES, BOX_PLACES = "bbox", "max_2d_position_embeddings"
# 1 where a token is pooled; an input where a pooling leaves the tokens of prompts out.
POOLING_MASK = "pooling_mask"
# Features of a token between or before the layers, tokens of the vocabulary, classes; or the number itself.
Size = Literal["hidden", "embedding", "vocabulary", "classes"] | int


@dataclass(frozen=True)
class Dense:
    """A linear layer of a head, from ``inputs`` to ``outputs``, at every position or once a row."""

    inputs: Size
    outputs: Size
    at: Literal["token", "row"] = "token"
    bias: bool = True


@dataclass(frozen=True)
class Head:
    """A class's head behind the base model, and its outputs: ``outputs`` by name, with their dimensions behind
    the batch, ``layers`` and ``norms`` by module name.

    ``roles`` are those of outputs whose shape does not tell it (bundle/roles.py). ``pooled``: the head reads a pooler.
    ``vocabulary`` is the module of the matrix back to the vocabulary, whose weight is the token embedding where the
    model is tied, and ``bias`` the parameter that is then its bias. ``follows``: of a causal model, the logits are
    those of the next token. ``last``: it answers once a row, at the last token that is not padding. ``choices``: the
    class takes ``[batch, choices, sequence]``, and a row is one choice. ``classes`` is the only number of classes that
    it can have, ``prefix`` the attribute that holds the base model.
    """

    outputs: Mapping[str, tuple[Literal["sequence"] | Size, ...]]
    layers: Mapping[str, Dense] = field(default_factory=dict)
    norms: Mapping[str, Size] = field(default_factory=dict)
    roles: Mapping[str, Role] = field(default_factory=dict)
    pooled: bool = False
    vocabulary: str | None = None
    bias: str | None = None
    follows: bool = False
    last: bool = False
    choices: bool = False
    classes: int | None = None
    prefix: str = "model"

    def add_to(self, found: Parameters, size: Callable[[Size], int], tied: bool) -> None:
        """Adds its parameters."""
        for name, layer in self.layers.items():
            found.linear(name, size(layer.inputs), size(layer.outputs), layer.bias)
        for name, width in self.norms.items():
            found.norm(name, size(width))
        if self.bias is not None:
            found.add(self.bias, size("vocabulary"))
        if self.vocabulary is not None and not tied:
            found.linear(self.vocabulary, size("embedding"), size("vocabulary"), self.bias is not None)


NEXT_TOKEN = Head({"logits": ("sequence", "vocabulary")}, vocabulary="lm_head", follows=True)
TOKEN_CLASSES = Head({"logits": ("sequence", "classes")}, {"classifier": Dense("hidden", "classes")})
# A class for a whole text, as decoders have it.
LAST_TOKEN_CLASSES = Head({"logits": ("classes",)}, {"score": Dense("hidden", "classes", bias=False)}, last=True)
# Where an answer starts and where it ends: one score of each for every position.
QUESTION = Head(
    {"start_logits": ("sequence",), "end_logits": ("sequence",)}, {"qa_outputs": Dense("hidden", "classes")}, classes=2
)


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A class of texts: its ``head``, None for the base model, which answers with its hidden states, and its sizes.

    ``embedding`` numbers has a token before the layers, ``hidden`` between them; ``widths`` are FFN neurons by layer,
    ``heads`` those of attention, of size ``head_dim``, and ``positions`` the tokens of the longest text. ``pad`` fills
    ``input_ids``. ``tied``: the matrix back to the vocabulary is the token embedding. ``causal``: positions see no
    later ones.
    """

    head: Head | None
    hidden: int
    embedding: int
    vocabulary: int
    heads: int
    head_dim: int
    widths: tuple[int, ...]
    positions: int
    classes: int
    pad: int
    tied: bool
    causal: bool = True

    @property
    def prefix(self) -> str:
        """Prefix of the base model's names: nothing where it is the whole model."""
        return "" if self.head is None else f"{self.head.prefix}."

    def size(self, size: Size) -> int:
        """The number that a size stands for."""
        return size if isinstance(size, int) else int(getattr(self, size))

    def head_ops(self, bucket: Bucket) -> Iterator[Op]:
        """Each linear layer of a head has an activation, a norm or nothing behind it: of its own size, or none."""
        if self.head is None:
            return
        rows = {"token": bucket.tokens, "row": bucket.batch}
        for name, layer in self.head.layers.items():
            yield linear(name, rows[layer.at], self.size(layer.inputs), self.size(layer.outputs), layer.bias)
        for name, size in self.head.norms.items():
            yield elementwise(name, bucket.tokens * self.size(size), passes=6)  # with the activation before it
        if self.head.vocabulary is not None:
            bias = self.head.bias is not None
            yield linear(self.head.vocabulary, bucket.tokens, self.embedding, self.vocabulary, bias)

    def unused(self, heads: Collection[Head | None], others: Pattern[str]) -> Callable[[str], bool]:
        """Whether a tensor of the files that is no parameter is one of another class's head, a copy of the tied matrix
        or one of ``others``."""
        every, own = Parameters(), Parameters()
        for head in filter(None, heads):
            head.add_to(every, self.size, tied=False)
        hidden = set[str]()
        if self.head is not None:
            self.head.add_to(own, self.size, tied=False)
            if self.tied and self.head.vocabulary is not None:
                hidden = {name for name in own.shapes if name.rpartition(".")[0] == self.head.vocabulary}
        modules = {name.rpartition(".")[0] for name in every.shapes}
        modules -= {name.rpartition(".")[0] for name in own.shapes}

        def is_unused(name: str) -> bool:
            module, _, kind = name.rpartition(".")
            is_other = module in modules and kind in ("weight", "bias")
            return is_other or name in hidden or others.fullmatch(name) is not None

        return is_unused

    def signature(
        self, checkpoint: Checkpoint, needs: RowNeed | None, types: int = 1, shortened: str | None = None
    ) -> Signature:
        """Inputs and outputs, for texts of tokens of so many ``types``. ``needs`` is the token that a row must have, of
        a model that takes a mask."""
        sizes = (self.positions, self.vocabulary, self.pad)
        return text_signature(checkpoint, list(self._outputs()), *sizes, needs, types, shortened)

    def _outputs(self) -> Iterator[TensorSpec]:
        """Outputs of the class that config.json names."""
        if self.head is None:
            yield TensorSpec(HIDDEN, "float32", ("batch", "sequence", self.hidden))
            return
        for name, behind in self.head.outputs.items():
            dims = tuple(dim if dim == "sequence" else self.size(dim) for dim in behind)
            role = "next_tokens" if self.head.follows and self.causal else self.head.roles.get(name)
            yield TensorSpec(name, "float32", ("batch", *dims), role=role)

    def cached_spec(self, layers: Iterable[CachedLayer]) -> CachedSpec | None:
        """How a decoder generates; ``layers`` are the ones that have keys and values of their own, in order. None where
        there is no head over the vocabulary."""
        if self.head is None or not self.head.follows:
            return None
        layers = tuple(layers)
        return CachedSpec(
            self.vocabulary,
            self.positions,
            layers,
            lambda module: generating.CachedDecoder(module.model, layers).eval(),
            lambda module: generating.RecordedDecoder(module.model, layers).eval(),
            takes_depth=True,
        )


def read_head(checkpoint: Checkpoint, classes: Mapping[str, Head | None]) -> Head | None:
    """The head of the class that config.json names, of those in ``classes``; without a name it is the base model, the
    first, as for transformers.

    Raises CheckpointError for another class, and for a number of labels that it cannot have.
    """
    name = checkpoint.class_among(classes)
    head, count = classes[name], read_classes(checkpoint)
    if head is not None and head.classes not in (None, count):
        raise checkpoint.misfit(f"num_labels: expected {head.classes} for {name}, got {count}")
    return head


def read_decoder(
    checkpoint: Checkpoint, classes: Mapping[str, Head | None], vocabulary: int, default_pad: int | None = None
) -> tuple[Head | None, int]:
    """``read_head`` of a decoder, and its padding token or 0. Raises CheckpointError also for a token that is none, or
    that the class lacks."""
    head, pad = read_head(checkpoint, classes), read_pad(checkpoint, vocabulary, default_pad)
    if head is not None and head.last and pad is None:
        raise checkpoint.misfit(f"pad_token_id: {checkpoint.architecture} finds the end of a text by it; set it")
    return head, pad or 0


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How the user's module is loaded, by functions on it that import torch inside themselves.

    ``class_name``: the class in place of the one that ``config.json`` names. ``widths`` is the key that may list FFN
    widths by layer; ``shapes`` are then those of the class's own parameters, which it is given before weights are
    loaded, of classes that know one width alone. ``finish`` changes the loaded module. ``given`` are the class's inputs
    for those of the signature, ``found`` more outputs, both by name. ``surveyed``: nobody has read the class. A
    tensor of the files without a place in it is refused then, and experts are computed as products of batches.
    ``untied``: the head has a matrix of its own, whatever transformers ties.
    """

    without_pooler: bool = False
    class_name: str | None = None
    widths: str = "intermediate_size"
    shapes: Mapping[str, Shape] | None = None
    finish: Callable[[Any], None] | None = None
    given: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None
    found: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None
    surveyed: bool = False
    untied: bool = False


def corners_in_order(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Boxes ``[B, S, 4]`` have their smaller corner first, if there are some: widths that classes look up are then
    never below 0, where PyTorch refuses them and a graph takes others."""
    import torch

    if BOXES not in inputs:
        return dict(inputs)
    corners = inputs[BOXES].chunk(2, -1)
    return {**inputs, BOXES: torch.cat([torch.minimum(*corners), torch.maximum(*corners)], -1)}


def single_choices(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A row is one choice, where the class takes ``[batch, choices, sequence]``."""
    return {name: tensor.unsqueeze(1) for name, tensor in inputs.items()}


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
