"""The gate on engines that decide: routes are judged by their scores, values are compared given the routes."""

import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.compiler.engines import build_engine
from nestforge.compiler.engines.build_engine import EngineBuilder
from nestforge.compiler.engines.templates import Templates
from nestforge.compiler.graph.template import Template, emit
from nestforge.compiler.parity import reference
from nestforge.compiler.parity.cases import Case
from nestforge.compiler.parity.compare import Rounding, compare
from nestforge.compiler.parity.engine_verdict import tolerance_of
from nestforge.compiler.parity.reference import replayed
from nestforge.compiler.parity.references import References
from nestforge.compiler.verify import verify_bundle
from nestforge.compiler.work.staging import Stage
from nestforge.errors import ParityError
from nestforge.exporters.architecture import JudgedRoutes
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal, permute_axis
from nestforge.progress import heard_by
from onnx import helper, numpy_helper
from support.sealing import reseal
from support.tiny_compile import board, builder_in, write_levels
from support.tiny_mixer import save_tiny_mixer

# One group of 32 tokens, four experts of 3 slots (6 at twice the factor).
BUCKET = Bucket(2, 16)
PROFILE = board(buckets=[BUCKET.label], budgets={"full": {}})
TENSOR = "layers.1.moe.experts.down_weight"

Tamper = Callable[[onnx.ModelProto], None]


@pytest.fixture(scope="session")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixer of two layers, the second of experts."""
    axes = {"capacities": (19,), "group_sizes": (4096,), "expert_counts": (3,)}
    layers = {"num_hidden_layers": 2, "attention_layers": (), "moe_layers": (1,)}
    return save_tiny_mixer(tmp_path_factory.mktemp("routed") / "mixer", capacity_factor=0.38, **layers, **axes)


@pytest.fixture(scope="session")
def routed_template(routed: Path, tmp_path_factory: pytest.TempPathFactory) -> Template:
    universal = load_universal(open_source(routed))
    folder = tmp_path_factory.mktemp("stage")
    templates = Templates(universal, Stage(folder, folder), PROFILE)
    return templates.traced(universal.spec.universal(), BUCKET, None)


@pytest.fixture
def ordered(routed: Path) -> UniversalModel:
    """The mixer with its experts in another order than its files have."""
    universal = load_universal(open_source(routed))
    permute_axis(universal, "layers.1.moe.experts", torch.tensor([2, 0, 3, 1]))
    return universal


@pytest.fixture
def builder(ordered: UniversalModel, routed_template: Template, tmp_path: Path) -> EngineBuilder:
    return builder_in(tmp_path / "stage", ordered, routed_template, PROFILE)


def built(builder: EngineBuilder) -> EngineEntry:
    return builder.build(builder.universal.spec.universal(), BUCKET)


def tampered(monkeypatch: pytest.MonkeyPatch, tamper: Tamper) -> None:
    """Every engine is changed between the template and the gate."""

    def emit_changed(*arguments: object) -> bytes:
        model = onnx.ModelProto.FromString(emit(*arguments))
        tamper(model)
        return model.SerializeToString()

    monkeypatch.setattr(build_engine, "emit", emit_changed)


def top_k(model: onnx.ModelProto) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == "TopK")


def prefer_later_tokens(by: float) -> Tamper:
    """Adds ``by`` to every score of the second row."""

    def tamper(model: onnx.ModelProto) -> None:
        node = top_k(model)
        bias = np.repeat(np.array([0, by], np.float32), 16)
        model.graph.initializer.append(numpy_helper.from_array(bias, "bias"))
        at = list(model.graph.node).index(node)
        model.graph.node.insert(at, helper.make_node("Add", [node.input[0], "bias"], ["biased"]))
        node.input[0] = "biased"

    return tamper


def take_the_worst(model: onnx.ModelProto) -> None:
    node = top_k(model)
    next(attribute for attribute in node.attribute if attribute.name == "largest").i = 0


def report(change: str, operand: int) -> Tamper:
    """The engine computes what it did, and reports other routes: ``change`` with ``operand``."""

    def tamper(model: onnx.ModelProto) -> None:
        node = top_k(model)
        (old,) = [name for name in node.output if name == "routes.1"]
        for user in model.graph.node:
            user.input[:] = ["true.routes" if name == old else name for name in user.input]
            user.output[:] = ["true.routes" if name == old else name for name in user.output]
        model.graph.initializer.append(numpy_helper.from_array(np.array(operand), "operand"))
        model.graph.node.append(helper.make_node(change, ["true.routes", "operand"], [old]))

    return tamper


def twins(builder: EngineBuilder) -> EngineBuilder:
    """Two rows of one text, so that every token has a twin of the same score; three slots cannot hold two pairs."""
    case = builder.cases[BUCKET][0]
    feeds = {name: np.repeat(array[:1], 2, axis=0) for name, array in case.feeds.items()}
    return replace(builder, references=References(builder.universal, {BUCKET: [Case("twins", feeds)]}))


def test_a_sound_engine_makes_pytorchs_decisions(builder: EngineBuilder) -> None:
    entry = built(builder)
    assert entry.routing is not None
    assert [(one.name, one.shape) for one in entry.routing] == [("routes.1", (1, 4, 3))]
    assert (entry.metadata["groups"], entry.metadata["tokens per group"], entry.metadata["capacity"]) == (1, 32, 3)
    assert entry.parity.rule.startswith("routes within 8e-06 of PyTorch's own by score; with them given, abs <= 8e-06")
    assert entry.parity.routing is not None
    (judged,) = entry.parity.routing
    assert (judged.name, judged.made, judged.differing) == ("routes.1", 12 * len(entry.parity.cases), 0)
    assert judged.worst_score_gap <= 1e-6
    assert judged.shares["slots_used"] == 1
    assert 0.6 < judged.shares["tokens_dropped"] < 1
    assert 0.25 < judged.shares["mean_gate"] < 1


def test_a_near_tie_that_falls_otherwise_is_no_error(builder: EngineBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = twins(builder)
    tampered(monkeypatch, prefer_later_tokens(2e-7))
    entry = built(builder)
    assert entry.parity.routing is not None
    (judged,) = entry.parity.routing
    assert judged.differing >= 4, "every expert has a slot for one token of a pair alone"
    assert judged.worst_score_gap <= 1e-6
    # By values alone the engine would be refused: another token was computed.
    cases = builder.cases[BUCKET]
    found = builder.run(entry, [case.feeds for case in cases])
    told: list[tuple[int, int]] = []
    with heard_by(lambda *done: told.append(done)):
        alone = replayed(builder.references.of(builder.universal.spec.universal()), cases).outputs
    tokens = [case.tokens for case in (*cases, *cases)]
    assert told == [(sum(tokens[:n]), sum(tokens)) for n in range(len(tokens))], "both passes, as progress"
    assert not all(compare(alone, found, ["twins"], tolerance_of(entry, builder.universal)))


def test_a_wrong_route_stops_the_build(builder: EngineBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    tampered(monkeypatch, take_the_worst)
    with pytest.raises(ParityError) as error:
        built(builder)
    assert re.match(
        r"engine \S+@b2-s16: routes\.1, case random-0: layer 1, group 0, expert \d: took token \d+ \(\S+\) "
        r"before \d+ \(\S+\); worse than PyTorch's own by 0\.\d+, allowed 8e-06; allowed routes within 8e-06 .*; "
        r"first to diverge: no module; the route alone is wrong$",
        str(error.value),
    ), str(error.value)
    assert "\n" not in str(error.value)


def test_a_route_that_is_a_little_too_bad_stops_the_build(
    builder: EngineBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = twins(builder)
    tampered(monkeypatch, prefer_later_tokens(0.02))
    with pytest.raises(ParityError, match=r"routes\.1, case twins: layer 1, group 0, expert "):
        built(builder)


def test_wrong_values_of_right_routes_stop_the_build(builder: EngineBuilder) -> None:
    path, stored = builder.stage.folder / WEIGHTS_NAME, builder.store[TENSOR]
    raw = bytearray(path.read_bytes())
    elements = int(np.prod(stored.shape)) // 4
    for offset in range(stored.offset, stored.offset + 4 * elements, 4):  # of the first expert
        struct.pack_into("<f", raw, offset, 1.01 * struct.unpack_from("<f", raw, offset)[0])
    path.write_bytes(raw)
    with pytest.raises(ParityError) as error:
        built(builder)
    assert re.search(r"@b2-s16: output last_hidden_state, case random-0: max abs ", str(error.value))
    assert re.search(r"first to diverge: layers\.1\.\S+ \(max abs ", str(error.value)), str(error.value)


@pytest.mark.parametrize(
    ("change", "operand", "message"),
    [
        ("Add", 100, r"routes\.1: expected 0\.\.31, got 1\d\d at \[0, 0, 0\]"),
        ("Sub", 32, r"routes\.1: expected 0\.\.31, got -\d+ at \[0, 0, 0\]"),
        ("Mul", 0, r"routes\.1: group 0, expert 0: took token 0 twice"),
    ],
)
def test_routes_that_nothing_can_take_are_refused_by_name(
    builder: EngineBuilder, monkeypatch: pytest.MonkeyPatch, change: str, operand: int, message: str
) -> None:
    tampered(monkeypatch, report(change, operand))
    with pytest.raises(ParityError, match=rf"engine \S+@b2-s16: case random-0: {message}"):
        built(builder)


def test_a_route_that_float32_cannot_choose_is_refused_by_name() -> None:
    """Whatever the gap is: an allowance of four times such a score gap would pass any route."""
    judged = JudgedRoutes(0.03, "layer 1", made=1, differing=1, shares={})
    assert reference._broken("routes", "c", judged, 8e-6, Rounding(0.009)) is None
    for own in (0.011, float("inf")):
        broken = reference._broken("routes", "c", judged, 8e-6, Rounding(own))
        assert broken.unprovable
        assert broken.describe() == (
            f"routes, case c: PyTorch's own float32 moves the score that decides by {own:g}, more than 0.01; "
            "this model needs more than float32, and nothing would be proved"
        )
    for gap in (float("nan"), float("inf")):
        broken = reference._broken("routes", "c", replace(judged, score_gap=gap), 8e-6, Rounding(float("nan")))
        assert not broken.unprovable


def test_routes_of_another_count_are_refused(builder: EngineBuilder) -> None:
    entry = built(builder)
    cases = builder.cases[BUCKET][:1]
    found = builder.run(entry, [case.feeds for case in cases])
    fewer = [{**arrays, "routes.1": arrays["routes.1"][:, :, :2].copy()} for arrays in found]
    reference = builder.references.of(builder.universal.spec.universal())
    with pytest.raises(ParityError, match=r"routes\.1: expected int64 \[1, 4, 3\], got int64 \[1, 4, 2\]"):
        replayed(reference, cases, entry.routing, fewer, tolerance_of(entry, builder.universal).atol)


def test_a_written_bundle_keeps_the_rule(builder: EngineBuilder, routed: Path) -> None:
    """Against the model as its files have it, whose experts are in another order than the bundle's."""
    folder = write_levels(builder)
    shutil.rmtree(builder.stage.work)
    found = verify_bundle(folder, routed)
    assert found, [verdict.problem for verdict in found.engines]
    for verdict in found.engines:
        assert verdict.routing is not None
        assert [(one.name, one.differing) for one in verdict.routing] == [("routes.1", 0)]

    (path,) = [path for path in folder.glob("*.onnx") if "capacity_factor38" in path.name]
    model = onnx.load(path, load_external_data=False)
    take_the_worst(model)
    path.write_bytes(model.SerializeToString())
    reseal(folder)
    broken = {verdict.engine: verdict.problem for verdict in verify_bundle(folder, routed).engines if verdict.problem}
    ((engine, problem),) = broken.items()
    assert "capacity_factor38" in engine
    assert "routes.1, case random-0: layer 1, group 0, expert " in problem
