"""A bundle as the command line shows it."""

from __future__ import annotations

from typing import Any

import click

from ..runtime.bundle.engine_details import common_details, detail_tables
from ..runtime.bundle.open_bundle import Bundle
from ..runtime.bundle.plan_index import read_plans
from ..runtime.bundle.tables import bundle_facts, engine_table, submodel_table
from .console import print_facts, print_table, say


def bundle_data(bundle: Bundle) -> dict[str, Any]:
    """The bundle as ``--json`` prints it: the manifest and the build record, complete, and plans if it needs any."""
    data = {"kind": "bundle", "path": str(bundle.path), "manifest": bundle.manifest, "build": bundle.build}
    return {**data, "plans": read_plans(bundle)} if _needs_plans(bundle) else data


def print_bundle(bundle: Bundle) -> None:
    """Facts, submodels, engines with what they decide, plans, and files of a bundle."""
    facts = [*bundle_facts(bundle.manifest, bundle.build), *common_details(bundle.manifest).items()]
    print_facts([("bundle", str(bundle.path)), *facts])
    click.echo()
    print_submodels(bundle)
    click.echo()
    engines = engine_table(bundle.manifest, bundle.build)
    print_table(engines.columns, engines.rows)
    for table in detail_tables(bundle.manifest).values():
        click.echo()
        print_table(table.columns, table.rows)
    if _needs_plans(bundle):
        click.echo()
        _print_plans(bundle)
    click.echo()
    print_table(["file", "bytes"], [[entry.path, f"{entry.bytes:,}"] for entry in bundle.manifest.files])


def _needs_plans(bundle: Bundle) -> bool:
    return any(engine.backend == "tensorrt" for engine in bundle.manifest.engines)


def _print_plans(bundle: Bundle) -> None:
    """One row a plan, and which graphs have none."""
    plans = read_plans(bundle)
    rows = [
        [
            plan.graph,
            str(plan.gpu),
            f"{plan.bytes / 1e6:.1f}",
            f"{plan.activation_bytes / 1e6:.1f}",
            str(sum(plan.layers.values())),
            f"{plan.parity.max_abs:.1e}",
            f"{plan.parity.min_cosine:.7f}",
        ]
        for plan in plans
    ]
    if rows:
        columns = ["plan of", "for", "MB", "activations MB", "layers", "parity max abs", "parity cosine"]
        print_table(columns, rows)
    graphs = {engine.file for engine in bundle.manifest.engines if engine.backend == "tensorrt"}
    if missing := graphs - {plan.graph for plan in plans}:
        say(f"{len(missing)} of {len(graphs)} graphs have no plan yet: run `nestforge build` on the device")


def print_submodels(bundle: Bundle) -> None:
    """One row a submodel: size, quality, and the latency of its largest bucket."""
    submodels = submodel_table(bundle.manifest, bundle.build)
    print_table(submodels.columns, submodels.rows)
