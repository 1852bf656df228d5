"""A bundle as the command line shows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from ..bundle.build_record import BuildRecord
from ..bundle.device_files.measurements import Measurements
from ..bundle.device_files.plan_index import read_plans
from ..bundle.device_files.task_index import read_tasks
from ..bundle.entries.task_entry import BASE
from ..bundle.figures import quality_warnings
from ..bundle.open_bundle import Bundle
from ..profiles.backends import BACKENDS
from ..runtime.device.threads import threads_or_default
from ..runtime.engines.latencies import HostLatencies, host_latencies
from ..runtime.summary import (
    ShortNames,
    bundle_facts,
    common_details,
    detail_tables,
    engine_table,
    latency_warnings,
    sizes_of,
    submodel_table,
)
from ..runtime.tasks import merged_bytes
from .console import in_options, print_facts, print_table, say

# Stages shown of the CPU seconds of a compile; report.md has every stage.
_STAGES_SHOWN = 5


def bundle_data(bundle: Bundle) -> dict[str, Any]:
    """The bundle as ``--json`` prints it: the manifest and the build record, complete, what hosts measured since, what
    to be warned of, what a cache takes where it generates, tasks, and plans if it needs any."""
    measurements = Measurements.read(bundle)
    data = {
        "kind": "bundle",
        "path": str(bundle.path),
        "manifest": bundle.manifest,
        "build": bundle.build,
        "measurements": measurements.hosts if measurements else [],
        "warnings": bundle_warnings(bundle),
        "cache": sizes_of(bundle.manifest.generation),
        "tasks": read_tasks(bundle),
    }
    return {**data, "plans": read_plans(bundle)} if _needs_plans(bundle) else data


def bundle_warnings(bundle: Bundle) -> list[str]:
    """Warnings: submodels that keep little of the universal model, and figures by which the runtime
    chooses here and which are not to be trusted."""
    return [*quality_warnings(bundle.manifest), *latency_warnings(_here(bundle).latencies)]


def here_facts(bundle: Bundle) -> list[tuple[str, str]]:
    """Name and value of what holds for all of the bundle, latencies as on this host."""
    facts = bundle_facts(bundle.manifest, measured_build(bundle))
    return [*facts, *common_details(bundle.manifest).items(), *_measured_facts(bundle, _here(bundle))]


def print_bundle(bundle: Bundle) -> None:
    """Facts, submodels, engines with what they decide, plans, and files of a bundle."""
    print_facts([("bundle", str(bundle.path)), *((name, in_options(value)) for name, value in here_facts(bundle))])
    click.echo()
    print_submodels(bundle)
    click.echo()
    engines = engine_table(bundle.manifest, measured_build(bundle))
    print_table(engines.columns, engines.rows)
    for table in detail_tables(bundle.manifest).values():
        click.echo()
        print_table(table.columns, table.rows)
    if _needs_plans(bundle):
        click.echo()
        _print_plans(bundle)
    if bundle.manifest.tasks is not None:
        click.echo()
        print_tasks(bundle)
    click.echo()
    print_table(["file", "bytes"], [[entry.path, f"{entry.bytes:,}"] for entry in bundle.manifest.files])


def print_tasks(bundle: Bundle) -> None:
    """One row a task: what it takes, what its folder states, who answers for it, and the worst parity of those."""
    rows, short = [], ShortNames.of(bundle.manifest)
    for task in read_tasks(bundle):
        outputs = [output for receipt in task.parity for output in receipt.parity.outputs]
        rows.append(
            [
                task.name,
                f"{task.bytes / 1e6:.2f}",
                ", ".join(f"{name} {value}" for name, value in task.facts.items()),
                ", ".join(map(short, task.submodels)),
                f"{max(output.max_abs for output in outputs):.1e}",
                f"{min(output.min_cosine for output in outputs):.7f}",
            ]
        )
    if rows:
        print_table(["task", "MB", "states", "submodels", "parity max abs", "parity cosine"], rows)
    else:
        say("engines take tasks, and there is none yet: nestforge add-task BUNDLE NAME=FOLDER --against MODEL")
    if bundle.manifest.tasks is not None and bundle.manifest.tasks.merged:
        held = merged_bytes([bundle.with_merged(BASE)]) / 1e6
        say(f"one that is merged into weights has engines of its own, {held:.2f} MB with all of them open")


def _needs_plans(bundle: Bundle) -> bool:
    return any(not BACKENDS[engine.backend].runs_graphs for engine in bundle.manifest.every_engine)


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
    graphs = {engine.file for engine in bundle.manifest.every_engine if not BACKENDS[engine.backend].runs_graphs}
    if missing := graphs - {plan.graph for plan in plans}:
        say(f"{len(missing)} of {len(graphs)} graphs have no plan yet: run `nestforge build` on the device")


def print_cpu_seconds(bundle: Bundle, total: float) -> None:
    """Where the ``total`` CPU seconds of a compile went, the most expensive stages first."""
    stages = sorted(bundle.build.cpu_seconds.items(), key=lambda stage: -stage[1])[:_STAGES_SHOWN]
    say(f"{total:.0f} CPU seconds, those of {', '.join(f'{stage} {seconds:.0f}' for stage, seconds in stages)}")


def print_submodels(bundle: Bundle) -> None:
    """One row a submodel: size, quality, and the latency at the shape of budgets."""
    submodels = submodel_table(bundle.manifest, measured_build(bundle))
    print_table(submodels.columns, submodels.rows, submodels.chosen)
    click.echo()
    print_ids(ShortNames.of(bundle.manifest))


def print_ids(names: ShortNames) -> None:
    """Which submodel each label stands for."""
    print_table(names.ids.columns, names.ids.rows)


def measured_build(bundle: Bundle) -> BuildRecord:
    """The build record with the latencies that this host chooses by."""
    return replace(bundle.build, latencies=_here(bundle).latencies)


def _here(bundle: Bundle) -> HostLatencies:
    return host_latencies(bundle, threads_or_default(None))


def _measured_facts(bundle: Bundle, here: HostLatencies) -> list[tuple[str, str]]:
    """Where the measured latencies that are shown come from, and which other hosts measured."""
    measurements = Measurements.read(bundle)
    hosts = measurements.hosts if measurements else ()
    facts = []
    if here.measurement is not None:
        made = f"on {here.measurement.threads} threads, {here.measurement.created}"
        facts.append(("latencies", f"measured by this host {made}, in place of the compile's"))
    others = [f"{each.host}, {each.threads} threads" for each in hosts if each != here.measurement]
    return [*facts, *(("measured by", other) for other in others)]
