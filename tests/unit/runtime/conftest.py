from collections.abc import Iterator
from pathlib import Path

import pytest
from nestforge.bundle.open_bundle import Bundle, open_bundle
from support.fake_cuda import World
from support.fake_tensorrt import host_with_gpu


@pytest.fixture
def bundle(tiny_bundle: Path) -> Bundle:
    return open_bundle(tiny_bundle)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with host_with_gpu(tmp_path / "cache") as found:
        yield found
