"""``make demo-coda``: a dense ViT made conditional and two tasks trained on it, one bundle for both, compared.

Training is done once, and so is each compile.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...bucket import Bucket
from ...bundle.device_files.task_index import read_tasks
from ...bundle.open_bundle import open_bundle
from ...exporters.checkpoints.checkpoint import open_checkpoint, sha256_of
from ...exporters.families.coda.config import REDUCTION, KeysOf
from ...exporters.source import open_source
from ...progress import Progress
from ...runtime.calibrate.measure import time_in_turns
from ...runtime.inputs.arrays import Array
from ...runtime.load import load
from ...runtime.model import ElasticModel
from ...tables import Table
from ...tools.console import working
from ...workload import macs
from ..commands import compile_once, demonstrate, run, show
from ..matformer.tasks import read_digits
from ..training import RECORDS_NAME
from .fit import KEYS, REDUCTIONS, TASKS, of_task

FOLDER = Path("demo/coda")
BUCKETS = (Bucket(1, 1), Bucket(64, 1))


def steps() -> None:
    run(sys.executable, "-m", "nestforge.examples.coda.train", "--output", str(FOLDER))
    records = json.loads((FOLDER / RECORDS_NAME).read_bytes())
    show(FOLDER, "Conditional adapters: two tasks on one frozen ViT", tables(records))


def tables(records: Mapping[str, Any]) -> dict[str, Table]:
    """Figures of training's ``records`` and of the compiled models, by title."""
    bundles = {keys_of: _bundle(keys_of) for keys_of in KEYS}
    dense, found = records["dense"], {}
    guessed = f"the commonest digit alone: {dense['commonest']:.1%}"
    for task in TASKS:
        unseen = f"the dense model before any task: {dense['accuracy'][task]:.1%}"
        found[f"Digits {task} ({guessed}; {unseen})"] = quality_table(_measured(bundles, task), BUCKETS)
    for task in TASKS:
        ink = records[f"{task}-{KEYS[0]}"]["ink"]
        by_keys: dict[str, Any] = {keys_of: records[f"{task}-{keys_of}"]["reductions"] for keys_of in KEYS}
        found[f"Gates and choices, digits {task} ({ink:.0%} of all pixels have ink)"] = routing_table(by_keys)
    return found


def _measured(bundles: Mapping[KeysOf, Path], task: str) -> list[Measured]:
    """The models of ``task`` at every reduction, k-to-k first."""
    rows = of_task(task, read_digits().test)
    images, labels = np.ascontiguousarray(rows.inputs.numpy()), rows.targets.numpy()
    with ExitStack() as stack, working() as progress:
        asked, facts = [], []
        for keys_of, bundle in bundles.items():
            source = open_source(FOLDER / f"base-{keys_of}")
            model = stack.enter_context(load(bundle))
            for reduction in REDUCTIONS:
                submodel = source.spec.submodel({REDUCTION: reduction})
                asked.append(Asked(model, submodel.id, task, images, labels))
                tokens = int(source.metadata(submodel, BUCKETS[0])["tokens selected"])
                facts.append(
                    (keys_of, reduction, tokens, macs(source.workload(submodel, BUCKETS[0])) // BUCKETS[0].batch)
                )
        times = milliseconds(asked, BUCKETS, progress)
        return [
            Measured(keys_of, reduction, tokens, accuracy(one, BUCKETS[-1].batch), multiplied, tuple(taken))
            for (keys_of, reduction, tokens, multiplied), one, taken in zip(facts, asked, times, strict=True)
        ]


def _bundle(keys_of: KeysOf) -> Path:
    """One bundle of the frozen base, with both tasks."""
    base, bundle = FOLDER / f"base-{keys_of}", FOLDER / f"{keys_of}.bundle"
    folders = {task: FOLDER / f"{task}-{keys_of}-task" for task in TASKS}
    if bundle.exists() and not _has(bundle, folders):
        print(f"\n{bundle} has other tasks and is made anew")
        shutil.rmtree(bundle)
    options = [part for task, folder in folders.items() for part in ("--task", f"{task}={folder}")]
    options += [part for bucket in BUCKETS for part in ("--bucket", str(bucket))]
    compile_once(base, bundle, "--profile", "host-cpu", "--no-measure", *options)
    return bundle


def _has(bundle: Path, folders: Mapping[str, Path]) -> bool:
    """Whether the tasks of ``bundle`` are those in ``folders``, as they are."""
    files = {task: open_checkpoint(folder).source_files() for task, folder in folders.items()}
    now = {task: {path.name: sha256_of(path) for path in paths} for task, paths in files.items()}
    tasks = read_tasks(open_bundle(bundle))
    return now == {task.name: {entry.path: entry.sha256 for entry in task.source} for task in tasks}


_TIMED = 8  # requests in one turn


@dataclass(frozen=True, eq=False)
class Asked:
    """Requests of one kind: one ``task`` of a ``model`` at one ``submodel``, for ``images`` [N, C, H, W] of classes
    ``labels`` [N]."""

    model: ElasticModel
    submodel: str
    task: str
    images: Array
    labels: Array

    def __call__(self, start: int, stop: int) -> Array:
        """Logits [M, classes] of the images from ``start`` to ``stop``."""
        answer = self.model({"pixel_values": self.images[start:stop]}, submodel=self.submodel, task=self.task)
        return answer.outputs["logits"]


def accuracy(asked: Asked, batch: int) -> float:
    """Share of the images whose highest logit is right, ``batch`` a request."""
    found = [asked(at, min(at + batch, len(asked.images))) for at in range(0, len(asked.images), batch)]
    return float((np.concatenate(found).argmax(-1) == asked.labels).mean())


def milliseconds(asked: Sequence[Asked], buckets: Sequence[Bucket], progress: Progress) -> list[list[float]]:
    """The median of a request of each kind that fills each of ``buckets``."""
    found: list[list[float]] = [[] for _ in asked]
    for bucket in buckets:
        calls = [[partial(one, 0, bucket.batch)] * _TIMED for one in asked]
        times = time_in_turns(calls, progress, f"time in turns at batch {bucket.batch}")
        for taken, row in zip(times, found, strict=True):
            row.append(float(np.median(taken)))
    return found


KEYS_NAMES = {"selected": "k-to-k", "all": "k-to-all"}


@dataclass(frozen=True)
class Measured:
    """A model at one reduction: tokens of a row that a layer computes, multiply-adds of a row as the cost model counts
    them, and of each bucket milliseconds."""

    keys_of: str
    reduction: int
    tokens: int
    accuracy: float
    macs: int
    milliseconds: tuple[float, ...]


def quality_table(found: Sequence[Measured], buckets: Sequence[Bucket]) -> Table:
    """A row for each reduction of each kind of keys; ratios are to the same kind at r = 1, the dense adapter model."""
    whole = {one.keys_of: one for one in found if one.reduction == 1}
    columns = ["attention", "r", "tokens", "accuracy", "M multiply-adds", "fewer"]
    for bucket in buckets:
        columns += [f"ms, batch {bucket.batch}", "faster"]
    rows = []
    for one in found:
        base = whole[one.keys_of]
        row = [KEYS_NAMES[one.keys_of], str(one.reduction), str(one.tokens), f"{one.accuracy:.1%}"]
        row += [f"{one.macs / 1e6:.2f}", f"{base.macs / one.macs:.2f}x"]
        for own, dense in zip(one.milliseconds, base.milliseconds, strict=True):
            row += [f"{own:.3f}", f"{dense / own:.2f}x"]
        rows.append(row)
    return Table(columns, rows)


def routing_table(by_keys: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """A row for each reduction at which layers choose, with figures of each layer from the first to the last."""
    columns = ["attention", "r", "mean gate, by layer", "gates below 1e-6", "chosen pixels with ink, by layer"]
    rows = []
    for keys_of, reductions in by_keys.items():
        for figures in reductions:
            if layers := figures["layers"]:
                vanished = sum(layer["gates_vanished"] for layer in layers) / len(layers)
                gates = " ".join(f"{layer['mean_gate']:.2f}" for layer in layers)
                ink = " ".join(f"{layer['ink']:.0%}" for layer in layers)
                rows.append([KEYS_NAMES[keys_of], str(figures["reduction"]), gates, f"{vanished:.1%}", ink])
    return Table(columns, rows)


if __name__ == "__main__":
    sys.exit(demonstrate(steps))
