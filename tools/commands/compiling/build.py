"""``nestforge build``: the plans of a bundle's TensorRT engines, on the device that will run them."""

from __future__ import annotations

from pathlib import Path

import click

from ....runtime.summary.short_names import ShortNames
from ...bundle_view import print_ids
from ...console import print_json, print_table, say, working
from ...options import bundle_argument, json_option


@click.command(epilog="\b\nExamples:\n  nestforge build my.bundle\n  nestforge build my.bundle --json")
@bundle_argument
@json_option
def command(bundle: Path, as_json: bool) -> None:
    """Build a bundle's TensorRT plans on this device.

    Each plan is built from its graph, checked against it, and listed beside the bundle's files, which stay as they are.
    Plans that are there already, for this GPU and release of TensorRT, are kept.
    """
    from ....bundle.open_bundle import open_bundle
    from ....compiler.tensorrt.build_bundle import build_plans

    with working() as progress:
        plans = build_plans(bundle, progress)
    if as_json:
        print_json(plans)
        return
    names = ShortNames.of(open_bundle(bundle).manifest)
    rows = [
        [
            names(plan.engine),
            f"{plan.entry.bytes / 1e6:.1f}",
            f"{plan.entry.activation_bytes / 1e6:.1f}",
            str(sum(plan.entry.layers.values())),
            f"{plan.entry.parity.max_abs:.2g}",
            "kept" if plan.was_kept else f"{plan.entry.seconds:.0f} s",
        ]
        for plan in plans
    ]
    print_table(["engine", "plan MB", "activations MB", "layers", "max abs", "built in"], rows)
    click.echo()
    print_ids(names)
    say(f"\nplans for {plans[0].entry.gpu}")
