"""``nestforge verify`` and ``consistency``: a bundle beside its model, submodels beside the universal one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...errors import ParityError
from ...runtime.engines.onnxruntime_gpu.provider import PROVIDERS, provider_named
from ...runtime.summary import ShortNames
from ..bundle_view import print_ids
from ..console import let_waiting_threads_sleep, print_facts, print_json, print_table, say, show, working
from ..functions import consistency
from ..options import bundle_argument, field_options, json_option, path_option

if TYPE_CHECKING:
    from ...bundle.device_files.plan_index import PlanParity
    from ...compiler.parity.engine_verdict import EngineVerdict
    from ...runtime.consistency.measure import Consistency


_COUNTS = ("files", "bytes", "policies", "plans", "measurements", "tasks")

_VERIFY_EXAMPLES = """\b
Examples:
  nestforge verify my.bundle
  nestforge verify my.bundle --against MODEL --json
  nestforge verify my.bundle --provider cuda
"""


@click.command("verify", epilog=_VERIFY_EXAMPLES)
@bundle_argument
@path_option(
    "--against", "Model folder, whose PyTorch submodels the written engines are compared with again.", metavar="MODEL"
)
@click.option(
    "--provider",
    type=click.Choice([name for name, provider in PROVIDERS.items() if provider is not None]),
    help="Compares every engine on this GPU, by ONNX Runtime's provider, with its graph on the processor.",
)
@json_option
def verify_command(bundle: Path, against: Path | None, provider: str | None, as_json: bool) -> None:
    """Check a bundle's bytes, and its parity with a model.

    Without --against the hash of every file is checked, calibration, plans, measurements and tasks included; with it
    every engine is run and compared as well, with the tensors of every task that it may answer for. --provider
    compares engines on a GPU with their graphs on the processor, and needs no model and no torch.
    """
    if against is not None and provider is not None:
        raise click.UsageError("expected at most one of --against and --provider")
    if provider is not None:
        _verify_provider(bundle, provider, as_json)
    elif against is None:
        _verify_bytes(bundle, as_json)
    else:
        _verify_parity(bundle, against, as_json)


def _verify_bytes(path: Path, as_json: bool) -> None:
    from ...runtime.load import verify_bytes  # a device checks bytes without torch

    checked = verify_bytes(path)
    if as_json:
        counts = {name: getattr(checked, name) for name in _COUNTS}
        print_json({"bundle": str(checked.bundle.path), **counts, "engines": []})
    else:
        say(f"{path}: {checked}")


def _verify_provider(path: Path, provider: str, as_json: bool) -> None:
    from ...compiler.tensorrt.check_provider import check_on_provider
    from ...runtime.load import verify_bytes

    runs_on = provider_named(provider)
    assert runs_on is not None
    with working() as progress:
        bundle = verify_bytes(path).bundle
        engines = check_on_provider(bundle, runs_on, progress)
    if as_json:
        print_json({"bundle": str(bundle.path), "provider": provider, "engines": engines})
    else:
        names = ShortNames.of(bundle.manifest)
        rows = [
            [names(one.engine), *(["differs", "-", "-"] if one.parity is None else _figures(one.parity))]
            for one in engines
        ]
        print_table(["engine", "parity", "max abs", "min cosine"], rows)
        click.echo()
        print_ids(names)
    broken = [one for one in engines if one.problem]
    if broken:
        raise ParityError(
            f"bundle {path}: {len(broken)} of {len(engines)} engines differ on provider {provider}: {broken[0].problem}"
        )


def _figures(parity: PlanParity) -> list[str]:
    return ["equal", f"{parity.max_abs:.1e}", f"{parity.min_cosine:.7f}"]


def _verify_parity(path: Path, against: Path, as_json: bool) -> None:
    let_waiting_threads_sleep()
    from ...bundle.open_bundle import open_bundle
    from ...compiler.verify import verify_bundle

    with working() as progress:
        report = verify_bundle(path, against, progress)
    if as_json:
        print_json(report)
    else:
        names = ShortNames.of(open_bundle(path).manifest)
        say(f"{path}: {report.files} files, {report.bytes / 1e6:.1f} MB, every hash and seal as it was written\n")
        columns = ["engine", "parity", "max abs", "max rel", "min cosine"]
        decide = any(verdict.routing for verdict in report.engines)
        columns += ["choices", "not PyTorch's own", "worst score gap"] if decide else []
        print_table(columns, [_row(verdict, names)[: len(columns)] for verdict in report.engines])
        click.echo()
        print_ids(names)
    broken = [verdict for verdict in report.engines if verdict.problem]
    if broken:
        raise ParityError(
            f"bundle {path}: {len(broken)} of {len(report.engines)} engines differ from {against}: "
            f"{broken[0].engine}: {broken[0].problem}"
        )


def _row(verdict: EngineVerdict, names: ShortNames) -> list[str]:
    """The worst figures over all outputs, and over all routes; dashes where the engine did not get as far as one."""
    outputs, routing = verdict.outputs, verdict.routing or ()
    figures, judged = ["-"] * 3, ["-"] * 3
    if outputs:
        figures = [
            f"{max(output.max_abs for output in outputs):.1e}",
            f"{max(output.max_rel for output in outputs):.1e}",
            f"{min(output.min_cosine for output in outputs):.7f}",
        ]
    if routing:
        judged = [
            str(sum(routes.made for routes in routing)),
            str(sum(routes.differing for routes in routing)),
            f"{max(routes.worst_score_gap for routes in routing):.1e}",
        ]
    return [names(verdict.engine), "differs" if verdict.problem else "equal", *figures, *judged]


_CONSISTENCY_EXAMPLES = """\b
Examples:
  nestforge consistency my.bundle --text texts.txt
  nestforge consistency my.bundle --data images.npz --submodel S --submodel M
  nestforge consistency my.bundle --text texts.txt --json
"""


@click.command("consistency", epilog=_CONSISTENCY_EXAMPLES)
@bundle_argument
@field_options(consistency, "text", "data", "submodels")
@json_option
def consistency_command(bundle: Path, as_json: bool, **settings: Any) -> None:
    """Compare submodels with the universal model on your data.

    Runs the deployed engines on this host, without torch. Which figures there are follows from what the model
    returns: an embedding, classes, or tokens.
    """
    if (settings["text"] is None) == (settings["data"] is None):
        raise click.UsageError("expected exactly one of --text and --data")
    with working() as progress:
        found = consistency(bundle, progress=progress, **settings)
    show(as_json, found, lambda: _print_consistency(found))


def _print_consistency(found: Consistency) -> None:
    from ...bundle.figures import cell, heading, meanings, present
    from ...profiles.precision import TRACED

    given = f"{found.samples}" if found.samples == found.given else f"{found.samples} of {found.given}, spread over all"
    cut = f", {found.truncated} cut to {found.bucket.sequence} tokens" if found.truncated else ""
    exact = found.universal_precision == TRACED
    print_facts(
        [
            ("bundle", found.bundle),
            ("universal", found.universal if exact else f"{found.universal} ({found.universal_precision})"),
            ("compared", ", ".join(f"output {name} as {role}" for role, name in found.outputs.items())),
            ("samples", f"{given}{cut}"),
            *([("positions", str(found.positions))] if found.positions is not None else []),
            ("bucket", str(found.bucket)),
        ]
    )
    click.echo()
    names = present(row.figures for row in found.submodels)
    fewer = any(row.samples != found.samples for row in found.submodels)  # of submodels of a shorter sequence
    rows = [
        [
            "/".join(row.labels) or row.submodel,
            f"{row.parameters / 1e6:.2f}",
            *([str(row.samples)] if fewer else []),
            *(cell(row.figures, name, row.errors) for name in names),
        ]
        for row in found.submodels
    ]
    print_table(["submodel", "M params", *(["samples"] if fewer else []), *map(heading, names)], rows)
    click.echo()
    say("±: standard error of so many samples")
    for line in meanings(names):
        say(line)
    if not exact:
        precision = found.universal_precision
        say(f"\nnote: figures are against the universal model in {precision}, not in float32")
