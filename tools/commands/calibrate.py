"""``nestforge calibrate``: exit thresholds for a budget, or the worth of drafts, found on the deployed engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ...bundle.manifest import CALIBRATION_NAME, DRAFTS_NAME
from ...bundle.open_bundle import open_bundle
from ...runtime.calibrate.drafts import DEFAULT_TEXTS
from ...runtime.calibrate.simulate import parse_budget
from ...runtime.exits.policy import CalibratedPolicy, Calibration, Figures
from ...runtime.generation.draft_gains import HostDrafts
from ...runtime.summary import ShortNames
from ...tables import Table
from ..console import Block, show, working
from ..functions import calibrate, calibrate_drafts
from ..options import bundle_argument, field_options, given_settings, json_option, path_option, read_text_lines

_CALIBRATE_EXAMPLES = """\b
Examples:
  nestforge calibrate my.bundle --data texts.jsonl --budget "mean_latency_ms<=5"
  nestforge calibrate my.bundle --data texts.jsonl --budget "mean_latency_ms<=50 %"
  nestforge calibrate my.bundle --data arrays.npz --budget "mean_flops<=6e8" --name lean
  nestforge calibrate my.bundle --data texts.jsonl --budget "p95_latency_ms<=20" --batch 8 --no-default --json
  nestforge calibrate lm.bundle --text prompts.txt
"""


@click.command("calibrate", epilog=_CALIBRATE_EXAMPLES)
@bundle_argument
@path_option(
    "--data",
    "Rows like those to be answered: .npz (an array per input, perhaps 'labels') or .jsonl (text, perhaps label).",
)
@click.option(
    "--budget",
    metavar="METRIC<=X",
    help="Limit of mean_, p50_, p95_ or p99_latency_ms per request, or of mean_flops per row; or a share of the whole "
    "engine's own figure, such as 'mean_latency_ms<=50 %'.",
)
@path_option(
    "--text",
    "UTF-8 file of texts, one a line, that drafts of a bundle that generates continue. Default: a few short texts.",
)
@field_options(calibrate, "batch", "submodel", "name", "default", "rule", "compare", "truncate")
@json_option
def calibrate_command(
    bundle: Path,
    data: Path | None,
    budget: str | None,
    text: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Calibrate exit thresholds or drafts on this host.

    For a model with exits, with --data and --budget: about one row in three is held out and only checks the result.
    Without labels, quality is agreement with the last exit. The policy is kept in the bundle's calibration.json.

    For a bundle that generates: texts are continued with each draft, and the tokens that were accepted and the times
    are kept in the bundle's drafts.json, by host. There --draft auto starts from them.
    """

    if data is None and budget is None:
        if open_bundle(bundle).manifest.generation is None:
            raise click.UsageError("expected --data and --budget: this bundle has no engines that generate")
        if of_exits := [
            option for option in given_settings().values() if option not in ("--text", "--submodel", "--json")
        ]:
            raise click.UsageError(
                f"{', '.join(of_exits)}: for exits; drafts are calibrated with --text and --submodel"
            )
        _calibrate_drafts(bundle, text, settings["submodel"], as_json)
        return
    if data is None or budget is None or text is not None:
        raise click.UsageError("expected --data with --budget, or of a bundle that generates --text or neither")
    with working() as progress:
        policy = calibrate(bundle, data, budget, progress=progress, **settings)
    kept, path = Calibration.read(open_bundle(bundle)), bundle / CALIBRATION_NAME
    is_default = kept is not None and kept.defaults.get(policy.submodel) == policy.name
    found = {"path": str(path), "default": is_default, "policy": policy}
    show(as_json, found, lambda: _policy_report(policy, path, is_default))


def _calibrate_drafts(bundle: Path, text: Path | None, submodel: str | None, as_json: bool) -> None:

    texts = DEFAULT_TEXTS if text is None else read_text_lines(text).texts
    with working() as progress:
        found = calibrate_drafts(bundle, texts, submodel=submodel, progress=progress)
    path = bundle / DRAFTS_NAME
    names = ShortNames.of(open_bundle(bundle).manifest)
    show(as_json, {"path": str(path), "calibration": found}, lambda: _drafts_report(found, path, names))


def _drafts_report(found: HostDrafts, path: Path, names: ShortNames) -> Iterator[Block]:
    host = f"{found.host}, {found.threads} threads"
    yield Table.facts([("host", host), ("texts", str(found.texts)), ("kept in", str(path))])
    rows = [
        [names(draft.target), names(draft.draft), f"{draft.judged:.0f}", f"{draft.accepted / draft.judged:.0%}"]
        for draft in found.drafts
        if draft.judged
    ]
    yield Table(["checked by", "draft", "tokens judged", "accepted"], rows)
    times = [[names(time.engine), str(time.tokens), f"{time.ms:.3f}"] for time in found.times]
    yield Table(["engine", "tokens of a run", "ms"], times)


def _policy_report(policy: CalibratedPolicy, path: Path, is_default: bool) -> Iterator[Block]:
    common = policy.global_point
    thresholds = ", ".join(f"{value:.4g}" if value >= 0 else "closed" for value in policy.thresholds)
    yield Table.facts(
        [
            ("policy", policy.name + (" (the submodel's default)" if is_default else "")),
            ("submodel", policy.submodel),
            ("budget", _budget(policy)),
            ("leaves", f"entropy {policy.compare} {thresholds} (nats, by exit)"),
            ("one for all", f"{common.threshold:.4g} nats: {policy.quality_is} {common.simulated.quality:.4f}"),
            ("quality", policy.quality_is.replace("_", " ")),
            ("data", f"{policy.rows} rows, requests of {policy.batch}"),
            ("host", f"{policy.processor}, {policy.threads} threads"),
            *(("note", note) for note in policy.notes),
            ("kept in", str(path)),
        ]
    )
    rows = [
        _calibrate_row("calibration", "simulated", policy.simulated),
        _calibrate_row("calibration", "measured", policy.measured),
        _calibrate_row("calibration", "whole engine", policy.whole),
    ]
    if policy.held_out is not None and policy.held_out_whole is not None:
        rows.append(_calibrate_row("held out", "measured", policy.held_out))
        rows.append(_calibrate_row("held out", "whole engine", policy.held_out_whole))
    yield Table(["rows", "what", "count", "mean ms", "p50", "p95", "p99", "MFLOPs", "quality", "left at exit"], rows)


def _budget(policy: CalibratedPolicy) -> str:
    """The budget; of a share also what it came to on this host."""
    budget = parse_budget(policy.budget)
    if not budget.is_share:
        return policy.budget
    whole = budget.of(policy.whole.costs)
    limit = budget.resolved(whole)
    reached = budget.of(policy.measured.costs) / whole
    return f"{policy.budget} of the whole engine's: {limit.shown(limit.limit)}; measured {reached:.1%}"


def _calibrate_row(part: str, what: str, figures: Figures) -> list[str]:
    costs = figures.costs
    latencies = (costs.mean_latency_ms, costs.p50_latency_ms, costs.p95_latency_ms, costs.p99_latency_ms)
    return [
        part,
        what,
        str(figures.rows),
        *(f"{value:.3f}" for value in latencies),
        f"{costs.mean_flops / 1e6:.1f}",
        f"{figures.quality:.4f}",
        " ".join(map(str, figures.histogram)),
    ]
