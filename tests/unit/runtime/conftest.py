from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_cuda import World
from support.fake_tensorrt import host_with_gpu


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with host_with_gpu(tmp_path / "cache") as found:
        yield found
