"""``nestforge inspect``, ``report`` and ``plan``: a model or bundle as it is, and the submodel of each budget."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...bundle.manifest import MANIFEST_NAME
from ...bundle.open_bundle import open_bundle
from ...profiles.compile_request import CompileRequest
from ...profiles.precision import Precision
from ...runtime.summary import CacheSize, ShortNames, cache_facts, describe_axes
from ...strict import unstructure
from ...tables import Table
from ...whole_file import require_new, write_whole
from ..bundle_view import bundle_data, bundle_report
from ..console import Block, in_options, say, show, working
from ..options import field_options, given_settings, json_option, model_argument, of_job, path_option

if TYPE_CHECKING:
    from ...compiler.model_view import ModelView
    from ...compiler.planning.candidate import VariantView
    from ...compiler.planning.plan import Plan


_INSPECT_EXAMPLES = """\b
Examples:
  nestforge inspect MODEL --bucket 1x128
  nestforge inspect MODEL --profile raspberry-pi-5 --levels ffn=0.125,0.25,0.5,1
  nestforge inspect preset:matlm-850m
  nestforge inspect my.bundle --json
"""


@click.command("inspect", epilog=_INSPECT_EXAMPLES)
@click.argument("model_or_bundle", type=click.Path(path_type=Path))
@field_options(CompileRequest, "profile", "buckets", "budget_at", "levels", "exits")
@json_option
def inspect_command(model_or_bundle: Path, as_json: bool, **settings: Any) -> None:
    """Show a model, or the contents of a bundle.

    For a model, or that of a job that `compile --save` wrote: axes, parameters and FLOPs of the levels that a compile
    for the profile would build; preset:NAME is a configuration that nobody has trained yet. For a bundle: submodels,
    engines, files, parity. A folder with a manifest.json is a bundle. --profile, --bucket, --budget-at, --levels and
    --exit-layers are for models.
    """
    if os.path.exists(model_or_bundle / MANIFEST_NAME):
        if of_models := [option for option in given_settings().values() if option != "--json"]:
            raise click.UsageError(f"{', '.join(of_models)}: for models; a bundle's are fixed")
        bundle = open_bundle(model_or_bundle)
        show(as_json, bundle_data(bundle), lambda: bundle_report(bundle))
        return
    from ...compiler.model_view import view_model

    model, settings = of_job(model_or_bundle, settings)
    with working():  # the first use of host-cpu measures this host
        view = view_model(CompileRequest(model, **settings))
    show(as_json, view, lambda: _model_report(view))


_REPORT_EXAMPLES = """\b
Examples:
  nestforge report my.bundle --html my.html
  nestforge report a.bundle b.bundle --html both.html
"""


@click.command("report", epilog=_REPORT_EXAMPLES)
@click.argument("bundles", metavar="BUNDLE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@path_option("--html", "Page to write; there must be none.", "page", required=True)
def report_command(bundles: tuple[Path, ...], page: Path) -> None:
    """Write a page about one bundle, or several compared.

    One HTML file that needs no other and no network: quality over latency and memory, submodels, engines and their
    parity, exits, host and versions. Latencies are those of this host where `measure` has run here.
    """
    from ..html_report import render

    require_new(page)
    text = render([open_bundle(bundle) for bundle in bundles])
    write_whole(page, lambda stream: stream.write(text.encode()), "the report", new=True)
    say(f"wrote {page}")


def _model_report(view: ModelView) -> Iterator[Block]:
    yield Table.facts(
        [
            ("model", f"{view.name} ({view.family}), {view.folder}"),
            ("axes", describe_axes(view.axes)),
            *(("kept whole", line) for line in view.kept_whole),
            *([("left out", view.left_out)] if view.left_out else []),
            ("trained nested", "yes" if view.trained_nested else "no: a compile ranks its axes"),
            ("levels for", f"{view.profile}, widths in multiples of {view.width_multiple}"),
            ("precision", ", ".join(view.precisions)),
            *cache_facts(view.cache),
            *shared_variants(view.variants),
        ]
    )
    labels = list(view.levels[0].flops)
    has_ffn = any(level.ffn for level in view.levels)
    rows = [
        [
            level.label,
            f"{level.parameters / 1e6:.2f}",
            f"{level.non_embedding / 1e6:.2f}",
            *([f"{level.ffn / 1e6:.2f}"] if has_ffn else []),
            *(f"{count / 1e6:.2f}" for count in level.groups.values()),
            f"{level.weight_bytes / 1e6:.1f}",
            *(f"{level.flops[label] / 1e9:.3f}" for label in labels),
            *(f"{level.macs[label] / 1e9:.3f}" for label in labels),
        ]
        for level in view.levels
    ]
    heads = [f"{unit} {label}" for unit in ("GFLOPs", "GMACs") for label in labels]
    groups = [f"M {name}" for name in view.levels[0].groups]
    sizes = ["M params", "M non-emb.", *(["M FFN"] if has_ffn else []), *groups, "weights MB"]
    yield Table(["submodel", *sizes, *heads], rows)
    names = ShortNames({level.submodel: level.label for level in view.levels})
    *tables, last = [names.ids, *variant_tables(view.variants, names)]
    yield from tables
    yield [last, *(remark for level in view.levels for remark in level.rounding)]


_LISTED = 4  # rejected candidates shown per budget

_PLAN_EXAMPLES = """\b
Examples:
  nestforge plan MODEL --profile host-cpu
  nestforge plan MODEL --profile raspberry-pi-5 --levels ffn=0.25,0.5,1 --json
  nestforge plan MODEL --budget 'non_embedding_parameters<=245.4M' --budget 'latency_ms<=50 %' --promotion-order up-down
"""


_PLAN_FIELDS = (
    *("profile", "levels", "promotion_order", "budgets", "submodels", "buckets", "budget_at", "exits", "pairs"),
    *("variants", "precisions", "backend", "include", "generate", "slicing_table"),
)


@click.command("plan", epilog=_PLAN_EXAMPLES)
@model_argument
@field_options(CompileRequest, *_PLAN_FIELDS)
@json_option
def plan_command(model: Path, as_json: bool, **settings: Any) -> None:
    """Show the submodel of each budget, and the reason.

    Candidates that a budget rules out are listed with the reason. Nothing is traced. Latencies are predictions from
    the profile's figures; a compile on the target itself corrects them by measuring. A note says where the compile
    itself would not fit the memory or the disk of this host.
    """
    from ...compiler.job import plan_here, resolve
    from ...compiler.model_view import cache_of
    from ...compiler.planning.candidate import variant_views

    model, settings = of_job(model, settings)
    with working():  # the first use of host-cpu measures this host
        resolved = resolve(CompileRequest(model, **settings))
    source, device, made = resolved.source, resolved.profile, plan_here(resolved)
    variants_got = variant_views(source, [source.spec.parse(candidate.id) for candidate in made.candidates], device)
    cache = cache_of(source, device)
    show(
        as_json,
        {**unstructure(made), "variants": unstructure(variants_got), "cache": unstructure(cache)},
        lambda: _plan_report(made, variants_got, device.precisions, cache),
    )


def _plan_report(
    plan: Plan, variants: tuple[VariantView, ...], precisions: tuple[Precision, ...], cache: Sequence[CacheSize]
) -> Iterator[Block]:
    at = plan.budget_bucket
    yield Table.facts(
        [
            ("model", plan.model),
            ("profile", plan.profile),
            ("precision", ", ".join(precisions)),
            ("limits hold at", f"{at.batch}x{at.sequence}"),
            *cache_facts(cache),
            *shared_variants(variants),
            *([("compile takes", str(plan.cost))] if plan.cost else []),
        ]
    )
    verdicts = {
        budget.name: {budget.submodel: "chosen"} | {rejection.submodel: "no" for rejection in budget.rejected}
        for budget in plan.budgets
    }
    has_ffn = any(candidate.ffn_parameters for candidate in plan.candidates)
    rows = []
    for candidate in plan.candidates:
        cost = candidate.budget_cost
        rows.append(
            [
                candidate.label,
                f"{candidate.parameters / 1e6:.2f}",
                f"{candidate.non_embedding_parameters / 1e6:.2f}",
                *([f"{candidate.ffn_parameters / 1e6:.2f}"] if has_ffn else []),
                f"{candidate.memory_mb:.1f}",
                f"{cost.flops / 1e9:.3f}",
                f"{cost.latency_ms:.2f}",
                *(verdicts[budget.name].get(candidate.id, "fits") for budget in plan.budgets),
            ]
        )
    sizes = ["M params", "M non-emb.", *(["M FFN"] if has_ffn else []), "memory MB"]
    columns = ["submodel", *sizes, "GFLOPs", f"{plan.latency_basis} ms"]
    used = {budget.submodel for budget in plan.budgets}
    chosen = [number for number, candidate in enumerate(plan.candidates) if candidate.id in used]
    yield Table([*columns, *(budget.name for budget in plan.budgets)], rows, chosen)
    names = ShortNames({candidate.id: candidate.label for candidate in plan.candidates})
    yield names.ids
    yield from variant_tables(variants, names)
    for budget in plan.budgets:
        limits = [f"{f.name} {value:g}" for f in fields(budget.limits) if (value := getattr(budget.limits, f.name))]
        more = len(budget.rejected) - _LISTED
        yield [
            f"budget {budget.name} ({', '.join(limits) or 'no limits'}): {names(budget.submodel)}",
            f"  {budget.reason}",
            *(f"  rejected {names(one.submodel)}: {one.reason}" for one in budget.rejected[:_LISTED]),
            *([f"  and {more} larger ones, listed by --json"] if more > 0 else []),
        ]
    yield from (f"note: {in_options(note)}" for note in plan.notes)


def shared_variants(views: Sequence[VariantView]) -> list[tuple[str, str]]:
    """Computations with the same variant everywhere, and that variant."""
    first = views[0].variants if views else {}
    return [(f"variant of {computed}", variant) for computed, variant in first.items() if _common(views, computed)]


def variant_tables(views: Sequence[VariantView], names: ShortNames) -> Iterator[Table]:
    """A table of what has not the same variant everywhere, if there is any."""
    computed = [name for name in views[0].variants if not _common(views, name)] if views else []
    if computed:
        rows = [[names(view.submodel), view.bucket, *(view.variants[name] for name in computed)] for view in views]
        yield Table(["submodel", "bucket", *(f"variant of {name}" for name in computed)], rows)


def _common(views: Sequence[VariantView], computed: str) -> bool:
    return len({view.variants[computed] for view in views}) == 1
