"""Reads a model folder's config.json and sidecar together, and holds both against the headers of its weights.

``config.json`` describes the tensors as they are stored; the sidecar's kept maps say what of them the model uses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any

from ....errors import CheckpointError
from ....strict import nearest
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.config import read_classes, read_pad, refuse_unhonoured
from .architecture import CostEffArchitecture, Widths
from .sidecar import SIDECAR_NAME, Sidecar

ACTIVATIONS = ("gelu", "gelu_new", "relu")
_PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")
# Heads of other tasks, exits that the sidecar does not list, and a buffer of old checkpoints.
_IGNORED_TENSOR = re.compile(r"pooler\..+|cls\..+|exits\.\d+\.(?:weight|bias)|embeddings\.position_ids")
_EXIT_TENSOR = re.compile(r"exits\.(\d{1,9})\..+")


def read_architecture(checkpoint: Checkpoint, sidecar: Sidecar) -> CostEffArchitecture:
    """The architecture of the model in ``checkpoint``, beside whose weights ``sidecar`` lies.

    Raises CheckpointError for whatever is missing, or contradicts the rest.
    """
    refuse_unhonoured(checkpoint)
    where = checkpoint.folder / SIDECAR_NAME
    depth = _number(checkpoint, "num_hidden_layers")
    if depth > len(checkpoint.tensors):  # or an absurd number would be counted through
        raise checkpoint.misfit(f"num_hidden_layers {depth}, but the weights hold {len(checkpoint.tensors)} tensors")
    if checkpoint.config.get("is_decoder", False) is not False:
        raise checkpoint.misfit(f"is_decoder: expected False, got {checkpoint.config['is_decoder']!r:.80}")
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
    vocabulary = _number(checkpoint, "vocab_size")
    pad = read_pad(checkpoint, vocabulary, default=None)
    if pad is None:
        raise checkpoint.misfit("pad_token_id: expected a token, which fills a row up to its bucket, got none")
    heads = _per_layer(checkpoint, "num_attention_heads", depth)
    ffn = _per_layer(checkpoint, "intermediate_size", depth)
    kept = {
        **_kept("heads", sidecar.kept_heads, heads, f"{where}: kept_heads"),
        **_kept("ffn", sidecar.kept_ffn, ffn, f"{where}: kept_ffn"),
    }
    architecture = CostEffArchitecture(
        hidden=_number(checkpoint, "hidden_size"),
        head_size=_number(checkpoint, "head_size"),
        vocabulary=vocabulary,
        positions=_number(checkpoint, "max_position_embeddings"),
        types=_number(checkpoint, "type_vocab_size"),
        pad=pad,
        rank=sidecar.embedding.rank,
        activation=_activation(checkpoint),
        norm_eps=_norm_eps(checkpoint),
        layers=tuple(
            Widths(*(len(kept.get(f"layers.{layer}.{kind}", range(n))) for kind, n in (("heads", h), ("ffn", f))))
            for layer, (h, f) in enumerate(zip(heads, ffn, strict=True))
        ),
        exits=sidecar.exits,
        has_entropy=_has_entropy(checkpoint, sidecar),
        stored=tuple(Widths(h, f) for h, f in zip(heads, ffn, strict=True)),
        kept=kept,
    )
    _compare_with_headers(checkpoint, architecture)
    return architecture


def _compare_with_headers(checkpoint: Checkpoint, architecture: CostEffArchitecture) -> None:
    expected = architecture.stored_shapes
    for name, shape in expected.items():
        header = checkpoint.tensors.get(name)
        if header is None and 0 not in shape:
            found = _EXIT_TENSOR.fullmatch(name)
            problem = f"the exit after layer {found[1]} has no head: " if found else ""
            raise CheckpointError(f"{checkpoint.folder}: {problem}tensor {name} is missing from the weights")
        if header is not None and header.shape != shape:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name} has shape {list(header.shape)}; expected {list(shape)} as "
                f"config.json and {SIDECAR_NAME} say of the stored weights"
            )
        if header is not None and header.dtype not in {"F64", "F32", "F16", "BF16"}:
            raise CheckpointError(f"{checkpoint.folder}: tensor {name} holds {header.dtype}; expected F32, F16 or BF16")
    for name in checkpoint.tensors:
        if name not in expected and not _IGNORED_TENSOR.fullmatch(name):
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name!r:.200} has no place in the model that config.json and "
                f"{SIDECAR_NAME} describe"
            )


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


def _has_entropy(checkpoint: Checkpoint, sidecar: Sidecar) -> bool:
    problem = checkpoint.config.get("problem_type") or _PROBLEM_TYPES[0]
    if problem not in _PROBLEM_TYPES:
        raise checkpoint.misfit(f"problem_type: got {problem!r:.80}{nearest(str(problem)[:80], _PROBLEM_TYPES)}")
    exclusive = problem == _PROBLEM_TYPES[0]
    if sidecar.gate and not exclusive:
        raise CheckpointError(
            f"{checkpoint.folder / SIDECAR_NAME}: gate: config.json has problem_type {problem}, for which softmax "
            "entropy is undefined; remove the gate"
        )
    return exclusive and sidecar.exits.classes > 1


def _number(checkpoint: Checkpoint, key: str, at_least: int = 1) -> int:
    value = checkpoint.config.get(key)
    if type(value) is not int or value < at_least:
        raise checkpoint.misfit(f"{key}: expected a whole number of at least {at_least}, got {value!r:.80}")
    return value


def _per_layer(checkpoint: Checkpoint, key: str, depth: int) -> list[int]:
    """One width for every layer, or a list with one a layer; 0 is a sub-layer that is gone."""
    value: object = checkpoint.config.get(key)
    widths: list[Any] = value if isinstance(value, list) else [value] * depth
    if len(widths) != depth:
        raise checkpoint.misfit(f"{key}: expected {depth} numbers, one per layer, got {len(widths)}")
    for width in widths:
        if type(width) is not int or width < 0:
            raise checkpoint.misfit(f"{key}: expected whole numbers of at least 0, got {width!r:.80}")
    return widths


def _activation(checkpoint: Checkpoint) -> str:
    value = checkpoint.config.get("hidden_act")
    if value not in ACTIVATIONS:
        raise checkpoint.misfit(f"hidden_act: got {value!r:.80}{nearest(str(value)[:80], ACTIVATIONS)}")
    return str(value)


def _norm_eps(checkpoint: Checkpoint) -> float:
    value: Any = checkpoint.config.get("layer_norm_eps")
    if type(value) not in (int, float) or not isfinite(value) or value <= 0:
        raise checkpoint.misfit(f"layer_norm_eps: expected a number above 0, got {value!r:.80}")
    return float(value)
