"""``nestforge inspect``: what a model offers to shrink, or what a bundle holds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import click
from click.core import ParameterSource

from ...elastic import Axis, Bucket
from ...profiles.precision import Precision
from ...profiles.probe_host import HOST_PROFILE_NAME
from ...runtime.bundle.manifest import MANIFEST_NAME
from ...runtime.bundle.open_bundle import open_bundle
from ...runtime.bundle.tables import describe_axes
from ...workload import macs
from ..bundle_view import bundle_data, print_bundle
from ..console import print_facts, print_json, print_table, say, working
from ..options import bucket_option, exits_option, json_option, levels_option, profile_option
from ..variant_view import VariantView, print_variants, shared_variants, variant_views

EXAMPLES = """\b
Examples:
  nestforge inspect MODEL --bucket 1x128
  nestforge inspect MODEL --profile raspberry-pi-5 --levels ffn=0.125,0.25,0.5,1
  nestforge inspect preset:matlm-850m
  nestforge inspect my.bundle --json
"""


@dataclass(frozen=True)
class LevelView:
    """One level of a model; per bucket label ``flops`` in the variants that engines get, as ``plan`` counts them, and
    ``macs`` as papers do: multiply-adds of the matrix products alone, in the first variant of each on any device.

    ``non_embedding`` are the parameters outside the tables of tokens and positions, ``ffn`` those that FFN axes slice.
    """

    label: str
    submodel: str
    parameters: int
    non_embedding: int
    ffn: int
    weight_bytes: int
    flops: dict[str, int]
    macs: dict[str, int]
    rounding: tuple[str, ...]


@dataclass(frozen=True)
class ModelView:
    """A model as ``--json`` prints it; the levels' widths are multiples of ``width_multiple``, as the profile asks, and
    ``forms`` are the variants that a compile for it takes. Of several ``precisions`` the levels are in the widest."""

    kind: str
    name: str
    folder: str
    family: str
    trained_nested: bool
    profile: str
    width_multiple: int
    precisions: tuple[Precision, ...]
    axes: tuple[Axis, ...]
    levels: tuple[LevelView, ...]
    forms: tuple[VariantView, ...]


@click.command(epilog=EXAMPLES)
@click.argument("model_or_bundle", type=click.Path(path_type=Path))
@profile_option
@bucket_option
@levels_option
@exits_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    model_or_bundle: Path,
    profile: str,
    buckets: tuple[Bucket, ...],
    levels: tuple[tuple[str, tuple[float, ...]], ...],
    exits: tuple[int, ...] | None,
    as_json: bool,
) -> None:
    """Show what a model offers, or what a bundle holds.

    Of a model: axes, parameters and FLOPs of the levels that a compile for the profile would build; preset:NAME is a
    configuration that nobody has trained yet. Of a bundle: submodels, engines, files, parity. A folder with a
    manifest.json is a bundle. --profile, --bucket, --levels and --exits are for models.
    """
    if os.path.exists(model_or_bundle / MANIFEST_NAME):
        if buckets or levels or exits or ctx.get_parameter_source("profile") is not ParameterSource.DEFAULT:
            raise click.UsageError("--profile, --bucket, --levels and --exits are for models; a bundle's are fixed")
        bundle = open_bundle(model_or_bundle)
        if as_json:
            print_json(bundle_data(bundle))
        else:
            print_bundle(bundle)
        return
    view = view_model(model_or_bundle, buckets, dict(levels), profile, exits)
    if as_json:
        print_json(view)
    else:
        _print_model(view)


def view_model(
    folder: Path,
    buckets: tuple[Bucket, ...],
    fractions: dict[str, tuple[float, ...]],
    profile: str = HOST_PROFILE_NAME,
    exits: tuple[int, ...] | None = None,
) -> ModelView:
    """Reads headers only; buckets and fractions that are not given are the profile's.

    Raises CheckpointError, UnsupportedModelError, ProfileError, ExportError or PlanError.
    """
    from ...compiler.planning.variants import variant_workload
    from ...compiler.request import CompileRequest, resolve

    with working():  # the first use of host-cpu measures this host
        resolved = resolve(CompileRequest(folder, profile, levels=fractions, buckets=buckets, exits=exits))
    source, device, steps, shapes = resolved.source, resolved.profile, resolved.levels, resolved.profile.buckets
    views = [
        LevelView(
            label=level.label,
            submodel=level.submodel.id,
            parameters=groups.total,
            non_embedding=groups.non_embedding,
            ffn=groups.ffn,
            weight_bytes=source.weight_bytes(level.submodel, on_cpu=device.backend == "onnxruntime"),
            flops={
                b.label: sum(op.flops for op in variant_workload(source, level.submodel, level.submodel.at(b), device))
                for b in shapes
            },
            macs={b.label: macs(source.workload(level.submodel, b)) for b in shapes},
            rounding=level.rounding,
        )
        for level in steps
        for groups in [source.parameter_groups(level.submodel)]
    ]
    spec = source.spec
    return ModelView(
        kind="model",
        name=source.name,
        folder=str(folder),
        family=source.family.name,
        trained_nested=spec.trained_nested,
        profile=device.name,
        width_multiple=device.width_multiple,
        precisions=device.precisions,
        axes=spec.axes,
        levels=tuple(views),
        forms=variant_views(source, [level.submodel for level in steps], device),
    )


def _print_model(view: ModelView) -> None:
    print_facts(
        [
            ("model", f"{view.name} ({view.family}), {view.folder}"),
            ("axes", describe_axes(view.axes)),
            ("trained nested", "yes" if view.trained_nested else "no: a compile ranks its axes"),
            ("levels for", f"{view.profile}, widths in multiples of {view.width_multiple}"),
            ("precision", ", ".join(view.precisions)),
            *shared_variants(view.forms),
        ]
    )
    click.echo()
    labels = list(view.levels[0].flops)
    has_ffn = any(level.ffn for level in view.levels)
    rows = [
        [
            level.label,
            level.submodel,
            f"{level.parameters / 1e6:.2f}",
            f"{level.non_embedding / 1e6:.2f}",
            *([f"{level.ffn / 1e6:.2f}"] if has_ffn else []),
            f"{level.weight_bytes / 1e6:.1f}",
            *(f"{level.flops[label] / 1e9:.3f}" for label in labels),
            *(f"{level.macs[label] / 1e9:.3f}" for label in labels),
        ]
        for level in view.levels
    ]
    heads = [f"{unit} {label}" for unit in ("GFLOPs", "GMACs") for label in labels]
    sizes = ["M params", "M non-emb.", *(["M FFN"] if has_ffn else []), "weights MB"]
    print_table(["level", "submodel", *sizes, *heads], rows)
    print_variants(view.forms)
    for remark in (remark for level in view.levels for remark in level.rounding):
        say(remark)
