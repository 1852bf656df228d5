"""Bound runs on sessions that say what they are asked; nothing here ran on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from nestforge.errors import BundleError, InputError
from nestforge.runtime.engines.onnxruntime_gpu.session import BoundRun
from support.fake_gpu import Gpu as PlayedGpu
from support.fake_gpu import HostDevice


class Gpu(HostDevice):
    kind = "cuda"


class Session:
    """``calls`` are what it was asked, waits of the device included."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.failure = failure

    def run(self, binding: object, options: Any) -> None:
        self.queue(binding, options)

    def queue(self, _binding: object, options: Any) -> None:
        assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
        self.calls.append("run")
        if self.failure is not None:
            raise self.failure


def bound_to(session: Session, device: HostDevice, captures: bool = False) -> tuple[BoundRun, list[BoundRun]]:
    """The run, and those that were closed."""
    closed: list[BoundRun] = []
    anything: Any = session
    return BoundRun("engine e", device, anything, object(), captures, closed.append), closed


@pytest.mark.parametrize("reason", ["CUBLAS failure 14: CUBLAS_STATUS_INTERNAL_ERROR", "Failed to run node 3"])
def test_failures_on_a_gpu_are_no_fault_of_the_input(reason: str) -> None:
    run, _ = bound_to(Session(RuntimeError(f"{reason}\nmore")), Gpu())
    with pytest.raises(BundleError, match=f"^engine e: {reason}$"):
        run()
    run, _ = bound_to(Session(RuntimeError(reason)), HostDevice())  # the processor looks at values
    with pytest.raises(InputError, match=f"^engine e: {reason}$"):
        run()


def test_the_third_run_starts_as_a_graph() -> None:
    session, gpu = Session(), PlayedGpu()
    run, _ = bound_to(session, gpu, captures=True)
    captured = []
    for _ in range(4):
        run()
        captured.append(run.is_captured)
    assert captured == [False, True, True, True]
    assert (len(gpu.graphs), gpu.starts, run.refusal) == (1, 2, None)
    run.close()
    assert not run.is_captured
    gpu.thread.close()


def test_a_run_that_cannot_be_captured_stays_as_it_is() -> None:
    session, gpu = Session(), PlayedGpu()
    gpu.refuses = "CUDA: capturing a run: operation not permitted when stream is capturing"
    run, _ = bound_to(session, gpu, captures=True)
    for _ in range(4):
        run()
    assert (run.is_captured, run.refusal) == (False, gpu.refuses)
    assert session.calls == ["run"] * 4
    session.failure = RuntimeError("CUDA failure 700: an illegal memory access was encountered")
    with pytest.raises(BundleError, match="CUDA failure 700"):
        run()
    gpu.thread.close()


@pytest.mark.parametrize("captures", [True, False])
def test_a_closed_run_lets_its_callers_memory_go_once_what_is_queued_is_done(captures: bool) -> None:
    session = Session()

    class Waiting(Gpu):
        def wait(self) -> None:
            session.calls.append("wait")

    run, closed = bound_to(session, Waiting(), captures)
    run()
    run.close()
    run.close()
    assert closed == [run]
    assert session.calls == ["run", "wait"]
    with pytest.raises(BundleError, match="not open"):
        run()


def test_a_run_whose_session_closes_waits_for_nothing() -> None:
    session = Session()
    run, closed = bound_to(session, Gpu(), captures=True)
    run.drop()
    run.close()
    assert (session.calls, closed) == ([], [])
    with pytest.raises(BundleError, match="not open"):
        run()
