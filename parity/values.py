"""Values inside, of both sides: inputs and outputs of every module of a model in the order in which they run; what an
export computes on a wrong case, and which of it comes nearest to another value."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import InputError
from ..runtime.inputs.arrays import Array
from .cases import Trial
from .export import Value
from .match import Match
from .model import WRAPPER, Model
from .steps import Pair
from .verdict import Rule

_NUDGE = 0.3  # of its size


@dataclass(frozen=True)
class Event:
    """One value that goes ``in`` or comes ``out`` of ``module`` the ``nth`` time that it runs."""

    module: str
    side: str
    nth: int = 0

    @property
    def owner(self) -> str:
        """The module whose own computation made it: of what goes in the one around."""
        return self.module if self.side == "out" else self.module.rpartition(".")[0] or self.module

    def __str__(self) -> str:
        return self.module if self.side == "out" else f"before {self.module}"


def values_of(
    model: Model,
    run: Callable[[], dict[str, Array]],
    nudge: Event | None = None,
    only: Collection[Event] | None = None,
) -> tuple[dict[Event, Array], dict[str, Array]]:
    """The first float value of each input and output of modules in ``run``, a pass of the model, in their order and
    ``only`` some of them, and what it returns; with the value of ``nudge`` moved."""
    found: dict[Event, Array] = {}
    counts: dict[tuple[str, str], int] = {}

    def seen(name: str, side: str, value: Any) -> Any:
        """The value with what ``nudge`` puts in its place; None where it stays."""
        leaves, form = tree_flatten(value)
        floats = (n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
        if (place := next(floats, None)) is None:
            return None
        nth = counts.get((name, side), 0)
        counts[name, side] = nth + 1
        event = Event(name, side, nth)
        if only is None or event in only:
            found[event] = leaves[place].detach().numpy().copy()
        if event != nudge:
            return None
        leaves[place] = _moved(leaves[place])
        return tree_unflatten(leaves, form)

    hooks = []
    for path, part in model.module.named_modules():
        if not path or path == WRAPPER[:-1]:
            continue
        name = path.removeprefix(WRAPPER)
        given = lambda _m, args, kwargs, name=name: seen(name, "in", (args, kwargs))  # noqa: E731
        hooks.append(part.register_forward_pre_hook(given, with_kwargs=True))
        hooks.append(part.register_forward_hook(lambda _m, _i, out, name=name: seen(name, "out", out)))
    try:
        answers = run()
    finally:
        for hook in hooks:
            hook.remove()
    return found, answers


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.abs().mean().clamp(min=1e-3)
    noise = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0)) - 0.5
    return tensor + _NUDGE * size * noise.to(tensor.dtype)


class Found:
    """``values`` are none where the kind of export shows none, else those of as many numbers as ``sizes`` say."""

    def __init__(self, pair: Pair, rule: Rule, outputs: Sequence[Match], trial: Trial, sizes: Collection[int]) -> None:
        self.pair, self.model, self.rule, self.trial = pair, pair.model, rule, trial
        feeds = pair.feeds(trial)
        try:
            shown = pair.export.values(feeds, sizes)
        except InputError:  # a graph that runs as a whole alone
            shown = []
        given = [Value(name, name, "input", None, array) for name, array in feeds.items() if array.dtype.kind == "f"]
        self.values = [value for value in [*given, *shown] if np.isfinite(value.array).all()]
        answers = pair.export.run(feeds)
        self.answers = {match.model: trial.counted(answers[match.name], match.model) for match in outputs}

        self._laid_out: dict[tuple[tuple[int, ...], bool], list[tuple[Value, Array]]] = {}

    def nearest(self, wanted: Array, name: str, claimed: Collection[str] = ()) -> tuple[Value, Array] | None:
        """The export's value that comes nearest to ``wanted``, of the module ``name``, and its numbers in that shape;
        none that is ``claimed``, by name."""
        shape, counted = wanted.shape, self.trial.counted
        key = shape, self.trial.hides(name)
        if key not in self._laid_out:
            alike = [value for value in self.values if value.array.size == wanted.size and wanted.size]
            arrays = [counted(each.array.reshape(shape), name).astype(np.float32, copy=False) for each in alike]
            self._laid_out[key] = list(zip(alike, arrays, strict=True))
        exact = wanted.astype(np.float32)
        free = [pair for pair in self._laid_out[key] if pair[0].name not in claimed]
        best = min(free, key=lambda pair: float(np.linalg.norm((pair[1] - exact).reshape(-1))), default=None)
        return None if best is None else (best[0], best[1].astype(np.float64))
