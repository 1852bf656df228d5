"""Linear layers that hold others in equal parts one behind the other, such as gate and up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ...errors import ExportError
from ..modules.layers import part_layers
from .dims_rules import Followed, Place
from .slice_proof import NUMBER, SLICE_LIMIT, answers_of, call, copied, difference, owner_of


def in_parts(module: torch.nn.Module, fused: Iterable[Mapping[str, int]], followed: Followed) -> dict[str, int]:
    """The layers of ``fused`` with which in parts the module is the same; of those that are alike one is tried."""
    tried: dict[object, bool] = {}
    found = {}
    for path, count in ((path, count) for each in fused for path, count in each.items()):
        key = (NUMBER.sub("*", path), count, *(tuple(each.shape) for each in module.get_submodule(path).parameters()))
        if key not in tried:
            tried[key] = _is_same_in_parts(module, path, count, followed)
        if tried[key]:
            found[path] = count
    return found


def _is_same_in_parts(module: torch.nn.Module, path: str, count: int, followed: Followed) -> bool:
    """Whether what calls the layer ``path`` answers alike with it in so many parts: it may look at the layer itself."""
    owner = owner_of(module, path.rpartition(".")[0], followed)
    part = module.get_submodule(owner)
    try:
        drawn, args, kwargs, whole = call(part, owner, followed)
        parted = copied(part, drawn, {name: drawn[id(parameter)] for name, parameter in part.named_parameters()})
        part_layers(parted, {path.removeprefix(f"{owner}."): count})
        return difference(whole, answers_of(parted, args, kwargs)) <= SLICE_LIMIT
    except ExportError:
        return False


def fused_in(behind: Mapping[Place, int], module: torch.nn.Module) -> dict[str, int]:
    """The linear layers that hold these places in so many parts; none where one of the places is no row of such."""
    layers = {parameter.rpartition(".")[0]: count for (parameter, _), count in behind.items()}
    rows = all(count and not dim for (_, dim), count in behind.items())
    return layers if rows and all(_is_plain(module, path) for path in layers) else {}


def _is_plain(module: torch.nn.Module, path: str) -> bool:
    """Whether a linear layer computes what its class does, and it and its parameters have this one name."""
    layer = module.get_submodule(path)
    hooks = (*layer._forward_hooks, *layer._forward_pre_hooks)
    if type(layer) is not torch.nn.Linear or hooks or "forward" in vars(layer):
        return False
    parts = [part for _, part in module.named_modules(remove_duplicate=False)]
    every = [id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)]
    is_own = all(every.count(id(parameter)) == 1 for parameter in layer.parameters())
    return is_own and sum(part is layer for part in parts) == 1
