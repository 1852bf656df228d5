"""Trainings in tests are tiny."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower on several threads, and on a busy machine slower by far."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def stdlib(tmp_path: Path) -> Path:
    """Forty modules of some hundred bytes each, no two alike."""
    folder = tmp_path / "python"
    folder.mkdir()
    for number in range(40):
        lines = (f"def function_{number}_{line}(argument_one, argument_two):" for line in range(8))
        (folder / f"module{number}.py").write_text("\n    pass\n\n".join(lines))
    return folder
