"""A training as it stands between two steps, kept in one file so that an interrupted one goes on from there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save

from ...whole_file import write_whole

# AdamW's own names for what it remembers of each weight.
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def save_state(
    path: Path, weights: Mapping[str, torch.nn.Parameter], optimiser: torch.optim.Optimizer, steps: int, seconds: float
) -> None:
    """Writes weights and moments after ``steps`` steps that took ``seconds``. Raises OutputError."""
    tensors = {}
    for name, weight in weights.items():
        tensors[f"weight:{name}"] = weight.detach()
        for moment, value in optimiser.state.get(weight, {}).items():  # none for what no loss has reached
            tensors[f"{moment}:{name}"] = value
    data = save(tensors, {"done": json.dumps([steps, seconds])})
    write_whole(path, lambda stream: stream.write(data), "the training so far")


def load_state(
    path: Path, weights: Mapping[str, torch.nn.Parameter], optimiser: torch.optim.Optimizer
) -> tuple[int, float]:
    """Puts weights and moments back in place; returns steps and seconds. (0, 0.0) where there is no such file."""
    if not path.exists():
        return 0, 0.0
    with safe_open(path, framework="pt") as file:
        known = set(file.keys())
        for name, weight in weights.items():
            weight.data.copy_(file.get_tensor(f"weight:{name}"))
            moments = {moment: f"{moment}:{name}" for moment in _MOMENTS}
            if known.issuperset(moments.values()):
                optimiser.state[weight] = {moment: file.get_tensor(key) for moment, key in moments.items()}
        steps, seconds = json.loads(file.metadata()["done"])
    return steps, seconds
