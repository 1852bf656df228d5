"""What an ordinary checkpoint whose heads share keys would gain of one product for all heads' queries: a whole pass.

Traced models of transformers repeat shared keys and values for every head; forms of MHE attention do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ...bucket import Bucket
from ...exporters.modules.positions import causal_mask
from ..blocks import HiddenStates, block_engine
from ..harness import Row, interleaved, ratio
from ..kept import CACHE
from ..subjects import CORES, default_session

_FOLDER = CACHE / "shared-keys"
# Hidden size, heads, pairs of keys and values, head size: GPT-2's shape with one pair, Gemma 2B's, Llama 3.2 1B's.
_SHAPES = {"one pair of 64": (768, 12, 1, 64), "one pair of 256": (2048, 8, 1, 256), "8 pairs of 64": (2048, 32, 8, 64)}
_ROUNDS, _RUNS = {512: 7, 128: 15}, 5
# Below this a form of its own would not pay.
_WORTH = 1.1


def run() -> list[Row]:
    return [_row(name, tokens) for name in _SHAPES for tokens in _ROUNDS]


def _row(name: str, tokens: int) -> Row:
    x = torch.randn(1, tokens, _SHAPES[name][0], generator=torch.Generator().manual_seed(1)).numpy()
    folder = _FOLDER / f"{name.replace(' ', '-')}-{tokens}"
    calls = {way: _call(SharedKeys(name, way), tokens, x, folder / way) for way in ("repeated", "one product")}
    np.testing.assert_allclose(calls["repeated"](), calls["one product"](), atol=1e-4)
    times = interleaved(calls, _ROUNDS[tokens], _RUNS)
    speed = ratio(times, "repeated", "one product")
    _, heads, pairs, _ = _SHAPES[name]
    return Row(
        f"{heads} heads that share {name}, 1 x {tokens}: one product of their queries over repeated keys",
        f"{speed:.2f}x (best {min(times['one product']):.1f} against {min(times['repeated']):.1f} ms)",
        f"<= {_WORTH}x: nothing to build",
        speed <= _WORTH,
        f"a causal sublayer without rotary positions, {pairs} of {heads} kept; median ratio of {_ROUNDS[tokens]} "
        f"interleaved rounds, default sessions, {CORES} threads",
    )


def _call(block: SharedKeys, tokens: int, x: np.ndarray, folder: Path) -> Callable[[], np.ndarray]:
    session = default_session(block_engine(block, HiddenStates(x.shape[2]), Bucket(1, tokens), folder))
    return partial(_first, session, x)


def _first(session: Any, x: np.ndarray) -> np.ndarray:
    found: np.ndarray = session.run(None, {"x": x})[0]
    return found


class SharedKeys(torch.nn.Module):
    """A sublayer of the shape ``name``: keys ``repeated`` for all heads, or ``one product`` of the queries that share
    them."""

    def __init__(self, name: str, way: str) -> None:
        super().__init__()
        hidden, heads, pairs, self.size = _SHAPES[name]
        self.way, self.shared = way, heads // pairs
        torch.manual_seed(0)
        widths = {"query": heads, "key": pairs, "value": pairs}
        self.projections = torch.nn.ModuleDict(
            {part: torch.nn.Linear(hidden, n * self.size, bias=False) for part, n in widths.items()}
        )
        self.output = torch.nn.Linear(heads * self.size, hidden, bias=False)
        self.eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        """``x`` [1, S, H] to [1, S, H]."""
        tokens, mask = x.shape[1], causal_mask(x.shape[1], x)
        query, key, value = (
            project(x).view(1, tokens, -1, self.size).transpose(1, 2) for project in self.projections.values()
        )  # [1, heads or pairs, S, d]
        if self.way == "repeated":
            key, value = (part.repeat_interleave(self.shared, 1) for part in (key, value))
            context = functional.scaled_dot_product_attention(query, key, value, mask)
        else:
            heads, pairs = query.shape[1], key.shape[1]
            grouped = query.reshape(1, pairs, self.shared * tokens, self.size) * self.size**-0.5
            scores = (grouped @ key.transpose(2, 3)).view(1, heads, tokens, tokens) + mask
            context = (scores.softmax(-1).view(1, pairs, self.shared * tokens, tokens) @ value).view_as(query)
        updated: torch.Tensor = self.output(context.transpose(1, 2).flatten(2))
        return (updated,)
