"""Parts around a build: progress, profile shapes, the inspector's answer, cases; a provider in the place of a GPU;
clips of whole numbers."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.bundle.open_bundle import open_bundle
from nestforge.bundle.shape_profile import ShapeProfile
from nestforge.compiler.tensorrt.build_bundle import layer_kinds
from nestforge.compiler.tensorrt.check_plan import case_feeds, check_on_provider
from nestforge.compiler.tensorrt.graphs import in_parsed_operators, unsupported
from nestforge.compiler.work.clock import Phases
from nestforge.errors import BuildError
from nestforge.progress import silent
from nestforge.tools.commands import checks
from onnx import TensorProto, helper
from support.commands import error_of, json_of, nestforge, shown, usage_of
from support.fake_gpu import Gpu, played_sessions, provider_on
from support.generating import generating_folder

IDS = TensorSpec("ids", "int64", ("batch", "sequence"), high=50)
MASK = TensorSpec("mask", "int64", ("batch", "sequence"), pad=0, high=2)
STATE = TensorSpec("state", "float32", ("batch", "sequence", 16))
BUCKET = Bucket(2, 8)


def test_outermost_phases_are_progress() -> None:
    seen: list[tuple[str, int, int]] = []
    phases = Phases(lambda *report: seen.append(report), None)
    phases.started("Building", None, 2)
    phases.started("Timing", "Building", 7)
    assert phases.stepped("Timing", 0)
    phases.finished("Timing")
    assert phases.stepped("Building", 0)
    phases.finished("Building")
    assert seen == [("Building", 0, 2), ("Building", 1, 2), ("Building", 2, 2)]
    assert not phases.timed_out


def test_the_first_step_after_the_deadline_stops_the_build_and_so_do_all_others() -> None:
    now = 0.0
    phases = Phases(lambda *_: None, 10.0, lambda: now)
    phases.started("Building", None, 9)
    assert phases.stepped("Building", 0)
    now = 10.1
    assert not phases.stepped("Building", 1)
    now = 0.0
    assert not phases.stepped("Building", 2)
    assert phases.timed_out


def test_only_inputs_with_an_open_dimension_need_a_profile() -> None:
    one = ShapeProfile(BUCKET, BUCKET)
    static = {"ids": (2, 8), "state": (2, 8, 16)}
    assert one.parsed_shapes("here", static, (IDS, STATE)) == {}
    some = {"ids": (-1, -1), "state": (2, 8, 16)}
    assert one.parsed_shapes("here", some, (IDS, STATE)) == {"ids": ((2, 8), (2, 8), (2, 8))}
    between = ShapeProfile(Bucket(2, 8, min_sequence=3), Bucket(2, 5))
    free = {"ids": (2, -1), "state": (2, -1, 16)}
    assert between.parsed_shapes("here", free, (IDS, STATE)) == {
        "ids": ((2, 3), (2, 5), (2, 8)),
        "state": ((2, 3, 16), (2, 5, 16), (2, 8, 16)),
    }


@pytest.mark.parametrize("parsed", [{"ids": (2, 9)}, {"ids": (2, 8, 1)}, {"words": (2, 8)}, {}])
def test_another_interface_is_refused(parsed: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(BuildError, match=r"^here: its graph takes .*; the manifest says \{'ids': \(2, 8\)\}$"):
        ShapeProfile(BUCKET, BUCKET).parsed_shapes("here", parsed, (IDS,))


def test_a_graph_that_fixes_a_free_dimension_is_refused() -> None:
    between = ShapeProfile(Bucket(2, 8, min_sequence=3), Bucket(2, 5))
    with pytest.raises(BuildError) as raised:
        between.parsed_shapes("here", {"ids": (2, 8)}, (IDS,))
    assert str(raised.value) == "here: its graph takes ids [2, 8]; the manifest says {'ids': (2, 'sequence')}"


def test_layers_are_counted_by_kind() -> None:
    gemm, other = {"Name": "a", "LayerType": "gemm"}, {"Name": "b", "LayerType": "Reformat"}
    found = layer_kinds(json.dumps({"Layers": [gemm, other, {"LayerType": "gemm"}, "plain"], "Bindings": ["ids"]}))
    assert found == {"Reformat": 1, "gemm": 2, "unknown": 1}


@pytest.mark.parametrize("text", ["", "[]", '{"Bindings": []}', '{"Layers": 3, "Bindings": []}'])
def test_another_answer_is_refused(text: str) -> None:
    with pytest.raises(BuildError, match="engine inspector: expected its JSON of TensorRT 10 or 11, got"):
        layer_kinds(text)


@given(st.integers(1, 4), st.integers(1, 16), st.integers(0, 50))
def test_cases_attend_to_a_prefix_of_every_row(batch: int, sequence: int, seed: int) -> None:
    feeds = case_feeds((IDS, MASK, STATE), Bucket(batch, sequence), seed)
    mask = feeds["mask"]
    assert mask.dtype == np.int64
    assert (mask[:, 0] == 1).all()
    assert (np.diff(mask, axis=1) <= 0).all()
    assert seed or mask.all()
    assert feeds["state"].shape == (batch, sequence, 16)
    assert feeds["ids"].max() < 50


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generating_folder(tmp_path_factory) / "graphs"


def test_every_engine_is_compared(graphs: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole ones, and those of caches."""
    played_sessions(monkeypatch)
    bundle = open_bundle(graphs)
    found = check_on_provider(bundle, provider_on(gpu), silent)
    assert {one.engine for one in found} == {engine.id for engine in bundle.manifest.every_engine}
    assert not [one.problem for one in found if one.problem]
    assert all(one.parity is not None and one.parity.max_abs < 1e-4 for one in found)


def test_what_differs_is_said(graphs: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    played_sessions(monkeypatch, off_by=0.01)
    found = check_on_provider(open_bundle(graphs), provider_on(gpu), silent)
    assert all(one.parity is None for one in found)
    whole = [one.problem for one in found if one.problem and "on provider cuda: output" in one.problem]
    opened = [one.problem for one in found if one.problem and "on this GPU" in one.problem]
    assert whole
    assert opened
    assert len(whole) + len(opened) == len(found)


def test_the_command(graphs: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = graphs
    line = error_of("verify", bundle, "--provider", "cuda")
    assert line.endswith("; install nestforge[cuda] in place of nestforge[cpu]")
    assert "at most one of --against and --provider" in usage_of(
        "verify", bundle, "--provider", "cuda", "--against", bundle
    )
    monkeypatch.setattr(checks, "provider_named", lambda _: provider_on(gpu))
    played_sessions(monkeypatch)
    data = json_of("verify", bundle, "--provider", "cuda")
    assert (data["provider"], {one.get("problem") for one in data["engines"]}) == ("cuda", {None})
    assert "equal" in shown("verify", bundle, "--provider", "cuda")
    played_sessions(monkeypatch, off_by=0.01)
    failed = nestforge("verify", bundle, "--provider", "cuda")
    assert (failed.exit_code, "differs" in failed.stdout) == (1, True)
    assert " of 9 engines differ on provider cuda: engine " in failed.stderr.splitlines()[-1]


def clipping(kind: int, bounds: list[str]) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, kind, ["count"]) for name in ("x", "y")]
    constants = [helper.make_tensor(name, kind, [], [number]) for name, number in (("low", -2), ("high", 3))]
    nodes = [helper.make_node("Clip", ["x", *bounds], ["kept"], "clip"), helper.make_node("Neg", ["kept"], ["y"])]
    graph = helper.make_graph(nodes, "clipping", values[:1], values[1:], constants)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


@pytest.mark.parametrize("bounds", [["low"], ["low", "high"], ["", "high"]])
def test_whole_numbers_are_bounded_as_before(bounds: list[str]) -> None:
    model = clipping(TensorProto.INT64, bounds)
    numbers = {"x": np.arange(-5, 7)}

    def answer(model: onnx.ModelProto) -> np.ndarray:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return session.run(None, numbers)[0]

    assert any("Clip" in problem for problem in unsupported(model))
    made = in_parsed_operators(model)
    onnx.checker.check_model(made)
    assert unsupported(made) == []
    np.testing.assert_array_equal(answer(made), answer(model))
    assert in_parsed_operators(made) is made


def test_others_stay() -> None:
    for model in (clipping(TensorProto.FLOAT, ["low", "high"]), clipping(TensorProto.INT64, [])):
        assert in_parsed_operators(model) is model
