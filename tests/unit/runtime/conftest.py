from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_cuda import World
from support.fake_gpu import Gpu
from support.fake_tensorrt import host_with_gpu


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with host_with_gpu(tmp_path / "cache") as found:
        yield found


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    found = Gpu()
    yield found
    found.thread.close()
    assert found.allocated_bytes == 0
