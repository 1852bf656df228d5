"""``make demo-mixer``: train masked-token models, compile each for many budgets, compare them as the paper does.

Training is done once, and so is each compile.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path

from ...bucket import Bucket
from ...bundle.open_bundle import Bundle, open_bundle
from ...tables import Table
from ...tools.console import working
from ..commands import compile_once, demonstrate, run, show
from ..training import RECORDS_NAME
from .fit import MODELS
from .report import (
    CAPACITY,
    EXPERTS,
    GROUP,
    HiddenTokens,
    capacity_table,
    compute_table,
    experts_table,
    heading,
    measure_engines,
    read_hidden_tokens,
    routers_table,
    seeds_table,
)
from .train import TEST_NAME, VALIDATION_NAME

FOLDER = Path("demo/mixer")
BUCKETS = (Bucket(8, 128), Bucket(1, 128))
ROUTED, PEER = ("sparse-mixer", "tokens-choose"), "bert"
# In place of the profile's budgets, which ask for less than capacity alone can save.
_BUDGET = "flops<=100 %"


def steps() -> None:
    run(sys.executable, "-m", "nestforge.examples.sparse_mixer.train", "--output", str(FOLDER))
    bundles = {}
    for name in MODELS:
        _compile(name)
        bundles[name] = open_bundle(_bundle(name))
    tables = _tables(bundles, read_hidden_tokens(FOLDER / TEST_NAME))
    show(FOLDER, "Sparse Mixers of fixed capacity beside a BERT of their depth and width", tables)


def submodels(name: str) -> list[str]:
    """Ids of the submodels of model ``name`` beyond its levels: smaller groups at two capacities, and fewer experts."""
    offered = MODELS[name].config.choices
    if name not in ROUTED:
        return []
    full = {kind: values[-1] for kind, values in offered.items()}
    capacities, groups = offered[CAPACITY], offered[GROUP]
    wanted = [{CAPACITY: percent, GROUP: group} for group, percent in product(groups[:-1], capacities[2:])]
    wanted += [{EXPERTS: kept} for kept in offered.get(EXPERTS, ())[:-1]]
    return ["-".join(f"{kind}{value}" for kind, value in {**full, **one}.items()) for one in wanted]


def _compile(name: str) -> None:
    options = [part for bucket in BUCKETS for part in ("--bucket", f"{bucket.batch}x{bucket.sequence}")]
    options += [part for submodel in submodels(name) for part in ("--submodel", submodel)]
    data = ("--data", str(FOLDER / VALIDATION_NAME))
    compile_once(FOLDER / name, _bundle(name), "--profile", "host-cpu", "--budget", _BUDGET, *data, *options)


def _bundle(name: str) -> Path:
    return FOLDER / f"{name}.bundle"


def _tables(bundles: Mapping[str, Bundle], hidden: HiddenTokens) -> dict[str, Table]:
    tables: dict[str, Table] = {}
    for bucket in BUCKETS:
        with working() as progress:
            found = measure_engines(bundles, bucket, hidden, progress)
        at = heading(bucket)
        tables[f"Routers (the paper's Table 4), {at}"] = routers_table(found, ROUTED, PEER)
        tables[f"Compute (the paper's Table 8), {at}"] = compute_table(found, [PEER, *ROUTED], ROUTED[0], PEER)
        tables[f"Capacity and group (the paper's Table 9), {at}"] = capacity_table(found, PEER)
        tables[f"Experts kept, {at}"] = experts_table(found, ROUTED[0])
    records = json.loads((FOLDER / RECORDS_NAME).read_bytes())
    accuracies = {
        name: {found["budget"]: found["test"]["accuracy"] for found in record["quality"]}
        for name, record in records.items()
        if "quality" in record
    }
    tables["Every training, in PyTorch (the trained group)"] = seeds_table(accuracies)
    return tables


if __name__ == "__main__":
    sys.exit(demonstrate(steps))
