"""A multi-exit model as its folder describes it: config.json and the sidecar ``cost_eff.json`` (no torch here).

``config.json`` describes the tensors as they are stored; the sidecar has the embedding's factors, the exits and their
gate, and its kept maps say what of the stored tensors the model uses. Both are held against the headers of the weights.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from ....errors import CheckpointError
from ....outside_file import read_json
from ....strict import structure
from ...checkpoints.checkpoint import Checkpoint, compare_with_headers
from ...checkpoints.config import MOST_LAYERS, known_keys, read_classes, read_pad, read_widths, refuse_unhonoured
from ...hugging_face.tensors import Parameters

SIDECAR_NAME = "cost_eff.json"
# 1 (2026-11): first published schema.
SCHEMA_VERSION = 1
# Heads of other tasks, exits that the sidecar does not list, and a buffer of old checkpoints.
_IGNORED_TENSOR = re.compile(r"pooler\..+|cls\..+|exits\.\d+\.(?:weight|bias)|embeddings\.position_ids")


@dataclass(frozen=True)
class EmbeddingSpec:
    """The stored word embedding: ``factorised`` into ``[V, rank]`` and ``[rank, H]``, or ``dense`` ``[V, H]``."""

    mode: Literal["factorised", "dense"]
    rank: int | None = field(default=None, metadata={"min": 1})


@dataclass(frozen=True)
class ExitSpec:
    """The exits: ``layers`` counts the layers that have run, so 12 is the exit after the last of 12 layers.

    Every exit is ``Linear(H -> classes)`` over ``activation(pool(hidden))``. ``mean`` is over real tokens;
    ``mean_with_padding`` is over the whole row, so that answers depend on the length that a row is padded to.
    """

    layers: tuple[int, ...]
    pool: Literal["cls", "mean", "mean_with_padding"]
    activation: Literal["tanh", "none"]
    classes: int = field(metadata={"min": 1})
    last_n: int = 1


@dataclass(frozen=True)
class GateSpec:
    """When a row leaves: ``entropy compare tau``, in nats, row by row. ``tau`` is one number for every exit but the
    last, which always answers, or one number for each of them; a negative one closes its exit."""

    criterion: Literal["entropy"]
    compare: Literal["<", "<="]
    tau: float | tuple[float, ...]
    rule: Literal["per_row"]


@dataclass(frozen=True)
class Sidecar:
    """The whole file. Kept maps go from a layer (counted from 0, as text) to the ids that stay, ascending; they are
    left out where the weights are already sliced. A model without ``gate`` has no thresholds of its own."""

    schema_version: int
    backbone: Literal["bert-post-ln"]
    embedding: EmbeddingSpec
    exits: ExitSpec
    gate: GateSpec | None = None
    kept_heads: Mapping[str, tuple[int, ...]] | None = None
    kept_ffn: Mapping[str, tuple[int, ...]] | None = None

    @property
    def thresholds(self) -> tuple[float, ...] | None:
        """One threshold for every exit but the last, or None without a gate."""
        if self.gate is None:
            return None
        tau = self.gate.tau
        return tau if isinstance(tau, tuple) else (tau,) * (len(self.exits.layers) - 1)


@dataclass(frozen=True)
class Widths:
    """Attention heads and FFN channels of one layer; either may be 0."""

    heads: int
    ffn: int


@dataclass(frozen=True)
class CostEffArchitecture:
    """Everything that determines the graph, and how the stored tensors become its parameters.

    ``rank`` is None for a dense word embedding. ``layers`` are the model's widths, ``stored`` those of the tensors in
    the file; ``kept`` maps an axis, such as ``layers.3.heads``, to the stored ids that the model uses, all of them
    where it has no entry. ``has_entropy`` is false where the softmax of an exit means nothing: regression, or labels
    that do not exclude each other.
    """

    hidden: int
    head_size: int
    vocabulary: int
    positions: int
    types: int
    pad: int
    rank: int | None
    activation: str
    norm_eps: float
    layers: tuple[Widths, ...]
    exits: ExitSpec
    has_entropy: bool
    stored: tuple[Widths, ...]
    kept: Mapping[str, tuple[int, ...]]

    @property
    def parameters(self) -> Parameters:
        """Every parameter of the model. A sub-layer of width 0 keeps its output bias and its LayerNorm only."""
        found = self.tensors(self.layers)
        found.shapes = {name: shape for name, shape in found.shapes.items() if 0 not in shape}
        return found

    def tensors(self, layers: Sequence[Widths]) -> Parameters:
        """Every tensor of a model with these widths of its ``layers``; some may have no elements."""
        found, h = Parameters(), self.hidden
        found.add("embeddings.word_embeddings.weight", self.vocabulary, self.rank or h)
        if self.rank:
            found.add("embeddings.word_projection.weight", h, self.rank)
        found.add("embeddings.position_embeddings.weight", self.positions, h)
        found.add("embeddings.token_type_embeddings.weight", self.types, h)
        found.norm("embeddings.LayerNorm", h)
        for index, widths in enumerate(layers):
            at, inner, unit = f"encoder.layer.{index}", widths.heads * self.head_size, self.head_size
            ffn = found.axis(f"layers.{index}.ffn", widths.ffn) if widths.ffn else None
            heads = found.axis(f"layers.{index}.heads", widths.heads) if widths.heads else None
            for part in ("query", "key", "value"):
                found.linear(f"{at}.attention.self.{part}", h, inner, rows=heads, unit=unit)
            found.linear(f"{at}.attention.output.dense", inner, h, columns=heads, unit=unit)
            found.norm(f"{at}.attention.output.LayerNorm", h)
            found.linear(f"{at}.intermediate.dense", h, widths.ffn, rows=ffn)
            found.linear(f"{at}.output.dense", widths.ffn, h, columns=ffn)
            found.norm(f"{at}.output.LayerNorm", h)
        for layer in self.exits.layers:
            found.linear(f"exits.{layer}", h, self.exits.classes)
        return found


def read_sidecar(folder: Path) -> Sidecar:
    """Reads and checks the sidecar of the model in ``folder``.

    Raises CheckpointError if it is missing, malformed, or contradicts itself.
    """
    where = str(folder / SIDECAR_NAME)
    data = read_json(folder / SIDECAR_NAME, CheckpointError)
    version = data.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise CheckpointError(f"{where}: schema_version {str(version)[:80]!r}, expected {SCHEMA_VERSION}")
    sidecar = structure(Sidecar, data, where, CheckpointError)
    for problem in _problems(sidecar):
        raise CheckpointError(f"{where}: {problem}")
    return sidecar


def _problems(sidecar: Sidecar) -> Iterator[str]:
    exits, embedding = sidecar.exits, sidecar.embedding
    if (embedding.mode == "factorised") != (embedding.rank is not None):
        yield f"embedding: mode {embedding.mode} {'needs a rank' if embedding.rank is None else 'has no rank'}"
    if not exits.layers or exits.layers[0] < 1 or any(low >= high for low, high in pairwise(exits.layers)):
        yield f"exits: layers: expected layer counts that increase from at least 1, got {list(exits.layers)!s:.80}"
    if exits.last_n != 1:
        yield f"exits: last_n: expected 1, got {exits.last_n}: an exit reads the state of its own layer alone"
    if sidecar.gate and exits.classes == 1:
        yield "gate: an exit with 1 class is a regression, whose softmax has no entropy; remove the gate"
    thresholds, wanted = sidecar.thresholds, len(exits.layers) - 1
    if thresholds is not None and len(thresholds) != wanted:
        yield (
            f"gate: tau: expected {wanted} numbers, one for every exit but the last, or a number for all; "
            f"got a list of {len(thresholds)}"
        )


@dataclass(frozen=True, kw_only=True)
class _Stated:
    """The keys of ``config.json`` beside widths, padding and labels."""

    vocab_size: int = field(metadata={"min": 1})
    hidden_size: int = field(metadata={"min": 1})
    head_size: int = field(metadata={"min": 1})
    num_hidden_layers: int = field(metadata={"min": 1, "max": MOST_LAYERS})
    max_position_embeddings: int = field(metadata={"min": 1})
    type_vocab_size: int = field(metadata={"min": 1})
    hidden_act: Literal["gelu", "gelu_new", "relu"]
    layer_norm_eps: float = field(metadata={"min": 1e-30})
    is_decoder: Literal[False] = False
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = None


def read_architecture(checkpoint: Checkpoint, sidecar: Sidecar) -> CostEffArchitecture:
    """The architecture of the model in ``checkpoint``, beside whose weights ``sidecar`` lies.

    Raises CheckpointError for whatever is missing, or contradicts the rest.
    """
    refuse_unhonoured(checkpoint)
    where = checkpoint.folder / SIDECAR_NAME
    known = known_keys(_Stated, checkpoint.config)
    stated = structure(_Stated, known, str(checkpoint.folder / "config.json"), CheckpointError)
    depth, exclusive = stated.num_hidden_layers, stated.problem_type in (None, "single_label_classification")
    if checkpoint.config.keys() & {"num_labels", "id2label"} and read_classes(checkpoint) != sidecar.exits.classes:
        raise checkpoint.misfit(
            f"num_labels, id2label: {read_classes(checkpoint)} classes, but {SIDECAR_NAME} has exits of "
            f"{sidecar.exits.classes}",
        )
    if sidecar.exits.layers[-1] != depth:
        raise CheckpointError(
            f"{where}: exits: the last one is after layer {sidecar.exits.layers[-1]}, but config.json has "
            f"num_hidden_layers {depth}; a layer behind the last exit would never answer"
        )
    if sidecar.gate and not exclusive:
        raise CheckpointError(
            f"{where}: gate: config.json has problem_type {stated.problem_type}, for which softmax entropy is "
            "undefined; remove the gate"
        )
    pad = read_pad(checkpoint, stated.vocab_size, default=None)
    if pad is None:
        raise checkpoint.misfit("pad_token_id: expected a token, which fills a row up to its bucket, got none")
    heads = read_widths(checkpoint, depth, "num_attention_heads", at_least=0)
    ffn = read_widths(checkpoint, depth, at_least=0)
    kept = {
        **_kept("heads", sidecar.kept_heads, heads, f"{where}: kept_heads"),
        **_kept("ffn", sidecar.kept_ffn, ffn, f"{where}: kept_ffn"),
    }
    architecture = CostEffArchitecture(
        hidden=stated.hidden_size,
        head_size=stated.head_size,
        vocabulary=stated.vocab_size,
        positions=stated.max_position_embeddings,
        types=stated.type_vocab_size,
        pad=pad,
        rank=sidecar.embedding.rank,
        activation=stated.hidden_act,
        norm_eps=stated.layer_norm_eps,
        layers=tuple(
            Widths(*(len(kept.get(f"layers.{layer}.{kind}", range(n))) for kind, n in (("heads", h), ("ffn", f))))
            for layer, (h, f) in enumerate(zip(heads, ffn, strict=True))
        ),
        exits=sidecar.exits,
        has_entropy=exclusive and sidecar.exits.classes > 1,
        stored=tuple(Widths(h, f) for h, f in zip(heads, ffn, strict=True)),
        kept=kept,
    )
    shapes = architecture.tensors(architecture.stored).shapes
    wanted = {name: shape for name, shape in shapes.items() if name in checkpoint.tensors or 0 not in shape}
    says = f"config.json and {SIDECAR_NAME} say of the stored weights"
    compare_with_headers(checkpoint, wanted, unused=_IGNORED_TENSOR.fullmatch, says=says)
    return architecture


def _kept(
    kind: str, table: Mapping[str, Sequence[int]] | None, stored: Sequence[int], where: str
) -> dict[str, tuple[int, ...]]:
    """Axis name to the ids that stay. Every layer must be listed: what a missing one keeps would be a guess."""
    if table is None:
        return {}
    names = [str(layer) for layer in range(len(stored))]
    for name in table:
        if name not in names:
            raise CheckpointError(f"{where}: {name[:80]!r} is no layer; expected 0..{len(stored) - 1}")
    for name, size in zip(names, stored, strict=True):
        ids = table.get(name)
        if ids is None:
            raise CheckpointError(
                f"{where}: layer {name} is missing; list every layer, with all its ids if it is whole"
            )
        for low, high in pairwise(ids):
            if low >= high:
                raise CheckpointError(
                    f"{where}.{name}: expected ascending ids without repetition, got {low} then {high}"
                )
        if ids and not 0 <= ids[0] <= ids[-1] < size:
            bad = ids[0] if ids[0] < 0 else ids[-1]
            raise CheckpointError(f"{where}.{name}: id {bad} is outside 0..{size - 1}, the stored {kind}")
    return {f"layers.{name}.{kind}": tuple(table[name]) for name in names}
