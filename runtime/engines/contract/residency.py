"""Which residency each engine gets under a memory cap: a pure decision.

The pages of the weight store count once for all shared engines, since a smaller submodel reads a prefix of what a
larger one reads, and a segment a part of what its submodel reads; segments of other layers read other pages. A packed
engine owns a copy of its weights, a mapped one maps a file of its own. Every engine
besides holds its private initializers and its activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from ....errors import SelectionError
from ...bundle.manifest import Residency as Residency
from ...inputs.limits import positive_limit

RESIDENCIES: tuple[Residency, ...] = get_args(Residency)


@dataclass(frozen=True)
class EngineNeed:
    """What one engine asks of memory, in bytes, and how much it matters.

    ``widths`` are the submodel's axis values in one fixed order, 0 for those of layers that the engine has not;
    ``layers`` are the first and, exclusive, the last of those that it has. ``own_bytes`` are private initializers and
    activations. ``latency_ms`` times ``importance`` weighs who is packed first. One that cannot share its weights, as
    on a GPU, is always packed.
    """

    engine: str
    widths: tuple[int, ...]
    weight_bytes: int
    own_bytes: int
    latency_ms: float
    importance: float = 1.0
    layers: tuple[int, int] = (0, 1)
    can_share: bool = True


def assign_residencies(
    needs: Sequence[EngineNeed], memory_mb: float | None, requested: Residency | Literal["auto"] = "auto"
) -> dict[str, Residency]:
    """Residency per engine id, so that all of them open at once stay within ``memory_mb`` (10^6 bytes).

    ``auto`` without a cap packs every engine. With one, it admits engines as shared, the important and the large
    first, then packs those that save the most time per byte; an engine that does not fit is left out. ``mapped`` is
    never chosen by itself, since it spends disk. Raises SelectionError if a requested residency does not fit, or
    nothing does, or the cap is no positive number.
    """
    if memory_mb is not None:
        memory_mb = positive_limit("memory_mb", memory_mb)
    if memory_mb is None or requested != "auto":
        residency: Residency = "packed" if requested == "auto" else requested
        assigned = {need.engine: residency if need.can_share else "packed" for need in needs}
        if memory_mb is not None and (total := _Memory(needs).bytes(assigned)) > memory_mb * 1e6:
            raise SelectionError(
                f"memory_mb={memory_mb:g}: {len(needs)} engines as {residency} take {total / 1e6:.1f} MB; "
                "raise the cap, or let residency='auto' choose"
            )
        return assigned

    memory, cap = _Memory(needs), memory_mb * 1e6
    assigned = {}
    for need in sorted(needs, key=lambda n: (-n.importance, -n.weight_bytes, n.own_bytes, n.engine)):
        least: Residency = "shared" if need.can_share else "packed"
        if memory.bytes({**assigned, need.engine: least}) <= cap:
            assigned[need.engine] = least
    if not assigned:
        smallest = min(needs, key=lambda n: n.weight_bytes + n.own_bytes)
        raise SelectionError(
            f"memory_mb={memory_mb:g}: no engine fits; the smallest, {smallest.engine}, takes "
            f"{(smallest.weight_bytes + smallest.own_bytes) / 1e6:.1f} MB"
        )
    for need in sorted(needs, key=lambda n: (-n.latency_ms * n.importance / max(1, n.weight_bytes), n.engine)):
        if need.engine in assigned and memory.bytes({**assigned, need.engine: "packed"}) <= cap:
            assigned[need.engine] = "packed"
    return assigned


class _Memory:
    """Bytes of a set of engines, by who reads a prefix of whose weights."""

    def __init__(self, needs: Sequence[EngineNeed]) -> None:
        self._needs = {need.engine: need for need in needs}
        # Engines that read the same views are one row here.
        rows = sorted(
            {(need.weight_bytes, need.widths, need.layers) for need in needs},
            key=lambda row: (-row[0], [-width for width in row[1]], row[2]),
        )
        self._row = {need.engine: rows.index((need.weight_bytes, need.widths, need.layers)) for need in needs}
        self._bytes = [weight_bytes for weight_bytes, _, _ in rows]
        # Engine ``i`` reads a part of what ``j`` reads where none of these is larger.
        extents = np.array([[*widths, -first, last] for _, widths, (first, last) in rows]).reshape(len(rows), -1)
        within = np.all(extents[:, None] <= extents[None], axis=2).tolist()  # [row][other]
        # Rows go from large to small, and among equal bytes (axes without weights) from wide to narrow, so whoever
        # contains a row stands before it.
        self._containers = [sum(1 << j for j in range(i) if within[i][j]) for i in range(len(rows))]

    def bytes(self, assigned: Mapping[str, Residency]) -> int:
        """Upper bound with every engine of ``assigned`` open."""
        total = 0
        shared = 0
        for engine, residency in assigned.items():
            need = self._needs[engine]
            total += need.own_bytes
            if residency == "shared":
                shared |= 1 << self._row[engine]
            else:
                total += need.weight_bytes
        return total + sum(
            self._bytes[i] for i, outer in enumerate(self._containers) if shared >> i & 1 and not outer & shared
        )
