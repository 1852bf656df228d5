"""``nestforge export``: bundles, or one submodel, in the form of another platform."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ...bundle.open_bundle import open_bundle
from ...runtime.inputs.options import SUBMODEL, TASK
from ...runtime.summary import ShortNames
from ...tables import Table
from ..console import show, working
from ..options import BUCKET, json_option

_EXAMPLES = """\b
Examples:
  nestforge export my.bundle --format onnx -o small.onnx --submodel S
  nestforge export my.bundle --format onnx -o reviews.onnx --bucket 1x128 --task reviews
  nestforge export my.bundle --format ortpackage -o my.ortpackage
  nestforge export laptop.bundle l4.bundle --format ortpackage -o my.ortpackage
  nestforge export my.bundle --format triton -o models
"""


@click.command("export", epilog=_EXAMPLES)
@click.argument("bundles", metavar="BUNDLE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--format", "form", type=click.Choice(["onnx", "ortpackage", "triton"]), required=True, help="Form to write."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Path to write; must not exist.")
@click.option("--submodel", metavar="ID", help=f"{SUBMODEL.metadata['help']} Default: the largest; of ortpackage all.")
@click.option("--bucket", type=BUCKET, help="Bucket of the submodel, where it has several.")
@click.option("--task", metavar="NAME", help=TASK.metadata["help"])
@json_option
def export_command(bundles: tuple[Path, ...], form: str, output: Path, as_json: bool, **settings: Any) -> None:
    """Write a bundle, or a submodel, for another platform.

    onnx: one submodel as one ONNX file for anyone's ONNX Runtime, its weights inside, or above 2 GB in one file beside
    it. The written file is asked and compared with the bundle's engine before it gets its name.

    ortpackage: submodels as components of a package that ONNX Runtime 1.31 opens, each file as of onnx, with weights
    once. Bundles of one model, compiled for other back ends, are variants by profile.

    triton: a model repository with one model for the whole bundle, whose Python backend runs nestforge.
    """
    if form != "ortpackage" and len(bundles) > 1:
        raise click.UsageError(f"{form} is of one bundle; ortpackage takes several")
    _FORMS[form](bundles, output, as_json, **settings)


def _onnx(bundles: Sequence[Path], output: Path, as_json: bool, **settings: Any) -> None:
    from ...compiler.platforms.onnx_file import export_onnx

    (bundle,) = bundles
    with working() as progress:
        found = export_onnx(bundle, output, progress=progress, **settings)
    manifest = open_bundle(bundle).manifest
    left_out = [name for name, entry in (("early exits", manifest.exits), ("KV cache", manifest.generation)) if entry]
    facts = Table.facts(
        [
            ("submodel", f"{ShortNames.of(manifest)(found.submodel)}, {found.precision}, {found.bucket}"),
            *([("task", found.task)] if found.task else []),
            ("with the engine's kernels", "equal to the bit"),
            ("with ONNX Runtime's own options", f"max abs {found.parity.max_abs:.1e}, {found.parity.cases} cases"),
            *([("not in the file", ", ".join(left_out))] if left_out else []),
        ]
    )
    show(as_json, found, lambda: [facts, f"wrote {', '.join(found.files)}, {found.bytes / 1e6:.1f} MB"])


def _ort_package(bundles: Sequence[Path], output: Path, as_json: bool, **settings: Any) -> None:
    from ...compiler.platforms.ort_package import export_ort_package

    with working() as progress:
        found = export_ort_package(bundles, output, progress=progress, **settings)
    manifests = [open_bundle(bundle).manifest for bundle in bundles]
    short = {one.id: ShortNames.of(manifest)(one.id) for manifest in manifests for one in manifest.submodels}
    names = ", ".join(f"{short[name]} ({', '.join(variants)})" for name, variants in found.components.items())
    said = f"wrote {found.package} with {names}, {found.bytes / 1e6:.1f} MB; ONNX Runtime opened each on the processor"
    show(as_json, found, lambda: [said])


def _triton(bundles: Sequence[Path], output: Path, as_json: bool, **settings: Any) -> None:
    from ...compiler.platforms.triton_repository import export_triton

    if any(value is not None for value in settings.values()):
        raise click.UsageError(
            "--submodel, --bucket and --task are for onnx and ortpackage; Triton's requests name them"
        )
    (bundle,) = bundles
    with working() as progress:
        found = export_triton(bundle, output, progress)
    said = f"wrote {found.repository} with model {found.model}; tritonserver --model-repository {found.repository}"
    show(as_json, found, lambda: [said])


_FORMS = {"onnx": _onnx, "ortpackage": _ort_package, "triton": _triton}
