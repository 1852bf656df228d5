"""``nestforge inspect``: what a model offers to shrink, or what a bundle holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ....bundle.manifest import MANIFEST_NAME
from ....bundle.open_bundle import open_bundle
from ....profiles.compile_request import CompileRequest
from ....runtime.summary.cache_sizes import cache_facts
from ....runtime.summary.short_names import ShortNames
from ....runtime.summary.tables import describe_axes
from ...bundle_view import bundle_data, print_bundle, print_ids
from ...console import print_facts, print_json, print_table, say, working
from ...options import field_options, json_option
from ...variant_view import print_variants, shared_variants

if TYPE_CHECKING:
    from ....compiler.model_view import ModelView

EXAMPLES = """\b
Examples:
  nestforge inspect MODEL --bucket 1x128
  nestforge inspect MODEL --profile raspberry-pi-5 --levels ffn=0.125,0.25,0.5,1
  nestforge inspect preset:matlm-850m
  nestforge inspect my.bundle --json
"""


FIELDS = ("profile", "buckets", "budget_at", "levels", "exits")


@click.command(epilog=EXAMPLES)
@click.argument("model_or_bundle", type=click.Path(path_type=Path))
@field_options(CompileRequest, *FIELDS)
@json_option
def command(model_or_bundle: Path, as_json: bool, **settings: Any) -> None:
    """Show what a model offers, or what a bundle holds.

    For a model: axes, parameters and FLOPs of the levels that a compile for the profile would build; preset:NAME is a
    configuration that nobody has trained yet. For a bundle: submodels, engines, files, parity. A folder with a
    manifest.json is a bundle. --profile, --bucket, --budget-at, --levels and --exits are for models.
    """
    if os.path.exists(model_or_bundle / MANIFEST_NAME):
        source = click.get_current_context().get_parameter_source
        if any(source(name) is not ParameterSource.DEFAULT for name in FIELDS):
            raise click.UsageError(
                "--profile, --bucket, --budget-at, --levels and --exits are for models; a bundle's are fixed"
            )
        bundle = open_bundle(model_or_bundle)
        if as_json:
            print_json(bundle_data(bundle))
        else:
            print_bundle(bundle)
        return
    from ....compiler.model_view import view_model

    with working():  # the first use of host-cpu measures this host
        view = view_model(CompileRequest(model_or_bundle, **settings))
    if as_json:
        print_json(view)
    else:
        _print_model(view)


def _print_model(view: ModelView) -> None:
    print_facts(
        [
            ("model", f"{view.name} ({view.family}), {view.folder}"),
            ("axes", describe_axes(view.axes)),
            ("trained nested", "yes" if view.trained_nested else "no: a compile ranks its axes"),
            ("levels for", f"{view.profile}, widths in multiples of {view.width_multiple}"),
            ("precision", ", ".join(view.precisions)),
            *cache_facts(view.cache),
            *shared_variants(view.variants),
        ]
    )
    click.echo()
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
    print_table(["submodel", *sizes, *heads], rows)
    names = ShortNames({level.submodel: level.label for level in view.levels})
    click.echo()
    print_ids(names)
    print_variants(view.variants, names)
    for remark in (remark for level in view.levels for remark in level.rounding):
        say(remark)
