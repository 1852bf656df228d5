from __future__ import annotations

import onnxruntime
import pytest
from nestforge.runtime.engines.onnxruntime import session as module
from nestforge.runtime.engines.onnxruntime.session import use_shared_arena

ENTRY = "session.use_env_allocators"


def test_sessions_take_activations_from_one_arena() -> None:
    options = onnxruntime.SessionOptions()
    use_shared_arena(options)
    assert options.get_session_config_entry(ENTRY) == "1"


def test_a_process_that_registers_none_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("registered already")

    monkeypatch.setattr(onnxruntime, "create_and_register_allocator", refuse)
    monkeypatch.setattr(module, "_registered", module._registered.__wrapped__)
    options = onnxruntime.SessionOptions()
    use_shared_arena(options)
    with pytest.raises(RuntimeError, match=ENTRY):
        options.get_session_config_entry(ENTRY)
