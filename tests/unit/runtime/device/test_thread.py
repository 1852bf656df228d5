from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from nestforge.runtime.device.cuda_device import DeviceThread


@pytest.fixture
def begun() -> list[int]:
    return []


@pytest.fixture
def thread(begun: list[int]) -> Iterator[DeviceThread]:
    found = DeviceThread(lambda: begun.append(threading.get_ident()))
    yield found
    found.close()


def test_all_work_is_done_in_one_thread_until_that_is_renewed(thread: DeviceThread, begun: list[int]) -> None:
    found: list[int] = []
    callers = [threading.Thread(target=lambda: found.append(thread.perform(threading.get_ident))) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == 8 * begun
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
