"""``cost_eff.json``: what weights and config.json cannot say about a multi-exit model (docs/cost-eff.md, section 3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from ....errors import CheckpointError
from ....strict import structure
from ...checkpoints.checkpoint import read_json

SIDECAR_NAME = "cost_eff.json"
# 1 (2026-11): first published schema.
SCHEMA_VERSION = 1


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


def read_sidecar(folder: Path) -> Sidecar:
    """Reads and checks the sidecar of the model in ``folder``.

    Raises CheckpointError if it is missing, malformed, or contradicts itself.
    """
    where = str(folder / SIDECAR_NAME)
    data = read_json(folder / SIDECAR_NAME)
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
