"""Which residency each engine gets under a memory cap: a pure decision.

The pages of the weight store count once for all shared engines, since a smaller submodel reads a prefix of what a
larger one reads, and a segment a part of what its submodel reads; segments of other layers read other pages. A packed
engine owns a copy of its weights, a mapped one maps a file of its own. Every engine
besides holds its private initializers and its activations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from ...argument_types import positive_limit
from ...bundle.entries.engine_entry import Residency as Residency
from ...errors import SelectionError

RESIDENCIES: tuple[Residency, ...] = get_args(Residency)


@dataclass(frozen=True)
class EngineNeed:
    """Memory needs of one engine, in bytes, and how much it matters.

    ``widths`` are the submodel's axis values in one fixed order, 0 for those of layers that the engine has not;
    ``layers`` are the first and, exclusive, the last that it has. ``own_bytes`` are private initializers and
    activations. ``latency_ms`` times ``importance`` weighs who is packed first. One that cannot share its weights, as
    on a GPU, is always packed. Engines of one ``group`` are of use together alone; None is an engine for itself.
    """

    engine: str
    widths: tuple[int, ...]
    weight_bytes: int
    own_bytes: int
    latency_ms: float
    importance: float = 1.0
    layers: tuple[int, int] = (0, 1)
    can_share: bool = True
    group: str | None = None


def assign_residencies(
    needs: Sequence[EngineNeed],
    memory_mb: float | None,
    requested: Residency | Literal["auto"] = "auto",
    limit: str | None = None,
) -> dict[str, Residency]:
    """Residency per engine id, so that all of them open at once stay within ``memory_mb`` (10^6 bytes).

    ``auto`` without a cap packs every engine. With one, it admits engines as shared, the important and the large
    first, those of a group together, then packs the ones that save the most time per byte; what does not fit is left
    out. ``mapped`` is never chosen by itself, since it spends disk. Raises SelectionError if a requested residency does
    not fit, or nothing does, or the cap is no positive number; ``limit`` is what its line calls the cap.
    """
    if memory_mb is not None:
        memory_mb = positive_limit("memory_mb", memory_mb)
        limit = limit or f"memory_mb={memory_mb:g}"
    memory = OpenEngines(needs)
    if memory_mb is None or requested != "auto":
        residency: Residency = "packed" if requested == "auto" else requested
        assigned = {need.engine: residency if need.can_share else "packed" for need in needs}
        for need in needs if memory_mb is not None else ():
            memory.add(need, assigned[need.engine])
        if memory_mb is not None and memory.bytes > memory_mb * 1e6:
            raise SelectionError(
                f"{limit}: {len(needs)} engines as {residency} take {memory.bytes / 1e6:.1f} MB; raise the cap, or let "
                "`residency='auto'` choose"
            )
        return assigned

    cap = memory_mb * 1e6
    assigned = {}
    groups = _groups(needs)
    for group in sorted(groups, key=_rank):
        least: dict[str, Residency] = {need.engine: "shared" if need.can_share else "packed" for need in group}
        for need in group:
            memory.add(need, least[need.engine])
        if memory.bytes <= cap:
            assigned |= least
        else:
            for need in group:
                memory.remove(need, least[need.engine])
    if not assigned:
        smallest = min(groups, key=_alone_bytes)
        raise SelectionError(
            f"{limit}: no engine fits; the smallest, {' with '.join(need.engine for need in smallest)}, takes "
            f"{_alone_bytes(smallest) / 1e6:.1f} MB; raise the cap"
        )
    for need in sorted(needs, key=lambda n: (-n.latency_ms * n.importance / max(1, n.weight_bytes), n.engine)):
        if assigned.get(need.engine) == "shared":
            memory.remove(need, "shared")
            memory.add(need, "packed")
            if memory.bytes <= cap:
                assigned[need.engine] = "packed"
            else:
                memory.remove(need, "packed")
                memory.add(need, "shared")
    return assigned


def _groups(needs: Sequence[EngineNeed]) -> list[list[EngineNeed]]:
    """Engines admitted together."""
    groups: dict[str, list[EngineNeed]] = {}
    for need in needs:
        groups.setdefault(need.engine if need.group is None else need.group, []).append(need)
    return list(groups.values())


def _rank(group: Sequence[EngineNeed]) -> tuple[float, int, int, str]:
    """The important and the large first."""
    return (
        -max(need.importance for need in group),
        -sum(need.weight_bytes for need in group),
        sum(need.own_bytes for need in group),
        min(need.engine for need in group),
    )


def _alone_bytes(group: Sequence[EngineNeed]) -> int:
    """Bytes of its engines where no other is open."""
    return sum(need.weight_bytes + need.own_bytes for need in group)


class OpenEngines:
    """A set of open engines; ``bytes`` is an upper bound of what they hold together.

    Engines that read the same views are one row. A row that is open as shared counts where no other one contains it.
    """

    def __init__(self, needs: Sequence[EngineNeed]) -> None:
        rows = sorted(
            {(need.weight_bytes, need.widths, need.layers) for need in needs},
            key=lambda row: (-row[0], [-width for width in row[1]], row[2]),
        )
        number = {row: i for i, row in enumerate(rows)}
        self._row = {need.engine: number[need.weight_bytes, need.widths, need.layers] for need in needs}
        self._row_bytes = np.array([weight_bytes for weight_bytes, _, _ in rows], np.int64)
        # Row ``i`` reads a part of what ``j`` reads where none of these is larger.
        extents = np.array([[*widths, -first, last] for _, widths, (first, last) in rows]).reshape(len(rows), -1)
        # Rows go from large to small, and among equal bytes (axes without weights) from wide to narrow, so whoever
        # contains a row stands before it.
        self._contained = np.tri(len(rows), k=-1, dtype=bool).T  # [row, other]: whether the other lies within the row
        for extent in extents.T:
            self._contained = self._contained & (extent <= extent[:, None])
        self.clear()

    def clear(self) -> None:
        """No engine is open."""
        self._own = 0  # bytes that belong to one engine each
        # Engines that are open as shared: of each row, and of rows that contain it.
        self._sharing, self._containing = np.zeros((2, len(self._row_bytes)), np.int64)

    @property
    def bytes(self) -> int:
        counted = (self._sharing > 0) & (self._containing == 0)
        return self._own + int(self._row_bytes[counted].sum())

    def add(self, need: EngineNeed, residency: Residency, engines: int = 1) -> None:
        """Opens an engine."""
        self._own += engines * need.own_bytes
        if residency != "shared":
            self._own += engines * need.weight_bytes
            return
        row = self._row[need.engine]
        self._sharing[row] += engines
        self._containing += engines * self._contained[row]

    def remove(self, need: EngineNeed, residency: Residency) -> None:
        """Closes an engine that was opened so."""
        self.add(need, residency, -1)
