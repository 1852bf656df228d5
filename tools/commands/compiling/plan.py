"""``nestforge plan``: which submodel each budget gets, and why not a larger one. Nothing is traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ....profiles.compile_request import CompileRequest
from ....runtime.summary.cache_sizes import CacheSize, cache_facts
from ....runtime.summary.short_names import ShortNames
from ....strict import unstructure
from ...bundle_view import print_ids
from ...console import print_facts, print_json, print_table, say, working
from ...options import field_options, json_option, model_argument
from ...spoken import in_options
from ...variant_view import print_variants, shared_variants

if TYPE_CHECKING:
    from ....compiler.planning.plan import Plan
    from ....compiler.planning.variants import VariantView
    from ....profiles.precision import Precision

_LISTED = 4  # rejected candidates shown per budget

EXAMPLES = """\b
Examples:
  nestforge plan MODEL --profile host-cpu
  nestforge plan MODEL --profile raspberry-pi-5 --levels ffn=0.25,0.5,1 --json
  nestforge plan MODEL --budget 'non_embedding_parameters<=245.4M' --budget 'latency_ms<=50 %' --promotion-order up-down
"""


FIELDS = (
    *("profile", "levels", "promotion_order", "budgets", "submodels", "buckets", "budget_at", "exits", "variants"),
    "precisions",
)


@click.command(epilog=EXAMPLES)
@model_argument
@field_options(CompileRequest, *FIELDS)
@json_option
def command(model: Path, as_json: bool, **settings: Any) -> None:
    """Show which submodel each budget gets, and why.

    Candidates that a budget rules out are listed with the reason. Nothing is traced. Latencies are predictions from
    the profile's figures; a compile on the target itself corrects them by measuring.
    """
    from ....compiler.model_view import cache_of
    from ....compiler.planning.variants import variant_views
    from ....compiler.request import resolve

    with working():  # the first use of host-cpu measures this host
        resolved = resolve(CompileRequest(model, **settings))
    source, device, made = resolved.source, resolved.profile, resolved.plan()
    variants_got = variant_views(source, [source.spec.parse(candidate.id) for candidate in made.candidates], device)
    cache = cache_of(source, device)
    if as_json:
        print_json({**unstructure(made), "variants": unstructure(variants_got), "cache": unstructure(cache)})
    else:
        _print_plan(made, variants_got, device.precisions, cache)


def _print_plan(
    plan: Plan, variants: tuple[VariantView, ...], precisions: tuple[Precision, ...], cache: Sequence[CacheSize]
) -> None:
    at = plan.budget_bucket
    print_facts(
        [
            ("model", plan.model),
            ("profile", plan.profile),
            ("precision", ", ".join(precisions)),
            ("limits hold at", f"{at.batch}x{at.sequence}"),
            *cache_facts(cache),
            *shared_variants(variants),
        ]
    )
    click.echo()
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
    print_table([*columns, *(budget.name for budget in plan.budgets)], rows, chosen)
    names = ShortNames({candidate.id: candidate.label for candidate in plan.candidates})
    click.echo()
    print_ids(names)
    print_variants(variants, names)
    for budget in plan.budgets:
        limits = [f"{f.name} {value:g}" for f in fields(budget.limits) if (value := getattr(budget.limits, f.name))]
        say(f"\nbudget {budget.name} ({', '.join(limits) or 'no limits'}): {names(budget.submodel)}")
        say(f"  {budget.reason}")
        for rejection in budget.rejected[:_LISTED]:
            say(f"  rejected {names(rejection.submodel)}: {rejection.reason}")
        if len(budget.rejected) > _LISTED:
            say(f"  and {len(budget.rejected) - _LISTED} larger ones, listed by --json")
    for note in plan.notes:
        say(f"\nnote: {in_options(note)}")
