"""``make demo-mhe``: train the seven attentions equally, compile each in every form that it has, compare them.

Training is done once, and so is each compile.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import exp
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ...bucket import Bucket
from ...bundle.open_bundle import open_bundle
from ...compiler.planning.candidate import chosen_variants
from ...exporters.families.mhe.forms import ATTENTION, FORMS
from ...exporters.source import open_source
from ...profiles.probe_host import host_profile
from ...runtime.calibrate.measure import time_in_turns
from ...runtime.device.threads import threads_or_default
from ...runtime.engines.runner import runner_for
from ...runtime.inputs.arrays import random_feeds
from ...runtime.load import load
from ...tables import Table
from ...tools.console import working
from ..commands import compile_once, demonstrate, run, show
from ..training import RECORDS_NAME
from .fit import KINDS, RECIPE

FOLDER = Path("demo/mhe")
BUCKET = Bucket(1, RECIPE.window)
_TIMED = 8  # calls of an engine in one turn
_PROMPT, _TOKENS, _ROUNDS = "def __init__(self, ", 64, 5
_WHOLE = ("--profile", "host-cpu", "--no-measure", "--include", "budgets", "--budget", "parameters<=100 %")


def steps() -> None:
    run(sys.executable, "-m", "nestforge.examples.mhe.train", "--output", str(FOLDER))
    records = json.loads((FOLDER / RECORDS_NAME).read_bytes())
    show(FOLDER, f"Seven attentions, trained equally\n\n{CAVEAT}", tables(records))
    print(f"\n{CAVEAT}")


def tables(records: Mapping[str, Any]) -> dict[str, Table]:
    """Figures of training's ``records`` and of the compiled models, by title."""
    encoders, decoders = (
        [_trained(kind, f"{shape}-{kind}", records[f"{shape}-{kind}"], shape == "decoder") for kind in KINDS]
        for shape in ("encoder", "decoder")
    )
    commonest = records[f"encoder-{KINDS[0]}"]["commonest"]
    chosen, timed = _forms()
    return {
        f"Encoders: hidden bytes (the commonest byte alone: {commonest:.2%})": quality_table(
            encoders, is_perplexity=False
        ),
        "Decoders: next bytes": quality_table(decoders, is_perplexity=True),
        f"Encoders in every form, one row of {BUCKET.sequence} tokens": forms_table(timed, chosen),
        f"Decoders with a KV cache, {_TOKENS} tokens": writing_table(_writing()),
    }


def _trained(kind: str, name: str, record: Mapping[str, float], is_perplexity: bool) -> Trained:
    source = open_source(FOLDER / name)
    groups = source.named_groups(source.spec.universal())
    score = perplexity(record["loss"]) if is_perplexity else record["accuracy"]
    return Trained(kind, groups["attention q/k/v"], sum(groups.values()), score)


def _forms() -> tuple[dict[str, str], list[Timed]]:
    """The form that this host gets by kind, and every form of every encoder, timed in turns."""
    chosen: dict[str, str] = {}
    bundles: dict[tuple[str, str], Path] = {}
    for kind in KINDS:
        folder = FOLDER / f"encoder-{kind}"
        source = open_source(folder)
        whole = source.spec.universal()
        held = source.variants(whole, BUCKET).get(ATTENTION, {})
        if held:
            chosen[kind] = chosen_variants(source, whole, BUCKET, host_profile())[ATTENTION]
        for form in [one for one in FORMS if one in held] or ["-"]:
            bundles[kind, form] = FOLDER / f"encoder-{kind}-{form.strip('-') or 'only'}.bundle"
            variant = () if form == "-" else ("--variant", f"{ATTENTION}={form}")
            compile_once(folder, bundles[kind, form], *_WHOLE, "--bucket", str(BUCKET), *variant)
    opened = {key: open_bundle(path) for key, path in bundles.items()}
    with ExitStack() as stack, working() as progress:
        calls = []
        for bundle in opened.values():
            (engine,) = bundle.manifest.engines
            runner = stack.enter_context(runner_for(bundle, engine, "packed", threads_or_default(None)))
            calls.append([partial(runner.run, random_feeds(bundle.manifest.inputs, BUCKET))] * _TIMED)
        times = time_in_turns(calls, progress, "forms in turns")
    return chosen, [
        Timed(kind, form, float(np.median(taken)), bundle.manifest.submodels[0].weight_bytes)
        for ((kind, form), bundle), taken in zip(opened.items(), times, strict=True)
    ]


def _writing() -> list[Writing]:
    """Every decoder, writing in turns."""
    bundles = {kind: FOLDER / f"decoder-{kind}.bundle" for kind in KINDS}
    for kind, bundle in bundles.items():
        compile_once(FOLDER / f"decoder-{kind}", bundle, *_WHOLE, "--bucket", str(BUCKET), "--generate")
    with ExitStack() as stack:
        models = {kind: stack.enter_context(load(bundle)) for kind, bundle in bundles.items()}
        taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(_ROUNDS):
            for kind, model in models.items():
                taken[kind].append(median(model.generate(_PROMPT, max_tokens=_TOKENS, stop=[]).rows[0].token_ms))
        found = []
        for kind, model in models.items():
            entry = model.bundle.manifest.generation
            assert entry is not None
            numbers = sum(2 * layer.heads * layer.size for layer in entry.layers)
            found.append(Writing(kind, 4 * numbers, median(taken[kind])))
    return found


BEST, LEAST = "mha", "sha"  # what PRR and PEoP are measured by
CAVEAT = (
    "PRR is the share of mha's score that is kept; PEoP is the relative gain over sha for each per cent of parameters "
    "of attention added to sha's. It explodes where few are added, as by mhe_add and mhe_mul: it ranks nothing."
)


@dataclass(frozen=True)
class Trained:
    """A kind of attention: parameters of its sublayers without (``qkv``) and with output projections, and the
    ``score``, an accuracy or a perplexity."""

    kind: str
    qkv: int
    attention: int
    score: float


@dataclass(frozen=True)
class Timed:
    """A kind in one form: ``milliseconds`` of one row, and bytes of weights that its engine reads."""

    kind: str
    form: str
    milliseconds: float
    weight_bytes: int


@dataclass(frozen=True)
class Writing:
    """A decoder with a KV cache: bytes of it for each token, and ``milliseconds`` a token."""

    kind: str
    cache_bytes: int
    milliseconds: float


def retained(score: float, best: float, is_perplexity: bool) -> float:
    """PRR (section 5.1): the share of ``best``, mha's score, that is kept; of a perplexity, what it is not above it."""
    return 1 - (score - best) / best if is_perplexity else score / best


def elasticity(one: Trained, least: Trained, is_perplexity: bool) -> float | None:
    """PEoP (section 5.1) of ``one`` over ``least``, sha; None where it adds no parameters."""
    added = one.attention / least.attention - 1
    gain = one.score / least.score - 1
    return None if added == 0 else (-gain if is_perplexity else gain) / added


def quality_table(found: Sequence[Trained], is_perplexity: bool) -> Table:
    """A row for each kind."""
    by_kind = {one.kind: one for one in found}
    score = "perplexity of a byte" if is_perplexity else "accuracy of hidden bytes"
    rows = []
    for one in found:
        gain = elasticity(one, by_kind[LEAST], is_perplexity)
        rows.append(
            [
                one.kind,
                f"{one.qkv:,}",
                f"{one.attention:,}",
                f"{one.score:.3f}" if is_perplexity else f"{one.score:.2%}",
                f"{retained(one.score, by_kind[BEST].score, is_perplexity):.1%}",
                "-" if gain is None else f"{gain:.3f}",
            ]
        )
    return Table(["attention", "parameters of q, k, v", "with output", score, "PRR", "PEoP"], rows)


def forms_table(found: Sequence[Timed], chosen: Mapping[str, str]) -> Table:
    """A row for each form of each kind; ``chosen`` is the form that a compile for this host takes, by kind."""
    base = {one.kind: one.milliseconds for one in found if one.form == "literal"}
    rows = [
        [
            one.kind,
            one.form,
            f"{one.milliseconds:.3f}",
            f"{base[one.kind] / one.milliseconds:.2f}x" if one.kind in base else "-",
            f"{one.weight_bytes / 1e6:.2f}",
            "yes" if chosen.get(one.kind, one.form) == one.form else "",
        ]
        for one in found
    ]
    return Table(["attention", "form", "ms a row", "over literal", "weights MB", "chosen here"], rows)


def writing_table(found: Sequence[Writing]) -> Table:
    """A row for each kind, beside mha's cache."""
    base = next(one.cache_bytes for one in found if one.kind == BEST)
    rows = [
        [one.kind, f"{one.cache_bytes:,}", f"{base / one.cache_bytes:g}x less", f"{one.milliseconds:.3f}"]
        for one in found
    ]
    return Table(["attention", "cache bytes a token", "than mha", "ms a token"], rows)


def perplexity(loss: float) -> float:
    """Perplexity of a ``loss`` in nats."""
    return exp(loss)


if __name__ == "__main__":
    sys.exit(demonstrate(steps))
