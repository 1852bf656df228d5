"""Tasks on the tiny encoder with conditional adapters: folders as training would leave them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from nestforge.exporters.checkpoints.own_folder import save_model
from nestforge.exporters.families.coda.model import CodaEncoder, load_model
from nestforge.exporters.families.coda.ops import is_of_task
from nestforge.exporters.families.coda.tasks import save_task

# One conditional layer of two, and a reduction: as few engines as show everything.
SETTINGS: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_labels": 3, "conditional_layers": (1,)}


def trained(base: Path, folder: Path, seed: int, **changes: Any) -> Path:
    """A whole checkpoint of another task on the frozen weights of ``base``; ``epsilon`` is its schedule's."""
    found = load_model(base)
    epsilon = changes.pop("epsilon", None)
    if epsilon is not None:
        changes["soft_top_k"] = replace(found.config.soft_top_k, epsilon=epsilon)  # type: ignore[type-var]
    config = replace(found.config, **changes)
    model = CodaEncoder(config)
    model.load_state_dict(found.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if is_of_task(name):
            parameter.data = parameter.data + torch.randn(parameter.shape, generator=generator) * 0.2
    return save_model(model, config, folder)


def save_tiny_task(base: Path, folder: Path, seed: int, **changes: Any) -> Path:
    """The same as a task's folder; the whole checkpoint lies beside it, with ``.trained`` behind its name."""
    return save_task(trained(base, folder.with_suffix(".trained"), seed, **changes), base, folder)
