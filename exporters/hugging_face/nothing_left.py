"""A pass of a model that leaves nothing in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def nothing_left(model: torch.nn.Module) -> Iterator[None]:
    """After it the parts of ``model`` have the attributes and buffers that they had: what a pass without numbers or a
    trace leaves there, as ``longrope`` leaves its frequencies, would be taken for numbers by the next."""
    held = [own for part in model.modules() for own in (vars(part), part._buffers)]
    before = [dict(own) for own in held]
    try:
        yield
    finally:
        for own, kept in zip(held, before, strict=True):
            for name in [name for name in own if name not in kept]:
                del own[name]
            own.update(kept)
