"""Inputs and outputs of every module of a model, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.inputs.arrays import Array, Arrays
from .model import WRAPPER, Model

_NUDGE = 0.3  # of its size


@dataclass(frozen=True)
class Event:
    """One value that goes ``in`` or comes ``out`` of ``module`` the ``nth`` time that it runs."""

    module: str
    side: str
    nth: int = 0

    @property
    def parent(self) -> str:
        """The module whose own computation made what goes in."""
        return self.module.rpartition(".")[0] or self.module

    def __str__(self) -> str:
        return self.module if self.side == "out" else f"before {self.module}"


class Recorder:
    """Watches the modules of one model; the wrapper of a transformers model is left out of their names."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def watch(self, feeds: Arrays, nudge: Event | None = None) -> tuple[dict[Event, Array], dict[str, Array]]:
        """Values by event in the order of a pass in float32, and what it returns; with the value of ``nudge`` moved."""
        found: dict[Event, Array] = {}
        answers = self._watched(self._model.module, found, nudge, lambda: self._model.answer(feeds))
        return found, answers

    def watch_wide(self, wide: Any, feeds: Arrays) -> dict[Event, Array]:
        """Values of a pass in float64, made by the function that ``Model.wide`` yields."""
        found: dict[Event, Array] = {}
        self._watched(wide.module, found, None, lambda: wide(feeds))
        return found

    def _watched(
        self,
        module: torch.nn.Module,
        found: dict[Event, Array],
        nudge: Event | None,
        run: Callable[[], dict[str, Array]],
    ) -> dict[str, Array]:
        counts: dict[tuple[str, str], int] = {}

        def keep(name: str, side: str, value: Any) -> Any:
            """The value with what ``nudge`` puts in its place; None where it stays."""
            tensor = _first(value)
            if tensor is None:
                return None
            nth = counts.get((name, side), 0)
            counts[name, side] = nth + 1
            event = Event(name, side, nth)
            found[event] = tensor.detach().numpy().copy()
            return _replaced(value, tensor, _moved(tensor)) if event == nudge else None

        hooks = []
        for path, part in module.named_modules():
            if not path or (name := readable(path)) == "":
                continue
            hooks.append(
                part.register_forward_pre_hook(
                    lambda _m, args, kwargs, name=name: _given(
                        keep(name, "in", (*args, *kwargs.values())), args, kwargs
                    ),
                    with_kwargs=True,
                )
            )
            hooks.append(part.register_forward_hook(lambda _m, _i, out, name=name: keep(name, "out", out)))
        try:
            return run()
        finally:
            for hook in hooks:
                hook.remove()


def readable(path: str) -> str:
    """A module's name without the wrapper's own part; empty for the wrapped model itself."""
    return "" if path == WRAPPER[:-1] else path.removeprefix(WRAPPER)


def _given(moved: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if moved is None:
        return None
    return tuple(moved[: len(args)]), dict(zip(kwargs, moved[len(args) :], strict=True))


def _first(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value if value.is_floating_point() else None
    each = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return next((one for one in each if isinstance(one, torch.Tensor) and one.is_floating_point()), None)


def _replaced(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    if value is old:
        return new
    if isinstance(value, Mapping):
        for key, each in value.items():
            if each is old:
                value[key] = new  # type: ignore[index]  # an output of transformers, which is one
                break
        return value
    return type(value)(new if each is old else each for each in value)


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.abs().mean().clamp(min=1e-3)
    noise = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0)) - 0.5
    return tensor + _NUDGE * size * noise.to(tensor.dtype)
