"""``nestforge inspect``: what a model offers to shrink, or what a bundle holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from ...elastic import Axis, Bucket
from ...runtime.bundle import open_bundle
from ...runtime.manifest import MANIFEST_NAME
from ...runtime.tables import describe_axes
from ..bundle_view import bundle_data, print_bundle
from ..console import print_facts, print_json, print_table
from ..options import bucket_option, json_option, levels_option

_WIDTH_MULTIPLE = 8
_DEFAULT_BUCKET = Bucket(1, 128)

EXAMPLES = """\b
Examples:
  nestforge inspect MODEL --bucket 1x128
  nestforge inspect MODEL --levels ffn=0.125,0.25,0.5,1
  nestforge inspect my.bundle --json
"""


@dataclass(frozen=True)
class LevelView:
    """One level of a model; ``flops`` per bucket label."""

    label: str
    submodel: str
    parameters: int
    weight_bytes: int
    flops: dict[str, int]
    rounding: tuple[str, ...]


@dataclass(frozen=True)
class ModelView:
    """A model as ``--json`` prints it."""

    kind: str
    name: str
    folder: str
    family: str
    trained_nested: bool
    axes: tuple[Axis, ...]
    levels: tuple[LevelView, ...]


@click.command(epilog=EXAMPLES)
@click.argument("model_or_bundle", type=click.Path(path_type=Path))
@bucket_option
@levels_option
@json_option
def command(
    model_or_bundle: Path,
    buckets: tuple[Bucket, ...],
    levels: tuple[tuple[str, tuple[float, ...]], ...],
    as_json: bool,
) -> None:
    """Show what a model offers, or what a bundle holds.

    Of a model: axes, granularities, parameters, FLOPs. Of a bundle: submodels, engines, files, parity. A folder
    with a manifest.json is a bundle. --bucket and --levels are for models.
    """
    if (model_or_bundle / MANIFEST_NAME).exists():
        if buckets or levels:
            raise click.UsageError("--bucket and --levels are for models; a bundle's are fixed")
        bundle = open_bundle(model_or_bundle)
        if as_json:
            print_json(bundle_data(bundle))
        else:
            print_bundle(bundle)
        return
    view = view_model(model_or_bundle, buckets or (_DEFAULT_BUCKET,), dict(levels))
    if as_json:
        print_json(view)
    else:
        _print_model(view)


def view_model(folder: Path, buckets: tuple[Bucket, ...], fractions: dict[str, tuple[float, ...]]) -> ModelView:
    """Reads headers only. Raises CheckpointError, UnsupportedModelError or PlanError."""
    from ...compiler.levels import levels
    from ...exporters.source import open_source

    source = open_source(folder)
    views = [
        LevelView(
            label=level.label,
            submodel=level.submodel.id,
            parameters=source.parameters(level.submodel),
            weight_bytes=source.weight_bytes(level.submodel),
            flops={b.label: sum(op.flops for op in source.workload(level.submodel, b)) for b in buckets},
            rounding=level.rounding,
        )
        for level in levels(source.spec, fractions or None, _WIDTH_MULTIPLE)
    ]
    spec = source.spec
    return ModelView(
        "model", source.name, str(folder), source.family.name, spec.trained_nested, spec.axes, tuple(views)
    )


def _print_model(view: ModelView) -> None:
    print_facts(
        [
            ("model", f"{view.name} ({view.family}), {view.folder}"),
            ("axes", describe_axes(view.axes)),
            ("trained nested", "yes" if view.trained_nested else "no: a compile ranks its axes"),
        ]
    )
    click.echo()
    labels = list(view.levels[0].flops)
    rows = [
        [
            level.label,
            level.submodel,
            f"{level.parameters / 1e6:.2f}",
            f"{level.weight_bytes / 1e6:.1f}",
            *(f"{level.flops[label] / 1e9:.3f}" for label in labels),
        ]
        for level in view.levels
    ]
    print_table(["level", "submodel", "M params", "weights MB", *(f"GFLOPs {label}" for label in labels)], rows)
    for remark in (remark for level in view.levels for remark in level.rounding):
        click.echo(remark)
