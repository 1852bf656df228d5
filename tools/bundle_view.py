"""A bundle as the command line shows it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..bundle.build_record import BuildRecord
from ..bundle.device_files.measurements import Measurements
from ..bundle.device_files.plan_index import read_plans
from ..bundle.device_files.task_index import TaskEntry, read_tasks
from ..bundle.entries.engine_entry import ParityOutput
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
    max_abs,
    min_cosine,
    sizes_of,
    submodel_table,
)
from ..runtime.tasks import merged_bytes
from ..tables import Table
from .console import Block, in_options

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


def bundle_report(bundle: Bundle) -> Iterator[Block]:
    """Facts, submodels, engines with what they decide, plans, and files of a bundle."""
    facts = [("bundle", str(bundle.path)), *((name, in_options(value)) for name, value in here_facts(bundle))]
    yield Table.facts(facts)
    yield from submodels_report(bundle)
    yield engine_table(bundle.manifest, measured_build(bundle))
    yield from detail_tables(bundle.manifest).values()
    if _needs_plans(bundle):
        yield _plans_report(bundle)
    if bundle.manifest.tasks is not None:
        yield tasks_report(bundle)
    yield files_table(bundle)


def submodels_report(bundle: Bundle) -> Iterator[Block]:
    """One row a submodel, with its size, quality and latency at the shape of budgets; and which one each label is."""
    yield submodel_table(bundle.manifest, measured_build(bundle))
    yield ShortNames.of(bundle.manifest).ids


def files_table(bundle: Bundle) -> Table:
    files = bundle.manifest.files
    return Table.of(files, {"file": lambda entry: entry.path, "bytes": lambda entry: f"{entry.bytes:,}"})


def tasks_report(bundle: Bundle) -> list[Block]:
    """One row a task: what it takes, what its folder states, who answers for it, and the worst parity of those."""
    short, tasks = ShortNames.of(bundle.manifest), read_tasks(bundle)

    def outputs(task: TaskEntry) -> list[ParityOutput]:
        return [output for receipt in task.parity for output in receipt.parity.outputs]

    report: list[Block] = [
        Table.of(
            tasks,
            {
                "task": lambda task: task.name,
                "MB": lambda task: f"{task.bytes / 1e6:.2f}",
                "states": lambda task: ", ".join(f"{name} {value}" for name, value in task.facts.items()),
                "submodels": lambda task: ", ".join(map(short, task.submodels)),
                "parity max abs": lambda task: max_abs(outputs(task)),
                "parity cosine": lambda task: min_cosine(outputs(task)),
            },
        )
    ]
    if not tasks:
        report = ["engines take tasks, and there is none yet: nestforge add-task BUNDLE NAME=FOLDER --against MODEL"]
    if bundle.manifest.tasks is not None and bundle.manifest.tasks.merged:
        held = merged_bytes([bundle.with_merged(BASE)]) / 1e6
        report.append(f"one that is merged into weights has engines of its own, {held:.2f} MB with all of them open")
    return report


def _needs_plans(bundle: Bundle) -> bool:
    return any(not BACKENDS[engine.backend].runs_graphs for engine in bundle.manifest.every_engine)


def _plans_report(bundle: Bundle) -> list[Block]:
    """One row a plan, and which graphs have none."""
    plans, report = read_plans(bundle), list[Block]()
    if plans:
        report.append(
            Table.of(
                plans,
                {
                    "plan of": lambda plan: plan.graph,
                    "for": lambda plan: plan.gpu,
                    "MB": lambda plan: f"{plan.bytes / 1e6:.1f}",
                    "activations MB": lambda plan: f"{plan.activation_bytes / 1e6:.1f}",
                    "layers": lambda plan: sum(plan.layers.values()),
                    "parity max abs": lambda plan: max_abs([plan.parity]),
                    "parity cosine": lambda plan: min_cosine([plan.parity]),
                },
            )
        )
    graphs = {engine.file for engine in bundle.manifest.every_engine if not BACKENDS[engine.backend].runs_graphs}
    if missing := graphs - {plan.graph for plan in plans}:
        report.append(f"{len(missing)} of {len(graphs)} graphs have no plan yet: run `nestforge build` on the device")
    return report


def cpu_seconds_line(bundle: Bundle, total: float) -> str:
    """Where the ``total`` CPU seconds of a compile went, the most expensive stages first."""
    stages = sorted(bundle.build.cpu_seconds.items(), key=lambda stage: -stage[1])[:_STAGES_SHOWN]
    return f"{total:.0f} CPU seconds, those of {', '.join(f'{stage} {seconds:.0f}' for stage, seconds in stages)}"


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
