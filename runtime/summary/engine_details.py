"""What only some engines have, as text: metadata, the variants of their computations, receipts of their routes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.manifest import Manifest
from .short_names import ShortNames
from .table import Table

# Of metadata whose name does not say what it counts.
_UNITS = {"capacity": "slots"}


def common_details(manifest: Manifest) -> dict[str, str]:
    """Metadata and variants that are the same in every whole engine, by name."""
    wholes = [_details(engine) for engine in manifest.engines if engine.segment is None]
    return {name: value for name, value in wholes[0].items() if all(other.get(name) == value for other in wholes)}


def detail_tables(manifest: Manifest) -> dict[str, Table]:
    """By heading, the tables that have rows: metadata and variants that differ between engines, and routes."""
    tables = {"Metadata and variants": _metadata_table(manifest), "Routing": _routing_table(manifest)}
    return {heading: table for heading, table in tables.items() if table.rows}


def _metadata_table(manifest: Manifest) -> Table:
    """One row an engine, one column what not all engines share."""
    common = common_details(manifest)
    short = ShortNames.of(manifest)
    details = {short(engine.id): _details(engine) for engine in manifest.engines}
    names = [name for name in _names(details.values()) if name not in common]
    rows = [[engine, *(own.get(name, "-") for name in names)] for engine, own in details.items() if own and names]
    return Table(["engine", *names], rows)


def _routing_table(manifest: Manifest) -> Table:
    """One row a tensor of routes: the choices that its parity cases made, and how PyTorch judged them."""
    short = ShortNames.of(manifest)
    judged = [
        (short(engine.id), routes)
        for engine in manifest.engines
        for routes in (engine.parity.routing if engine.parity else None) or ()
    ]
    shares = _names(routes.shares for _, routes in judged)
    rows = [
        [
            engine,
            routes.name,
            str(routes.made),
            str(routes.differing),
            f"{routes.worst_score_gap:.1e}",
            *(f"{100 * routes.shares[name]:.2f}" if name in routes.shares else "-" for name in shares),
        ]
        for engine, routes in judged
    ]
    columns = ["engine", "routes", "choices", "not PyTorch's own", "worst score gap"]
    return Table([*columns, *(f"{name.replace('_', ' ')} %" for name in shares)], rows)


def _details(engine: EngineEntry) -> dict[str, str]:
    stated = {**(engine.metadata or {}), **(engine.variants or {})}
    return {f"{name} ({_UNITS[name]})" if name in _UNITS else name: str(value) for name, value in stated.items()}


def _names(tables: Iterable[Mapping[str, object]]) -> list[str]:
    """Every key, in the order of first use."""
    return list(dict.fromkeys(name for table in tables for name in table))
