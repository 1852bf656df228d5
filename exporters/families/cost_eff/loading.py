"""A checkpoint's tensors as the reference model's parameters, and what loading did to them, proven.

Parameters are float32, finite, and sliced to the heads and channels that the sidecar keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from ....bundle.manifest import Proof
from ....elastic import ElasticSpec
from ....errors import CheckpointError
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.own_folder import stored_tensor
from ...universal import step_blocks
from .config import CostEffArchitecture
from .model import CostEffModel, EveryExit

# Of a layer, in float32: sums in another order.
_LIMIT_PER_LAYER = 1e-5


def read_weights(
    checkpoint: Checkpoint, architecture: CostEffArchitecture, spec: ElasticSpec
) -> dict[str, torch.Tensor]:
    """Every parameter by name, in float32. Kept heads and channels stay in ascending order.

    Raises CheckpointError if a value is not finite.
    """
    weights: dict[str, torch.Tensor] = {}
    for name in architecture.parameter_shapes:
        weights[name] = _sliced(stored_tensor(checkpoint, name), name, architecture, spec)
    return weights


def model_of(architecture: CostEffArchitecture, weights: Mapping[str, torch.Tensor]) -> CostEffModel:
    """The model with ``weights``, in eval mode, without gradients."""
    with torch.device("meta"):
        model = CostEffModel(architecture)
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)


def _sliced(data: torch.Tensor, name: str, architecture: CostEffArchitecture, spec: ElasticSpec) -> torch.Tensor:
    for cut in spec.slices_of(name):
        if cut.axis in architecture.kept:
            kept = torch.tensor(architecture.kept[cut.axis])
            data = step_blocks(data, cut)[kept].flatten(0, 1).movedim(0, cut.dim).contiguous()
    return data


def factorise(embedding: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best rank-``rank`` factors ``W1 [V, rank]`` and ``W2 [rank, H]`` of ``embedding [V, H]``, in its dtype.

    With ``embedding = U S V^T``: ``W1 = U_R S_R``, ``W2 = V_R^T``, singular values falling. The product does not
    determine the sign of each pair; it is chosen so that the largest entry of each row of ``W2`` is positive. A
    checkpoint holds ``W1`` as ``embeddings.word_embeddings.weight`` and the transpose of ``W2`` as
    ``embeddings.word_projection.weight``.
    Raises CheckpointError if there is no such rank.
    """
    if not 1 <= rank <= min(embedding.shape):
        raise CheckpointError(
            f"embedding {list(embedding.shape)}: expected a rank of 1..{min(embedding.shape)}, got {rank}"
        )
    left, values, right = torch.linalg.svd(embedding.double(), full_matrices=False)
    w2 = right[:rank]  # [R, H]
    signs = w2.gather(1, w2.abs().argmax(1, keepdim=True)).sign()  # [R, 1]
    w1 = left[:, :rank] * values[:rank] * signs.T  # [V, R]
    return w1.to(embedding.dtype), (w2 * signs).to(embedding.dtype)


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
    loaded = model_of(architecture, read_weights(checkpoint, architecture, loaded_spec))
    weights = read_weights(checkpoint, whole, stored_spec)
    for name, data in weights.items():
        for cut in stored_spec.slices_of(name):
            if cut.axis in architecture.kept:
                blocks = step_blocks(data, cut)
                dropped = torch.ones(len(blocks), dtype=torch.bool)
                dropped[list(architecture.kept[cut.axis])] = False
                blocks[dropped] = 0.0
    stored = model_of(whole, weights)
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
    model = model_of(architecture, read_weights(checkpoint, architecture, spec))
    assert model.embeddings.word_projection is not None
    ids = torch.from_numpy(np.unique(feeds["input_ids"]))
    w1, w2 = (
        stored_tensor(checkpoint, f"embeddings.word_{part}.weight").double() for part in ("embeddings", "projection")
    )
    dense = w1[ids] @ w2.T
    with torch.no_grad():
        found = model.embeddings.word_projection(model.embeddings.word_embeddings(ids)).double()
    scale = max(1.0, float(dense.square().mean().sqrt()))
    yield Proof("load", "factorised embedding", len(ids), float((found - dense).abs().max()) / scale, _LIMIT_PER_LAYER)
