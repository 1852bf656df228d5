"""``report.md``: the build record for people, made from the manifest and the record alone."""

from __future__ import annotations

from collections.abc import Sequence

from ...bundle.build_record import BuildRecord
from ...bundle.figures import FIGURES, present
from ...bundle.manifest import Manifest
from ...runtime.summary.engine_details import common_details, detail_tables
from ...runtime.summary.short_names import ShortNames
from ...runtime.summary.table import Table
from ...runtime.summary.tables import bundle_facts, engine_table, stage_table, submodel_table


def render_report(manifest: Manifest, build: BuildRecord) -> str:
    """Markdown: facts, submodels with their quality, engines with their parity, and the seconds of each stage."""
    sections = [
        f"# {manifest.name}",
        markdown(Table(["", ""], [*bundle_facts(manifest, build), *common_details(manifest).items()])),
        "## Submodels",
        _quality_note(manifest),
        markdown(submodel_table(manifest, build)),
        markdown(ShortNames.of(manifest).ids),
        "## Engines",
        markdown(engine_table(manifest, build)),
        *(f"## {heading}\n\n{markdown(table)}" for heading, table in detail_tables(manifest).items()),
        *_build_commands(build),
        "## Compile",
        markdown(stage_table(build)),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _quality_note(manifest: Manifest) -> str:
    measured = [entry.quality for entry in manifest.submodels if entry.quality]
    if not measured:
        return "Quality was not measured: the compile was given no data to compare outputs on."
    first = measured[0]
    positions = f" with {first.positions} positions" if first.positions is not None else ""
    held_out = f"{first.samples} samples{positions} that took no part in the ranking"
    head = f"Each submodel against the universal model on {held_out}; ± is the standard error of so few:"
    return "\n".join([head, "", *(f"- {FIGURES[n].heading}: {FIGURES[n].meaning}" for n in present([first.figures]))])


def _build_commands(build: BuildRecord) -> list[str]:
    if not build.build:
        return []
    note = "`nestforge build` makes a plan of each graph on the device. Without TensorRT's Python package, one to time:"
    return ["## Plans", note, "\n".join(["```", *build.build.values(), "```"])]


def markdown(table: Table) -> str:
    """A table as Markdown."""
    rows: list[Sequence[str]] = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
