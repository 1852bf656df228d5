"""A GPU as a device, on a stand-in for CUDA: what is asked of CUDA is right, not that CUDA does it."""

import _thread
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from nestforge.errors import BundleError, BundleIncompatibleError
from nestforge.runtime.device.cuda_device import DeviceThread
from nestforge.runtime.device.store import StoreUse
from nestforge.runtime.graphs.initializers import Initializer
from safetensors.numpy import save_file
from support.fake_cuda import World
from support.fake_gpu import Gpu


def test_rows_move_and_are_cleared_within_the_device(world: World) -> None:
    from nestforge.runtime.device.cuda_device import take_cuda_device

    device = take_cuda_device()
    assert (device.kind, device.index, device.name) == ("cuda", 0, "Fake GPU")
    assert device.free_bytes() == world.free
    before, after = device.allocate(12), device.allocate(20)
    source, found = device.staging(12), device.staging(20)
    source[:] = np.arange(12)
    found[:] = 99
    device.to_device(before, source)
    device.to_device(after, found)
    device.copy_rows(after, 5, before + 4, 4, 3, 2)
    device.clear_rows(after + 3, 5, 2, 2)
    device.clear_rows(after + 10, 5, 5, 1)
    device.to_host(found, after)
    device.wait()
    assert found.reshape(4, 5).tolist() == [[4, 5, 6, 0, 0], [8, 9, 10, 0, 0], [0] * 5, [99] * 5]
    for address in (before, after):
        device.free(address)
    for staging in (source, found):
        device.free_staging(staging)
    device.release()
    assert not world.allocated


def test_one_device_serves_the_process_until_its_last_user_leaves(world: World) -> None:
    from nestforge.runtime.device.cuda_device import take_cuda_device

    first, second = take_cuda_device(), take_cuda_device()
    assert first is second
    first.release()
    assert list(world.allocated.values()) == ["stream"]
    second.release()
    assert not world.allocated


def test_nobody_waits_for_the_stream_while_another_thread_holds_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever captures in the stream holds the lock, and a wait in between would break the capture."""
    from nestforge.runtime.device.cuda_device import take_cuda_device

    device = take_cuda_device()
    took: list[bool] = []

    def try_lock() -> None:
        took.append(device.lock.acquire(blocking=False))

    def wait() -> None:
        other = threading.Thread(target=try_lock)
        other.start()
        other.join()

    with monkeypatch.context() as patch:
        patch.setattr(device.stream, "wait", wait)
        device.wait()
        with device.lock:  # again by who holds it
            device.wait()
    assert took == [False, False]
    try_lock()
    assert took == [False, False, True]
    device.lock.release()
    device.release()


def test_what_is_captured_runs_when_it_is_started(world: World) -> None:
    from nestforge.runtime.device.cuda_device import take_cuda_device

    device = take_cuda_device()
    source, target, clear = device.allocate(4), device.allocate(4), np.zeros(4, np.uint8)
    device.to_device(source, np.arange(4, dtype=np.uint8))
    device.to_device(target, clear)

    def fetched() -> list[int]:
        found = np.empty(4, np.uint8)
        device.to_host(found, target)
        device.wait()
        return found.tolist()

    graph = device.capture(lambda: device.stream.copy_rows(target, 4, source, 4, 4, 1))
    assert fetched() == [0, 0, 0, 0]
    device.start(graph)
    assert fetched() == [0, 1, 2, 3]
    graph.close()
    device.free(source)
    device.free(target)
    device.release()
    assert not world.allocated
    assert not world.graphs


def _raise(failure: BaseException) -> None:
    raise failure


def test_a_refused_capture_holds_nothing_of_its_run(world: World) -> None:
    """A session would stay open until the garbage collector comes."""
    from nestforge.runtime.device.cuda_device import take_cuda_device

    device, session = take_cuda_device(), Gpu()
    gone = weakref.ref(session)

    def work(of: object = session) -> None:
        raise RuntimeError("CUDA failure 900")

    gc.disable()
    try:
        with pytest.raises(BundleError, match="CUDA failure 900"):
            device.capture(work)
        session.thread.close()
        del work, session
        assert gone() is None
    finally:
        gc.enable()
    device.release()


def test_a_refused_capture_ends_and_another_thread_goes_on(world: World) -> None:
    """CUDA takes the end of a capture from the thread that began it, and keeps the last error of each thread. A graph
    that touches the host's memory is none: nobody says how long that lasts."""
    from nestforge.runtime.device.cuda_device import take_cuda_device

    device = take_cuda_device()
    address, host = device.allocate(4), np.zeros(4, np.uint8)

    def fails() -> None:
        raise RuntimeError("CUDA failure 900: operation not permitted\nmore")

    refusals: dict[str, Callable[[], object]] = {
        "^CUDA failure 900: operation not permitted$": fails,
        "reads or calls the host": lambda: device.stream.to_device(address, host),
        "queued nothing in its stream": lambda: None,
    }
    for reason, work in refusals.items():
        before = device.perform(threading.current_thread)
        with pytest.raises(BundleError, match=reason):
            device.capture(work)
        assert device.perform(threading.current_thread) is not before
        assert not before.is_alive()
    with pytest.raises(KeyboardInterrupt):
        device.stream.capture(lambda: _raise(KeyboardInterrupt()))
    world.captures = False
    with pytest.raises(BundleError, match="capturing a run"):
        device.capture(lambda: None)
    assert not world.graphs
    device.free(address)
    device.release()
    assert not world.allocated


def test_sessions_run_in_the_devices_own_thread_on_its_gpu(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import runtime as cudart
    from nestforge.runtime.device.cuda_device import take_cuda_device

    chosen: list[tuple[int, int]] = []
    choose = cudart.cudaSetDevice
    monkeypatch.setattr(
        cudart, "cudaSetDevice", lambda index: chosen.append((threading.get_ident(), index)) or choose(index)
    )
    device = take_cuda_device()
    ident = device.perform(threading.get_ident)
    assert ident != threading.get_ident()
    assert (ident, 0) in chosen
    thread = device.perform(threading.current_thread)
    device.release()
    assert not thread.is_alive()


def test_weights_that_do_not_fit_are_one_line(world: World, tmp_path: Path) -> None:
    from nestforge.runtime.device.cuda_device import take_cuda_device

    save_file({"w": np.zeros(1000, np.float32)}, tmp_path / "w")
    device = take_cuda_device()
    use = StoreUse(tmp_path / "w", device)
    begin = (tmp_path / "w").stat().st_size - 4000
    world.free = 3999
    with pytest.raises(BundleIncompatibleError, match=r"^CUDA: allocating 4000 bytes: out of memory; close other"):
        use.store.views([Initializer("w", "float32", (10,), begin, 40, "w")], "e")
    world.free = 4000
    (view,) = use.store.views([Initializer("w", "float32", (10,), begin, 40, "w")], "e").values()
    assert view.__dlpack_device__() == (2, 0)
    use.close()
    device.release()


@pytest.fixture
def begun() -> list[int]:
    return []


@pytest.fixture
def thread(begun: list[int]) -> Iterator[DeviceThread]:
    found = DeviceThread(lambda: begun.append(threading.get_ident()))
    yield found
    found.close()


def test_all_work_is_done_in_one_thread_until_that_is_renewed(thread: DeviceThread, begun: list[int]) -> None:
    with ThreadPoolExecutor(8) as callers:
        assert list(callers.map(lambda _: thread.perform(threading.get_ident), range(8))) == 8 * begun
    old = set(threading.enumerate())
    thread.renew()
    assert len(begun) == 2
    assert thread.perform(threading.current_thread) not in old
    assert thread.perform(threading.get_ident) == begun[1]


def test_what_work_raises_is_raised_where_it_was_handed_over(thread: DeviceThread) -> None:
    with pytest.raises(ZeroDivisionError):
        thread.perform(lambda: 1 // 0)
    assert thread.perform(lambda: 3) == 3


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts what runs in the background with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_who_is_interrupted_waits_until_the_work_no_longer_reads_its_memory(thread: DeviceThread) -> None:
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        time.sleep(0.3)
        ended.set()

    def interrupt() -> None:
        begun.wait()
        for _ in range(2):
            _thread.interrupt_main()
            time.sleep(0.05)

    other = threading.Thread(target=interrupt)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.perform(work)
        assert ended.is_set()
    finally:
        other.join()
    assert thread.perform(lambda: 3) == 3


def test_a_thread_that_cannot_begin_is_not_left_behind() -> None:
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        DeviceThread(lambda: 1 // 0 or None)
    assert threading.active_count() == before
