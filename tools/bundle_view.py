"""A bundle as the command line shows it."""

from __future__ import annotations

from typing import Any

import click

from ..runtime.bundle import Bundle
from ..runtime.engine_details import common_details, detail_tables
from ..runtime.tables import bundle_facts, engine_table, submodel_table
from .console import print_facts, print_table


def bundle_data(bundle: Bundle) -> dict[str, Any]:
    """The bundle as ``--json`` prints it: the manifest and the build record, complete."""
    return {"kind": "bundle", "path": str(bundle.path), "manifest": bundle.manifest, "build": bundle.build}


def print_bundle(bundle: Bundle) -> None:
    """Facts, submodels, engines with what they decide, and files of a bundle."""
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
    click.echo()
    print_table(["file", "bytes"], [[entry.path, f"{entry.bytes:,}"] for entry in bundle.manifest.files])


def print_submodels(bundle: Bundle) -> None:
    """One row a submodel: size, quality, and the latency of its largest bucket."""
    submodels = submodel_table(bundle.manifest, bundle.build)
    print_table(submodels.columns, submodels.rows)
