from pathlib import Path
from typing import Any

import pytest
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import BundleCorruptError
from nestforge.runtime.engines.onnxruntime.node_times import NodeKind, kinds_of, node_times

GOLDEN = Path(__file__).parents[4] / "golden"


def event(kind: str, node: int, micros: int, category: str = "Node") -> dict[str, Any]:
    return {
        "cat": category,
        "name": f"{kind}_{node}_kernel_time",
        "dur": micros,
        "args": {"op_name": kind, "node_index": str(node)},
    }


def test_kinds_are_summed_over_nodes_and_ordered_by_time() -> None:
    runs = [[9000, 9000, 9000], [400, 100, 200], [600, 300, 200], [500, 200, 200]]  # the first warms up
    events = [e for a, b, c in runs for e in (event("MatMul", 0, a), event("Add", 1, b), event("Add", 2, c))]
    events += [event("MatMul", 0, 10**6, "Session"), {"cat": "Node", "name": "MatMul_0_fence_before", "dur": 10**6}]
    assert kinds_of(events, 1) == (NodeKind("MatMul", 1, 0.5, 0.5 / 0.9), NodeKind("Add", 2, 0.4, 0.4 / 0.9))


def test_nodes_without_a_measurable_time_have_no_share() -> None:
    assert kinds_of([event("Add", 0, 0)]) == (NodeKind("Add", 1, 0.0, 0.0),)


def test_the_nodes_of_an_engine_are_those_of_its_graph(tiny_bundle: Path) -> None:
    import onnx

    bundle = open_bundle(tiny_bundle)
    engine = bundle.manifest.engines[0]
    graph = onnx.load(tiny_bundle / engine.file, load_external_data=False).graph
    runs, kinds = node_times(bundle, engine, 1, 0.0, engine.bucket)
    assert runs == 20
    wanted = [node.op_type for node in graph.node]
    assert {each.kind: each.nodes for each in kinds} == {kind: wanted.count(kind) for kind in wanted}
    assert sum(each.share for each in kinds) == pytest.approx(1.0)


def test_an_engine_that_takes_tensors_of_a_task_has_those_of_the_base() -> None:
    bundle = open_bundle(GOLDEN / "bundle-tasks")
    engine = bundle.manifest.engines[-1]
    assert node_times(bundle, engine, 1, 0.0, engine.bucket)[0] == 20


def test_a_damaged_engine_is_refused(own_bundle: Path) -> None:
    bundle = open_bundle(own_bundle)
    engine = bundle.manifest.engines[0]
    (own_bundle / engine.file).write_bytes(b"damaged")
    with pytest.raises(BundleCorruptError):
        node_times(bundle, engine, 1, 0.0, engine.bucket)
