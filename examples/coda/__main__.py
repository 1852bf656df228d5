"""``make demo-coda``: a dense ViT made conditional and two tasks trained on it, one bundle for both, compared.

Training is done once, and so is each compile.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ...bucket import Bucket
from ...bundle.device_files.task_index import read_tasks
from ...bundle.open_bundle import open_bundle
from ...exporters.checkpoints.checkpoint import open_checkpoint, sha256_of
from ...exporters.families.coda.config import REDUCTION, KeysOf
from ...exporters.source import open_source
from ...runtime.load import load
from ...runtime.summary import Table
from ...tools.console import working
from ...workload import macs
from ..commands import compile_once, demonstrate, run, show
from ..matformer.tasks import read_digits
from ..training import RECORDS_NAME
from .fit import KEYS, REDUCTIONS, TASKS, of_task
from .report import Asked, Measured, accuracy, milliseconds, quality_table, routing_table

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


if __name__ == "__main__":
    sys.exit(demonstrate(steps))
