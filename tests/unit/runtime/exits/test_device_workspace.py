"""A chain whose state stays on a device against the ordinary one: on the processor's memory, and on a GPU that a
stand-in plays, with plans of TensorRT. Answers are whole numbers, so they are equal to the bit."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import BundleError
from nestforge.runtime.engines.residency import Residency
from nestforge.runtime.exits import segments
from nestforge.runtime.exits import workspace as steps
from nestforge.runtime.exits.chain import ExitChain, SegmentRun
from nestforge.runtime.exits.device_workspace import DeviceWorkspace
from nestforge.runtime.exits.policy import ExitPolicy
from nestforge.runtime.exits.segments import BatchPlan
from nestforge.runtime.model import ElasticModel
from support.exit_bundles import HIDDEN, LAYERS, exits_entry, open_chain, requests, write_exits_bundle
from support.fake_cuda import World
from support.fake_gpu import Gpu, HostDevice, host_provider, played_sessions, provider_on
from support.fake_tensorrt import list_plans

THRESHOLDS = st.tuples(*(st.sampled_from([-1.0, 0.0, 0.25, 0.5, 0.875]) for _ in LAYERS[:-1]))
LENGTHS = st.lists(st.integers(1, 16), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def device() -> HostDevice:
    return HostDevice()


@pytest.fixture(scope="module", autouse=True)
def plans_of_the_processor() -> Iterator[None]:
    """Chains on a device would choose fewer runs; what they answer is compared at the same ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "_TOKENS_OF_A_RUN", 0)
        yield


SHIPPED = segments._TOKENS_OF_A_RUN


def test_a_device_prefers_fewer_runs(exits_bundle: Path, device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its size, a run costs it as much as some hundred tokens."""
    monkeypatch.setattr(segments, "_TOKENS_OF_A_RUN", SHIPPED)
    bundle = open_bundle(exits_bundle)
    with open_chain(bundle, host_provider(device)) as chain, open_chain(bundle) as ordinary:
        assert [bucket.batch for bucket in chain.batch_plan(0, 2, 8)] == [4]
        assert [bucket.batch for bucket in ordinary.batch_plan(0, 2, 8)] == [1, 1]


@pytest.fixture(scope="module")
def chains(exits_bundle: Path, device: HostDevice) -> Iterator[tuple[ExitChain, ExitChain]]:
    """The ordinary one, and that on ``device``."""
    bundle = open_bundle(exits_bundle)
    with open_chain(bundle) as ordinary, open_chain(bundle, host_provider(device)) as resident:
        yield ordinary, resident
    assert device.allocated_bytes == 0


@settings(max_examples=60)
@given(lengths=LENGTHS, thresholds=THRESHOLDS, seed=st.integers(0, 99), watched=st.booleans())
def test_it_answers_as_the_ordinary_chain_does(
    chains: tuple[ExitChain, ExitChain],
    lengths: list[int],
    thresholds: tuple[float, float],
    seed: int,
    watched: bool,
) -> None:
    feeds, policy = requests(lengths, seed=seed), ExitPolicy(thresholds, "<=")
    seen: list[list[Any]] = [[], []]

    def watch(number: int) -> Callable[[SegmentRun], None] | None:
        def see(run: SegmentRun) -> None:
            state = None if run.state is None else run.state.tolist()
            seen[number].append((run.rows.tolist(), run.logits.tolist(), run.entropy.tolist(), state, run.buckets))

        return see if watched else None

    ordinary, resident = (chain.run(feeds, policy, watch(number)) for number, chain in enumerate(chains))
    for name in ("logits", "entropy", "index", "layer", "flops"):
        np.testing.assert_array_equal(getattr(resident, name), getattr(ordinary, name))
    assert resident.buckets == ordinary.buckets
    assert seen[0] == seen[1]
    assert len(seen[0]) == (max(ordinary.index) + 1 if watched else 0)


def test_what_engines_keep_for_a_chain_is_bounded(
    exits_bundle: Path, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bindings of a workspace go with it."""
    with open_chain(open_bundle(exits_bundle), host_provider(device)) as chain:
        opened = chain._segments[0]._pool._open

        def bindings() -> int:
            return sum(len(runner._bound) for runner in opened.values())

        def ask(seed: int) -> None:
            chain.run(requests([3, 8], seed=seed), ExitPolicy((-1.0, -1.0), "<="))

        ask(0)
        once, engines = bindings(), len(opened)
        assert once > engines  # every engine has one of its own
        for seed in range(20):
            ask(seed)
        assert bindings() == once
        monkeypatch.setattr(chain, "_kept", 0)
        for seed in range(20):  # the first of them still uses the workspace that was kept
            ask(seed)
            assert bindings() == engines


@pytest.mark.parametrize("name", ["cuda", "tensorrt"])
def test_captured_runs_answer_from_the_workspace_they_are_requested(
    exits_bundle: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """On either provider, on one thread and on several."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    played_sessions(monkeypatch)
    bundle = open_bundle(exits_bundle)
    policies = ExitPolicy((0.25, 0.5), "<="), ExitPolicy((-1.0, -1.0), "<=")
    cases = [
        (requests(lengths, seed=seed), policy)
        for seed, lengths in enumerate(([3, 16, 8], [8] * 8, [1], [16, 2, 2, 2, 9, 9]))
        for policy in policies
    ]
    with open_chain(bundle) as ordinary:
        wanted = [ordinary.run(*case).logits for case in cases]
    with open_chain(bundle, provider_on(gpu, name)) as resident:

        def ask(start: int) -> None:
            for turn in range(3 * len(cases)):
                number = (start + turn) % len(cases)
                np.testing.assert_array_equal(resident.run(*cases[number]).logits, wanted[number])

        ask(0)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(ask, range(8)))
        assert len(resident._idle) <= 4
        assert bool(gpu.starts) is (name == "cuda")


def test_no_more_requests_than_workspaces_are_under_way_on_a_device(exits_bundle: Path, device: HostDevice) -> None:
    """A workspace that is made and closed would leave graphs behind, which sessions do not release."""
    made: list[object] = []
    with open_chain(open_bundle(exits_bundle), host_provider(device)) as chain:
        new = chain._new_workspace
        chain._new_workspace = lambda: made.append(None) or new()

        def ask(seed: int) -> None:
            chain.run(requests([3, 8], seed=seed), ExitPolicy((-1.0, -1.0), "<="), lambda _: time.sleep(0.005))

        with ThreadPoolExecutor(12) as threads:
            list(threads.map(ask, range(12)))
        assert len(made) <= 4
        assert len(chain._idle) == len(made)


def test_steps_that_make_room_take_their_bindings_with_them(
    exits_bundle: Path, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_MAX_BOUND_STEPS", 4)
    bundle = open_bundle(exits_bundle)
    with open_chain(bundle) as ordinary, open_chain(bundle, host_provider(device)) as resident:
        for seed in range(30):
            feeds = requests([1 + seed % 16] * (1 + seed % 8), seed=seed)
            mine, known = (chain.run(feeds, ExitPolicy((0.25, 0.5), "<=")) for chain in (resident, ordinary))
            np.testing.assert_array_equal(mine.logits, known.logits)
            opened = resident._segments[0]._pool._open.values()
            bound = sum(len(runner._bound) - 1 for runner in opened)
            remembered = resident._idle[0]._steps._known.values()
            assert len(remembered) <= 4
            assert bound == sum(len(step.bound) for step in remembered)


def test_a_step_of_which_one_engine_cannot_be_opened_keeps_none() -> None:
    closed: list[str] = []

    class Opened:
        def bind_device(self, *_: object) -> Any:
            return SimpleNamespace(close=lambda: closed.append("close"))

    def runner(bucket: Bucket) -> Any:
        if bucket.batch == 1:
            raise BundleError("no memory")
        return Opened()

    exits, device = exits_entry(), HostDevice()
    workspace = DeviceWorkspace(exits, 4, 8, device)
    plan = BatchPlan((Bucket(2, 8), Bucket(1, 8)), 1.0)
    with pytest.raises(BundleError, match="no memory"):
        workspace.step(0, exits.segments[0], plan, 0, False, runner)
    assert closed == ["close"]
    workspace.close()
    assert device.allocated_bytes == 0


class Watched(HostDevice):
    """Records what crosses to the host and what moves within the device."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[tuple[str, int]] = []

    def to_host(self, target: Any, address: int) -> None:
        self.moves.append(("to host", target.nbytes))
        super().to_host(target, address)

    def copy_rows(self, target: int, pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        self.moves.append(("within", rows))
        super().copy_rows(target, pitch, source, source_pitch, width, rows)


def test_only_answers_come_back_and_rows_that_lie_together_move_in_one_copy() -> None:
    device = Watched()
    workspace = DeviceWorkspace(exits_entry(), 16, 8, device)
    state = np.arange(8 * 8 * HIDDEN, dtype=np.float32).reshape(8, 8, HIDDEN)
    device.to_device(workspace._states[0], state)
    old, new = BatchPlan((Bucket(8, 8),), 1.0), BatchPlan((Bucket(4, 8),), 1.0)
    origin, source = workspace.compact(np.array([0, 5, 6, 7]), old, new, 0)
    assert (origin.tolist(), source) == ([0, 5, 6, 7], 0)
    assert device.moves == [("within", 3), ("within", 3)]  # the state's rows, and the mask's
    found = np.empty((4, 8, HIDDEN), np.float32)
    device.to_host(found, workspace._states[0])
    np.testing.assert_array_equal(found, state[[0, 5, 6, 7]])
    workspace.close()
    assert device.allocated_bytes == 0


def test_a_request_that_failed_on_its_way_is_waited_for() -> None:
    waits: list[str] = []

    class Slow(HostDevice):
        def wait(self) -> None:
            waits.append("wait")

    workspace = DeviceWorkspace(exits_entry(), 4, 8, Slow())
    plan = BatchPlan((Bucket(2, 8),), 1.0)
    workspace.fill(requests([3, 8]), plan)
    assert waits == []
    workspace.fill(requests([3, 8]), plan)
    assert waits == ["wait"]


def test_a_model_says_where_its_chain_ran(exits_bundle: Path) -> None:
    bundle, device = open_bundle(exits_bundle), HostDevice()
    residencies: dict[str, Residency] = dict.fromkeys((engine.id for engine in bundle.manifest.engines), "shared")
    feeds = requests([8, 3])
    with (
        ElasticModel(bundle, residencies, 1) as plain,
        ElasticModel(bundle, residencies, 1, host_provider(device)) as model,
    ):
        for exits in (0.5, "off"):
            mine, known = model(feeds, exits=exits), plain(feeds, exits=exits)
            np.testing.assert_array_equal(mine["logits"], known["logits"])
            assert "; by ONNX Runtime's provider host" in mine.reason
            assert "provider" not in known.reason
    assert device.allocated_bytes == 0


@pytest.mark.parametrize("captures", [True, False])
def test_plans_of_tensorrt_pass_their_state_on_the_gpu(tmp_path: Path, world: World, captures: bool) -> None:
    world.captures = captures
    plain = open_bundle(write_exits_bundle(tmp_path / "plain"))
    bundle = list_plans(tmp_path / "plain", tmp_path / "plans.bundle")
    with open_chain(plain) as ordinary, open_chain(bundle) as resident:
        for seed, lengths in enumerate(([3, 16, 8], [8] * 8, [1], [16, 2, 2, 2, 9, 9])):
            feeds = requests(lengths, seed=seed)
            for policy in (ExitPolicy((0.25, 0.5), "<="), ExitPolicy((-1.0, -1.0), "<=")):
                for _ in range(2):
                    world.calls.clear()
                    mine, known = resident.run(feeds, policy), ordinary.run(feeds, policy)
                    for name in ("logits", "entropy", "index"):
                        np.testing.assert_array_equal(getattr(mine, name), getattr(known, name))
                runs = max(known.index) + 1
                # Once bound, every engine is one start: of its graph, or of the engine itself.
                assert world.calls.count("graph") >= (runs if captures else 0)
                assert world.calls.count("run") >= runs
                assert not {"open", "context"} & set(world.calls)
    with pytest.raises(BundleError, match="closed"):
        resident.run(feeds, policy)
    resident.release()
