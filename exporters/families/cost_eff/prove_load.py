"""What loading did to a multi-exit model's weights, proven: kept heads and channels, and the factorised lookup."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from safetensors import safe_open

from ....bundle.manifest import Proof
from ....elastic import ElasticSpec
from ...checkpoints.checkpoint import Checkpoint
from ...ranking import step_blocks
from .architecture import CostEffArchitecture
from .model import CostEffModel
from .segment_modules import EveryExit
from .weights import read_weights

# Of a layer, in float32: sums in another order.
_LIMIT_PER_LAYER = 1e-5


def prove_kept(
    checkpoint: Checkpoint,
    architecture: CostEffArchitecture,
    specs: tuple[ElasticSpec, ElasticSpec],
    feeds: Mapping[str, np.ndarray],
) -> Iterator[Proof]:
    """The loaded model equals the stored one with everything that is not kept set to zero; none without kept maps.

    ``specs`` are those of the loaded and of the stored model.
    """
    if not architecture.kept:
        return
    whole = replace(architecture, layers=architecture.stored, kept={})
    loaded_spec, stored_spec = specs
    loaded = _model(architecture, read_weights(checkpoint, architecture, loaded_spec))
    weights = read_weights(checkpoint, whole, stored_spec)
    for name, data in weights.items():
        for cut in stored_spec.slices_of(name):
            if cut.axis in architecture.kept:
                blocks = step_blocks(data, cut)
                dropped = torch.ones(len(blocks), dtype=torch.bool)
                dropped[list(architecture.kept[cut.axis])] = False
                blocks[dropped] = 0.0
    stored = _model(whole, weights)
    layers = architecture.exits.layers
    with torch.no_grad():
        inputs = [torch.from_numpy(np.asarray(array)) for array in feeds.values()]
        pairs = list(zip(*(EveryExit(m, layers, layers[-1])(*inputs) for m in (stored, loaded)), strict=True))
    figures = [float((a - b).abs().max()) / max(1.0, float(a.square().mean().sqrt())) for a, b in pairs]
    yield Proof(
        "load",
        "kept heads and channels",
        len(pairs),
        float(np.max(figures)),
        _LIMIT_PER_LAYER * len(architecture.layers),
    )


def prove_factors(
    checkpoint: Checkpoint, architecture: CostEffArchitecture, spec: ElasticSpec, feeds: Mapping[str, np.ndarray]
) -> Iterator[Proof]:
    """A lookup in the loaded model equals the rows of the stored factors' product; none for a dense embedding."""
    if architecture.rank is None:
        return
    model = _model(architecture, read_weights(checkpoint, architecture, spec))
    assert model.embeddings.word_projection is not None
    ids = torch.from_numpy(np.unique(feeds["input_ids"]))
    w1, w2 = (_stored(checkpoint, f"embeddings.word_{part}.weight") for part in ("embeddings", "projection"))
    dense = w1[ids] @ w2.T
    with torch.no_grad():
        found = model.embeddings.word_projection(model.embeddings.word_embeddings(ids)).double()
    scale = max(1.0, float(dense.square().mean().sqrt()))
    yield Proof("load", "factorised embedding", len(ids), float((found - dense).abs().max()) / scale, _LIMIT_PER_LAYER)


def _stored(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    with safe_open(checkpoint.folder / checkpoint.tensors[name].file, framework="pt") as tensors:
        stored: torch.Tensor = tensors.get_tensor(name).double()
    return stored


def _model(architecture: CostEffArchitecture, weights: Mapping[str, torch.Tensor]) -> CostEffModel:
    with torch.device("meta"):
        model = CostEffModel(architecture)
    model.load_state_dict(weights, assign=True)
    return model.eval()
