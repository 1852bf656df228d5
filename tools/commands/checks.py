"""``nestforge verify`` and ``consistency``: a bundle beside its model, submodels beside the universal one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...bundle.figures import cell, heading, meanings, present
from ...bundle.open_bundle import open_bundle
from ...errors import ParityError
from ...profiles.precision import TRACED
from ...runtime.consistency.measure import Consistency, consistency
from ...runtime.engines.onnxruntime_gpu.provider import PROVIDERS, provider_named
from ...runtime.summary import ShortNames, max_abs, min_cosine
from ...tables import Table
from ..console import Block, let_waiting_threads_sleep, show, working
from ..options import bundle_argument, field_options, json_option, path_option

if TYPE_CHECKING:
    from ...compiler.verify import VerifyReport


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
    data = {"bundle": str(checked.bundle.path), **checked.counts, "engines": []}
    show(as_json, data, lambda: [f"{path}: {checked}"])


def _verify_provider(path: Path, provider: str, as_json: bool) -> None:
    from ...compiler.tensorrt.check_plan import check_on_provider
    from ...runtime.load import verify_bytes

    runs_on = provider_named(provider)
    assert runs_on is not None
    with working() as progress:
        bundle = verify_bytes(path).bundle
        engines = check_on_provider(bundle, runs_on, progress)
    names = ShortNames.of(bundle.manifest)
    table = Table.of(
        engines,
        {
            "engine": lambda one: names(one.engine),
            "parity": lambda one: "differs" if one.parity is None else "equal",
            "max abs": lambda one: max_abs([one.parity] if one.parity else ()),
            "min cosine": lambda one: min_cosine([one.parity] if one.parity else ()),
        },
    )
    data = {"bundle": str(bundle.path), "provider": provider, "engines": engines}
    show(as_json, data, lambda: [table, names.ids])
    broken = [one for one in engines if one.problem]
    if broken:
        raise ParityError(
            f"bundle {path}: {len(broken)} of {len(engines)} engines differ on provider {provider}: {broken[0].problem}"
        )


def _verify_parity(path: Path, against: Path, as_json: bool) -> None:
    let_waiting_threads_sleep()
    from ...compiler.verify import verify_bundle

    with working() as progress:
        report = verify_bundle(path, against, progress)
    names = ShortNames.of(open_bundle(path).manifest)
    show(as_json, report, lambda: _parity_report(path, report, names))
    broken = [verdict for verdict in report.engines if verdict.problem]
    if broken:
        raise ParityError(
            f"bundle {path}: {len(broken)} of {len(report.engines)} engines differ from {against}: "
            f"{broken[0].engine}: {broken[0].problem}"
        )


def _parity_report(path: Path, report: VerifyReport, names: ShortNames) -> Iterator[Block]:
    """The worst figures over all outputs, and over all routes; dashes where an engine did not get as far as one."""
    yield f"{path}: {report.files} files, {report.bytes / 1e6:.1f} MB, every hash and seal as it was written"
    rows = []
    for verdict in report.engines:
        outputs, routing = verdict.outputs, verdict.routing or ()
        judged = ["-"] * 3
        if routing:
            judged = [
                str(sum(routes.made for routes in routing)),
                str(sum(routes.differing for routes in routing)),
                f"{max(routes.worst_score_gap for routes in routing):.1e}",
            ]
        equal = "differs" if verdict.problem else "equal"
        relative = f"{max(output.max_rel for output in outputs):.1e}" if outputs else "-"
        rows.append([names(verdict.engine), equal, max_abs(outputs), relative, min_cosine(outputs), *judged])
    columns = ["engine", "parity", "max abs", "max rel", "min cosine"]
    if any(verdict.routing for verdict in report.engines):
        columns += ["choices", "not PyTorch's own", "worst score gap"]
    yield Table(columns, [row[: len(columns)] for row in rows])
    yield names.ids


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
    show(as_json, found, lambda: _consistency_report(found))


def _consistency_report(found: Consistency) -> Iterator[Block]:

    given = f"{found.samples}" if found.samples == found.given else f"{found.samples} of {found.given}, spread over all"
    cut = f", {found.truncated} cut to {found.bucket.sequence} tokens" if found.truncated else ""
    exact = found.universal_precision == TRACED
    yield Table.facts(
        [
            ("bundle", found.bundle),
            ("universal", found.universal if exact else f"{found.universal} ({found.universal_precision})"),
            ("compared", ", ".join(f"output {name} as {role}" for role, name in found.outputs.items())),
            ("samples", f"{given}{cut}"),
            *([("positions", str(found.positions))] if found.positions is not None else []),
            ("bucket", str(found.bucket)),
        ]
    )
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
    yield Table(["submodel", "M params", *(["samples"] if fewer else []), *map(heading, names)], rows)
    yield ["±: standard error of so many samples", *meanings(names)]
    if not exact:
        yield f"note: figures are against the universal model in {found.universal_precision}, not in float32"
