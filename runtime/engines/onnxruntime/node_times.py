"""Where the time of an engine goes, by kind of node, as ONNX Runtime's profiler sees it."""

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from ....bucket import Bucket
from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.open_bundle import Bundle
from ...graphs.weight_store import store_initializers
from ...inputs.arrays import random_feeds
from .runner import TaskInputs
from .session import OPTIMIZATION_LEVEL, open_session, session_options

_WARM_UPS = 3
_MIN_RUNS = 20
_MAX_RUNS = 200  # each writes an event for every node
_KERNEL = "_kernel_time"


@dataclass(frozen=True)
class NodeKind:
    """All nodes of one operator: how many a run has, the sum of their median milliseconds, and their ``share`` of what
    all nodes take."""

    kind: str
    nodes: int
    ms: float
    share: float


def node_times(
    bundle: Bundle, engine: EngineEntry, threads: int, max_seconds: float, shape: Bucket
) -> tuple[int, tuple[NodeKind, ...]]:
    """How many runs were profiled, and the kinds of nodes, the slowest first: a packed engine on random inputs of
    ``shape``, on ``threads`` cores.

    Runs go on until ``max_seconds`` have passed, 20 of them at least and 200 at most. Profiling itself takes time at
    every node, so shares are what counts. Raises a BundleError if the engine cannot be opened.
    """
    feeds = random_feeds(bundle.manifest.interface_of(engine)[0], shape)
    with tempfile.TemporaryDirectory() as folder:
        options = session_options(threads, OPTIMIZATION_LEVEL, packed=True)
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder, "nodes"))
        with bundle.held(engine.file, *bundle.manifest.weight_names):
            store_initializers(bundle, engine)  # checks where they lie
            session = open_session(bundle.file(engine.file), options)
        if bundle.manifest.tasks is not None:  # the base's tensors
            inputs = [tensor for tensor in session.get_inputs() if tensor.name not in feeds]
            feeds |= TaskInputs(bundle, engine, inputs).arrays()
        began, runs = perf_counter(), 0
        while runs < _WARM_UPS + _MIN_RUNS or (runs < _WARM_UPS + _MAX_RUNS and perf_counter() - began < max_seconds):
            session.run(None, feeds)
            runs += 1
        events = json.loads(Path(session.end_profiling()).read_text())
    return runs - _WARM_UPS, kinds_of(events, _WARM_UPS)


def kinds_of(events: Iterable[Mapping[str, Any]], warm_ups: int = 0) -> tuple[NodeKind, ...]:
    """The kinds of nodes in a trace of ONNX Runtime's profiler, the slowest first, without each node's first
    ``warm_ups`` runs."""
    times: dict[tuple[str, str], list[float]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith(_KERNEL):
            about = event["args"]
            times.setdefault((about["op_name"], about["node_index"]), []).append(event["dur"] / 1e3)
    kinds: dict[str, list[float]] = {}
    for (kind, _), each in times.items():
        kinds.setdefault(kind, []).append(median(each[warm_ups:]))
    total = sum(map(sum, kinds.values())) or 1.0  # no node takes a whole microsecond
    found = [NodeKind(kind, len(each), sum(each), sum(each) / total) for kind, each in kinds.items()]
    return tuple(sorted(found, key=lambda each: (-each.ms, each.kind)))
