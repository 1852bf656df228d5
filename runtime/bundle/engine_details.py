"""What only some engines have, as text: static facts, the forms of their computations, receipts of what they decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .manifest import EngineEntry, Manifest
from .tables import Table

# Of facts whose name does not say what they count.
_UNITS = {"capacity": "slots"}


def common_details(manifest: Manifest) -> dict[str, str]:
    """Facts and forms that are the same in every whole engine, by name."""
    wholes = [_details(engine) for engine in manifest.engines if engine.segment is None]
    return {name: value for name, value in wholes[0].items() if all(other.get(name) == value for other in wholes)}


def detail_tables(manifest: Manifest) -> dict[str, Table]:
    """By heading, the tables that have rows: facts and forms that differ between engines, and decisions."""
    tables = {"Facts and forms": _fact_table(manifest), "Decisions": _decision_table(manifest)}
    return {heading: table for heading, table in tables.items() if table.rows}


def _fact_table(manifest: Manifest) -> Table:
    """One row an engine, one column a fact or form that not all engines share."""
    common = common_details(manifest)
    details = {engine.id: _details(engine) for engine in manifest.engines}
    names = [name for name in _names(details.values()) if name not in common]
    rows = [[engine, *(own.get(name, "-") for name in names)] for engine, own in details.items() if own and names]
    return Table(["engine", *names], rows)


def _decision_table(manifest: Manifest) -> Table:
    """One row a decision of an engine: the choices that its parity cases made, and how PyTorch judged them."""
    judged = [
        (engine.id, decision)
        for engine in manifest.engines
        for decision in (engine.parity.decisions if engine.parity else None) or ()
    ]
    shares = _names(decision.shares for _, decision in judged)
    rows = [
        [
            engine,
            decision.name,
            str(decision.made),
            str(decision.differing),
            f"{decision.worst_margin:.1e}",
            *(f"{100 * decision.shares[name]:.2f}" if name in decision.shares else "-" for name in shares),
        ]
        for engine, decision in judged
    ]
    columns = ["engine", "decision", "choices", "not PyTorch's own", "worst margin (of score)"]
    return Table([*columns, *(f"{name.replace('_', ' ')} %" for name in shares)], rows)


def _details(engine: EngineEntry) -> dict[str, str]:
    stated = {**(engine.facts or {}), **(engine.forms or {})}
    return {f"{name} ({_UNITS[name]})" if name in _UNITS else name: str(value) for name, value in stated.items()}


def _names(tables: Iterable[Mapping[str, object]]) -> list[str]:
    """Every key, in the order of first use."""
    return list(dict.fromkeys(name for table in tables for name in table))
