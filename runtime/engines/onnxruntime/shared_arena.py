"""One arena for the activations of all engines in the process, instead of one each.

Engines mostly run one after the other; what one needed for its activations the next can use. ONNX Runtime's arena is
thread-safe and grows when engines do run at once.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

_lock = threading.Lock()


def use_shared_arena(options: Any) -> None:
    """Makes a session with these options take activations from the shared arena; other sessions are not touched."""
    with _lock:
        if _registered():
            options.add_session_config_entry("session.use_env_allocators", "1")


@cache
def _registered() -> bool:
    import onnxruntime

    memory = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    try:
        onnxruntime.create_and_register_allocator(memory, None)
    except Exception:  # noqa: BLE001  (of an unnamed type: other code has registered one, perhaps capped; leave it alone)
        return False
    return True
