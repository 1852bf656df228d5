"""The shape of a BERT-like encoder with its head, from config.json alone, held against the weights (no torch here)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...checkpoints.checkpoint import Checkpoint, compare_with_headers
from ...checkpoints.config import MOST_LAYERS, read_classes, read_number, read_pad, refuse_unhonoured
from ...hugging_face.tensors import Shape, linear_shapes, norm_shapes, parameter_names
from .heads import Head, Size
from .layouts import LAYOUTS, Layout

_POOLER_WEIGHT = "pooler.dense.weight"
# Numbers that old files carry and no module has as parameters.
_BUFFER_NAMES = frozenset({"embeddings.position_ids", "embeddings.token_type_ids"})


@dataclass(frozen=True)
class BertArchitecture:
    """What determines the graph. ``head`` is None for the base model. ``causal``: positions see no later ones.

    ``positions`` are the tokens of the longest text; the table of positions has ``reserved`` more. ``tied``: the matrix
    back to the vocabulary is the token embedding.
    """

    layout: Layout
    head: Head | None
    vocabulary: int
    embedding: int
    hidden: int
    layers: int
    heads: int
    ffn: int
    types: int
    positions: int
    reserved: int
    pad: int
    classes: int
    pooler: bool
    causal: bool
    tied: bool

    @property
    def head_dim(self) -> int:
        """No slice changes it: attention keeps its scale ``1 / sqrt(head_dim)``."""
        return self.hidden // self.heads

    @property
    def prefix(self) -> str:
        """What stands before the encoder's names: nothing where it is the whole model."""
        return "" if self.head is None else f"{self.layout.prefix}."

    @property
    def parameter_shapes(self) -> dict[str, Shape]:
        """Every parameter of the module, by the module's names."""
        shapes = {f"{self.prefix}{name}": shape for name, shape in self._encoder()}
        return shapes | (self.head_shapes(self.head) if self.head is not None else {})

    def head_shapes(self, head: Head) -> dict[str, Shape]:
        """Parameters of ``head``."""
        shapes: dict[str, Shape] = {}
        for name, layer in head.layers.items():
            shapes |= linear_shapes(name, self.size(layer.inputs), self.size(layer.outputs))
        for name, size in head.norms.items():
            shapes |= norm_shapes(name, self.size(size))
        if head.vocabulary is not None:
            assert head.bias is not None
            shapes[head.bias] = (self.vocabulary,)
            if not self.tied:
                shapes |= linear_shapes(head.vocabulary, self.embedding, self.vocabulary)
        return shapes

    def size(self, size: Size) -> int:
        """The number that a size stands for."""
        named = {
            "hidden": self.hidden,
            "embedding": self.embedding,
            "vocabulary": self.vocabulary,
            "classes": self.classes,
        }
        return size if isinstance(size, int) else named[size]

    def _encoder(self) -> Iterator[tuple[str, Shape]]:
        """The base model's parameters, by its own names."""
        tables = {"word": self.vocabulary, "position": self.positions + self.reserved, "token_type": self.types}
        yield from ((f"embeddings.{name}_embeddings.weight", (rows, self.embedding)) for name, rows in tables.items())
        yield from norm_shapes("embeddings.LayerNorm", self.embedding).items()
        if self.embedding != self.hidden:
            yield from linear_shapes("embeddings_project", self.embedding, self.hidden).items()
        for layer in range(self.layers):
            at = f"encoder.layer.{layer}"
            for part in ("self.query", "self.key", "self.value", "output.dense"):
                yield from linear_shapes(f"{at}.attention.{part}", self.hidden, self.hidden).items()
            yield from norm_shapes(f"{at}.attention.output.LayerNorm", self.hidden).items()
            yield from linear_shapes(f"{at}.intermediate.dense", self.hidden, self.ffn).items()
            yield from linear_shapes(f"{at}.output.dense", self.ffn, self.hidden).items()
            yield from norm_shapes(f"{at}.output.LayerNorm", self.hidden).items()
        if self.pooler:
            yield from linear_shapes("pooler.dense", self.hidden, self.hidden).items()


def read_bert(checkpoint: Checkpoint) -> BertArchitecture:
    """The architecture of the model in ``checkpoint``, as its class reads config.json.

    Raises CheckpointError for what config.json lacks or gets wrong, for what is not honoured, and for a tensor that is
    missing, misfits or has no place.
    """
    refuse_unhonoured(checkpoint)
    config, layout = checkpoint.config, LAYOUTS[checkpoint.config["model_type"]]
    head = _head(checkpoint, layout)
    hidden, heads = read_number(checkpoint, "hidden_size"), read_number(checkpoint, "num_attention_heads")
    if hidden % heads:
        raise checkpoint.misfit(f"num_attention_heads: {hidden} features cannot be split into {heads} heads")
    vocabulary = read_number(checkpoint, "vocab_size")
    pad = read_pad(checkpoint, vocabulary, layout.pad)
    if pad is None and layout.reserves:
        raise checkpoint.misfit("pad_token_id: expected a token, after which positions are numbered, got null")
    reserved = pad + 1 if pad is not None and layout.reserves else 0
    architecture = BertArchitecture(
        layout=layout,
        head=head,
        vocabulary=vocabulary,
        embedding=read_number(checkpoint, "embedding_size", default=128) if layout.projects else hidden,
        hidden=hidden,
        layers=read_number(checkpoint, "num_hidden_layers", at_most=MOST_LAYERS),
        heads=heads,
        ffn=read_number(checkpoint, "intermediate_size"),
        types=read_number(checkpoint, "type_vocab_size", default=2, at_least=0),
        positions=read_number(checkpoint, "max_position_embeddings", at_least=reserved + 1) - reserved,
        reserved=reserved,
        pad=pad or 0,
        classes=read_classes(checkpoint),
        pooler=_has_pooler(checkpoint, head),
        causal=config.get("is_decoder") is True,
        tied=config.get("tie_word_embeddings", True) is not False,
    )
    for problem in _head_problems(checkpoint, architecture):
        raise checkpoint.misfit(problem)
    _compare_with_headers(checkpoint, architecture)
    return architecture


def names_in_files(checkpoint: Checkpoint, architecture: BertArchitecture) -> dict[str, str]:
    """Every tensor of the folder, by the name that the module gives the parameter."""
    return parameter_names(checkpoint, architecture.parameter_shapes, architecture.layout.prefix)


def _compare_with_headers(checkpoint: Checkpoint, architecture: BertArchitecture) -> None:
    unused = {*_BUFFER_NAMES, _POOLER_WEIGHT, _POOLER_WEIGHT.replace("weight", "bias")}
    for head in filter(None, architecture.layout.classes.values()):
        tied = (f"{head.vocabulary}.weight", f"{head.vocabulary}.bias") if head.vocabulary is not None else ()
        unused |= {*architecture.head_shapes(head), *tied}
    own = architecture.layout.prefix + "."
    names = names_in_files(checkpoint, architecture)
    compare_with_headers(
        checkpoint, architecture.parameter_shapes, names, lambda name: name.removeprefix(own) in unused
    )


def _head(checkpoint: Checkpoint, layout: Layout) -> Head | None:
    """The head of the class that config.json names; without a name it is the base model, as for transformers."""
    name = checkpoint.architecture or next(iter(layout.classes))
    if name not in layout.classes:
        raise checkpoint.misfit(
            f"architecture {name!r:.80} is not supported; supported are {', '.join(layout.classes)}"
        )
    return layout.classes[name]


def _has_pooler(checkpoint: Checkpoint, head: Head | None) -> bool:
    """A base model has one where the weights do: files made from another class's have none."""
    if head is not None:
        return head.pooled
    return any(name.endswith(_POOLER_WEIGHT) for name in checkpoint.tensors)


def _head_problems(checkpoint: Checkpoint, architecture: BertArchitecture) -> Iterator[str]:
    config, head = checkpoint.config, architecture.head
    if head is None:
        return
    if head.classes is not None and architecture.classes != head.classes:
        yield f"num_labels: expected {head.classes} for {checkpoint.architecture}, got {architecture.classes}"
    if any(name.startswith("sequence_summary.") for name in head.layers):
        stated = {"summary_type": "first", "summary_use_proj": True, "summary_proj_to_labels": False}
        for key, only in stated.items():
            if config.get(key, only) != only:
                yield f"{key}: expected {only!r} for {checkpoint.architecture}, got {config[key]!r:.80}"
