"""The weights that an export stores, beside the model's: which it does not have, and which tokens those concern."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..profiles.precision import Precision
from ..runtime.inputs.arrays import Array, Arrays
from .export import Export
from .model import Model

# Weights: the same, of a later or earlier training.
_SAME, _RELATED = 1e-6, 0.5
_SAMPLES, _SMALLEST = 16384, 256
_FEW = 0.1  # of a table's rows
# By precision how far a row may be off where it is stored rightly, of its size; integers share scales.
_ROUNDED: dict[Precision, float] = {"fp32": _SAME, "fp16": 2e-3, "bf16": 2e-2}


@dataclass(frozen=True)
class Lost:
    """``module`` has a weight that the export does not have, and what that looks like: ``parameter`` is ``stored``
    there; none where most weights are others."""

    module: str
    words: str
    parameter: torch.nn.Parameter | None = None
    stored: Array | None = None


def changed_tokens(export: Export, model: Model) -> Array:
    """Tokens whose rows of a table, ``[vocabulary, size]``, the export stores otherwise: the few that random cases
    would miss. None where most rows differ, as those of another table do, or where none can be told."""
    limit = _ROUNDED.get(export.precision)
    parts = [part for part in model.module.modules() if isinstance(part, torch.nn.Embedding)]
    tables = {id(part.weight): part.weight for part in parts if part.num_embeddings == model.facts.vocabulary}
    found = [np.zeros(0, np.int64)]
    for table in tables.values() if limit is not None else ():
        own = table.detach().numpy()
        for stored in export.weights(own.size).values():
            for each in _turned(stored, own.shape):
                changed = np.linalg.norm(each - own, axis=1) > limit * np.linalg.norm(own, axis=1).clip(1e-12)
                found += [np.flatnonzero(changed)] if changed.mean() < _FEW else []
    return np.unique(np.concatenate(found))


def audit(export: Export, model: Model) -> Lost | None:
    """The first weight of the model that the export does not have; None where all are there, or none can be told."""
    if export.precision != "fp32":
        return None
    parameters = {
        name.removeprefix("model."): parameter
        for name, parameter in model.module.named_parameters()
        if parameter.numel() >= _SMALLEST and parameter.dim() > 1
    }
    stored = export.weights()
    nearest = {name: _nearest(parameter.detach().numpy(), stored) for name, parameter in parameters.items()}
    found = {name: pair for name, pair in nearest.items() if pair is not None}
    lost = {name: off for name, (off, _) in found.items() if off > _SAME}
    if not lost or len(found) < 2:
        return None
    first = next(iter(lost))
    module, parameter, array = first.rpartition(".")[0], parameters[first], found[first][1]
    if len(lost) > 0.6 * len(found):
        is_related = float(np.median(list(lost.values()))) < _RELATED
        words = "a stale revision: close to these, not equal" if is_related else "another checkpoint"
        return Lost(module, f"weights of {words}")
    for kind, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if _off(parameter.detach().to(dtype).float().numpy(), array) <= _SAME:
            return Lost(module, f"a weight that is narrowed to {kind}", parameter, array)
    own = parameter.detach().numpy()
    rows = int((np.abs(own - array).reshape(len(own), -1).max(1) > 0).sum())
    if rows < _FEW * len(own):
        return Lost(module, f"{rows} of {len(own)} rows of a weight that are not the model's", parameter, array)
    off = lost[first]
    words = f"a weight of a stale revision: off by {off:.2g} of its size"
    return Lost(module, words, parameter, array) if off < _RELATED else None


def _turned(stored: Array, shape: tuple[int, ...]) -> Iterator[Array]:
    """``stored`` as a weight of this shape, as it is and transposed."""
    for array in (stored, stored.T):
        if array.shape == shape:
            yield array


def _nearest(own: Array, stored: Arrays) -> tuple[float, Array] | None:
    """The stored weight that is nearest to ``own``, chosen by a sample, and how far it is, of the size of ``own``."""
    step = max(1, own.size // _SAMPLES)
    each = [array for one in stored.values() if one.size == own.size for array in _turned(one, own.shape)]
    if not each:
        return None
    best = min(each, key=lambda array: _off(own.reshape(-1)[::step], array.reshape(-1)[::step]))
    return _off(own, best), best


def _off(own: Array, stored: Array) -> float:
    return float(np.linalg.norm(own - stored)) / max(float(np.linalg.norm(own)), 1e-12)
