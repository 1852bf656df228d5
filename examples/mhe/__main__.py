"""``make demo-mhe``: train the seven attentions equally, compile each in every form that it has, compare them.

Training is done once, and so is each compile.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ...bucket import Bucket
from ...bundle.open_bundle import open_bundle
from ...compiler.planning.variants import chosen_variants
from ...exporters.families.mhe.forms import ATTENTION, FORMS
from ...exporters.source import open_source
from ...profiles.probe_host import host_profile
from ...runtime.calibrate.measure import time_in_turns
from ...runtime.device.threads import threads_or_default
from ...runtime.engines.runner import runner_for
from ...runtime.inputs.arrays import random_feeds
from ...runtime.load import load
from ...runtime.summary import Table
from ...tools.console import working
from ..commands import compile_once, demonstrate, run, show
from ..training import RECORDS_NAME
from .fit import KINDS, RECIPE
from .tables import CAVEAT, Timed, Trained, Writing, forms_table, perplexity, quality_table, writing_table

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


if __name__ == "__main__":
    sys.exit(demonstrate(steps))
