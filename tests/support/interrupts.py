"""An interrupt at a stated step of a call: a line, or an instruction, of the functions of some files."""

import dis
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from types import CodeType, FrameType, ModuleType
from typing import Any


class Interrupt(KeyboardInterrupt):
    """Raised where a user's Ctrl-C might come."""


def interrupt_everywhere(
    call: Callable[[], object],
    modules: tuple[ModuleType, ...],
    check: Callable[[str], object],
    event: str = "line",
    every: int = 1,
) -> int:
    """Calls ``call`` until it is interrupted no more: at its first step, ``every`` steps later and so on. ``check`` is
    given the place after each. Returns how often it was interrupted."""
    for times in count():
        with interrupt_at(times * every, modules, event) as raised, suppress(Interrupt):
            call()
        if not raised:
            return times
        check(raised[0])
    raise AssertionError


@contextmanager
def interrupt_at(number: int, modules: tuple[ModuleType, ...], event: str = "line") -> Iterator[list[str]]:
    """Within it Interrupt is raised at step ``number`` of this thread in functions of ``modules``; the list then names
    the place. ``event`` is "line" or "opcode"."""
    files = {module.__file__ for module in modules}
    left, raised = [number], []

    def enter(frame: FrameType, kind: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = event == "opcode"
        return step

    def step(frame: FrameType, kind: str, _: Any) -> Any:
        if kind == event and not raised and frame.f_lasti not in _leaving(frame.f_code):
            if not left[0]:
                raised.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
                raise Interrupt
            left[0] -= 1
        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield raised
    finally:
        sys.settrace(before)


@cache
def _leaving(code: CodeType) -> set[int]:
    """Offsets of the instructions that call the ``__exit__`` of a ``with`` block whose body has ended. The interpreter
    looks for interrupts behind calls, so between the body's last and that of ``__exit__`` none can come."""
    found: set[int] = set()
    steps = list(dis.get_instructions(code))
    for place in range(len(steps) - 2):
        three = steps[place : place + 3]
        if all(one.opname == "LOAD_CONST" and one.argval is None for one in three):
            begin = place - (place > 0 and steps[place - 1].opname in ("SWAP", "ROT_TWO"))
            end = next(at for at in range(place, len(steps)) if steps[at].opname.startswith("CALL"))
            found.update(one.offset for one in steps[begin : end + 1])
    return found
