"""A module of the user's in the place of a model folder (no torch here)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...bundle.entries.tensor_spec import TensorSpec
from ...bundle.manifest import FileEntry
from ..checkpoints.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch

MODEL_TYPE = "torch.nn.Module"


@dataclass(frozen=True, eq=False, init=False)
class ModuleInMemory(Checkpoint):
    """The ``module``, which stays as it is, and what its ``forward`` takes, by the names that it has there. It runs on
    sequences of ``length``, where inputs have one."""

    module: torch.nn.Module = field(init=False)
    inputs: tuple[TensorSpec, ...] = field(init=False)
    length: int = field(init=False)

    def __init__(self, module: torch.nn.Module, inputs: tuple[TensorSpec, ...], length: int) -> None:
        name = type(module).__name__
        super().__init__(Path(f"torch.nn.Module {name}"), {"model_type": MODEL_TYPE, "_name_or_path": name}, {})
        object.__setattr__(self, "module", module)
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "length", length)

    @property
    def stated_in(self) -> str:
        return "model"

    def source_files(self) -> list[Path]:
        return []

    @cached_property
    def entry(self) -> FileEntry:
        """Bytes and hash of its parameters and buffers: of each, in order, a line with name, type and shape, then its
        bytes."""
        digest, total = hashlib.sha256(), 0
        for name, tensor in chain(self.module.named_parameters(), self.module.named_buffers()):
            data: Any = tensor.detach().cpu().contiguous()
            digest.update(f"{name} {str(data.dtype).removeprefix('torch.')} {list(data.shape)}\n".encode())
            digest.update(_bytes(data))
            total += data.nbytes
        return FileEntry(self.name, total, digest.hexdigest())


def _bytes(tensor: Any) -> memoryview:
    import torch

    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
