"""The weights that an export stores, beside the model's: which it does not have, and which tokens those concern."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ..compiler.graph.encodings import DTYPES
from ..profiles.precision import FP32, HALF_ENCODINGS, PRECISIONS, TRACED, Precision
from ..runtime.inputs.arrays import Array
from .export import Export
from .model import WRAPPER, Model

# Weights: the same, of a later or earlier training.
_SAME, _RELATED = 1e-6, 0.5
_SAMPLES, _SMALLEST = 16384, 256
_AT_ONCE = 2**18  # numbers
_FEW, _MOST = 0.1, 0.6  # of a table's rows; of all weights


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
    limit = _rounded(export.precision)
    parts = [part for part in model.module.modules() if isinstance(part, torch.nn.Embedding)]
    tables = {id(part.weight): part.weight for part in parts if part.num_embeddings == model.facts.vocabulary}
    found = [np.zeros(0, np.int64)]
    for table in tables.values() if limit is not None else ():
        own = table.detach().numpy()
        for stored in _turned(export, own.size):
            if stored.shape == own.shape:
                changed = _sizes(own, stored) > limit * _sizes(own).clip(1e-12)
                found += [np.flatnonzero(changed)] if changed.mean() < _FEW else []
    return np.unique(np.concatenate(found))


def _rounded(precision: Precision) -> float | None:
    """How far a row may be off where it is stored rightly, of its size; None of integers, which share scales."""
    stored = PRECISIONS[precision].encoding
    if stored in HALF_ENCODINGS:
        return 2 * torch.finfo(getattr(torch, DTYPES[stored].name)).eps
    return _SAME if stored == FP32 else None


def audit(export: Export, model: Model, ran: Collection[str]) -> Lost | None:
    """The first weight of the modules that ``ran`` which the export does not have; None where all are there, or none
    can be told."""
    if export.precision != TRACED:
        return None
    parameters = {
        name.removeprefix(WRAPPER): parameter
        for name, parameter in model.module.named_parameters()
        if parameter.numel() >= _SMALLEST and parameter.dim() > 1 and _module(name) in ran
    }
    found = _nearest({name: parameter.detach().numpy() for name, parameter in parameters.items()}, export)
    lost = {name: off for name, (off, _) in found.items() if off > _SAME}
    if not lost or len(found) < 2:
        return None
    first = next(iter(lost))
    module, parameter, off = _module(first), parameters[first], lost[first]
    if len(lost) > _MOST * len(found):
        is_related = float(np.median(list(lost.values()))) < _RELATED
        words = "a stale revision: close to these, not equal" if is_related else "another checkpoint"
        return Lost(module, f"weights of {words}")
    own = parameter.detach().numpy()
    array = next(each for place, each in enumerate(_turned(export, own.size)) if place == found[first][1])
    for kind, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if _off(parameter.detach().to(dtype).float().numpy(), array) <= _SAME:
            return Lost(module, f"a weight that is narrowed to {kind}", parameter, array)
    rows = int((own != array).reshape(len(own), -1).any(1).sum())
    if rows < _FEW * len(own):
        return Lost(module, f"{rows} of {len(own)} rows of a weight that are not the model's", parameter, array)
    words = "a weight of a stale revision" if off < _RELATED else "another weight"
    return Lost(module, f"{words}: off by {off:.2g} of its size", parameter, array)


def _module(parameter: str) -> str:
    return parameter.removeprefix(WRAPPER).rpartition(".")[0]


def _turned(export: Export, size: int) -> Iterator[Array]:
    """The weights of so many numbers, each as it is stored and transposed."""
    for stored in export.weights(size):
        yield from (stored, stored.T)


def _nearest(parameters: Mapping[str, Array], export: Export) -> dict[str, tuple[float, int]]:
    """How far from each parameter, of its size, the nearest stored weight of its shape is, and which that is; chosen by
    a sample. One stored weight is in memory at a time."""
    best: dict[str, tuple[float, int]] = {}
    for size in {own.size for own in parameters.values()}:
        step = slice(None, None, max(1, size // _SAMPLES))
        same = {name: own for name, own in parameters.items() if own.size == size}
        for place, array in enumerate(_turned(export, size)):
            for name, own in same.items():
                if own.shape == array.shape:
                    off = _off(own.reshape(-1)[step], array.flat[step])
                    best[name] = min(best.get(name, (np.inf, 0)), (off, place))
        for place, array in enumerate(_turned(export, size)):
            best |= {name: (_off(same[name], array), place) for name in same if best.get(name, (0, -1))[1] == place}
    return {name: best[name] for name in parameters if name in best}


def _off(own: Array, stored: Array) -> float:
    return float(np.linalg.norm(_sizes(own, stored))) / max(float(np.linalg.norm(_sizes(own))), 1e-12)


def _sizes(own: Array, stored: Array | None = None) -> Array:
    """Norms of the rows of ``own``, or of what ``stored`` is off by, without a copy of either."""
    step = max(1, _AT_ONCE * len(own) // max(1, own.size))
    rows = (slice(start, start + step) for start in range(0, len(own), step))
    parts = (own[some] if stored is None else own[some] - stored[some] for some in rows)
    return np.concatenate([np.linalg.norm(part.reshape(len(part), -1), axis=1) for part in parts])
