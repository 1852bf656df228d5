"""Bound runs on sessions that say what they are asked; nothing here ran on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from nestforge.errors import BundleError, InputError
from nestforge.runtime.engines.onnxruntime_gpu.session import CALL_BY_CALL, BoundRun
from support.fake_gpu import HostDevice


class Gpu(HostDevice):
    kind = "cuda"


class Session:
    """``calls`` are what it was asked, waits of the device included."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.failure = failure

    def run(self, _binding: object, options: Any) -> None:
        assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
        self.calls.append("run")
        if self.failure is not None:
            raise self.failure


def bound_to(session: Session, device: HostDevice, graph: int | None = None) -> tuple[BoundRun, list[BoundRun]]:
    """The run, and those that were closed."""
    closed: list[BoundRun] = []
    anything: Any = session
    return BoundRun("engine e", device, anything, object(), graph, closed.append), closed


@pytest.mark.parametrize("reason", ["CUBLAS failure 14: CUBLAS_STATUS_INTERNAL_ERROR", "Failed to run node 3"])
def test_failures_on_a_gpu_are_no_fault_of_the_input(reason: str) -> None:
    run, _ = bound_to(Session(RuntimeError(f"{reason}\nmore")), Gpu())
    with pytest.raises(BundleError, match=f"^engine e: {reason}$"):
        run()
    run, _ = bound_to(Session(RuntimeError(reason)), HostDevice())  # the processor looks at values
    with pytest.raises(InputError, match=f"^engine e: {reason}$"):
        run()


@pytest.mark.parametrize(("graph", "ends"), [(7, 1), (CALL_BY_CALL, 0), (None, 0)])
def test_a_capture_that_fails_is_ended_for_the_stream_is_every_sessions(graph: int | None, ends: int) -> None:
    ended: list[None] = []

    class Ending(Gpu):
        def end_capture(self) -> None:
            ended.append(None)

    session = Session(RuntimeError("CUDA failure 900: operation not permitted when stream is capturing"))
    run, _ = bound_to(session, Ending(), graph)
    with pytest.raises(BundleError, match="CUDA failure 900"):
        run()
    assert len(ended) == ends
    session.failure = None
    run()  # captured now
    session.failure = RuntimeError("CUDA failure 700: an illegal memory access was encountered")
    with pytest.raises(BundleError, match="CUDA failure 700"):
        run()
    assert len(ended) == ends


@pytest.mark.parametrize("graph", [7, CALL_BY_CALL, None])
def test_a_closed_run_lets_its_callers_memory_go_once_what_is_queued_is_done(graph: int | None) -> None:
    session = Session()

    class Waiting(Gpu):
        def wait(self) -> None:
            session.calls.append("wait")

    run, closed = bound_to(session, Waiting(), graph)
    run()
    run.close()
    run.close()
    assert closed == [run]
    assert session.calls == ["run", "wait"]
    with pytest.raises(BundleError, match="not open"):
        run()


def test_a_run_whose_session_closes_waits_for_nothing() -> None:
    session = Session()
    run, closed = bound_to(session, Gpu(), 7)
    run.drop()
    run.close()
    assert (session.calls, closed) == ([], [])
    with pytest.raises(BundleError, match="not open"):
        run()
