"""Assumptions of the tests on a GPU, as far as they show without one."""

from __future__ import annotations

import warnings

import pytest
from support.gpu_available import WITHOUT_TF32


@pytest.mark.filterwarnings(WITHOUT_TF32)
def test_inductor_may_say_that_tf32_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does on every GPU from compute capability 8.0 on, whatever is set, and warnings are errors in tests."""
    import torch
    from torch._inductor.compile_fx import _warn_tf32_disabled

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    torch.set_float32_matmul_precision("highest")
    _warn_tf32_disabled.cache_clear()
    _warn_tf32_disabled()
    _warn_tf32_disabled.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="TensorFloat32 tensor cores"):  # else nothing was let through above
            _warn_tf32_disabled()
    _warn_tf32_disabled.cache_clear()
