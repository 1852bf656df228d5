"""A checkpoint's tensors as the reference model's parameters, and what loading did to them, proven.

Parameters are float32, finite, and sliced to the heads and channels that the sidecar keeps.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from ....bundle.manifest import Proof
from ....errors import CheckpointError
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.own_folder import stored_tensor, tensor_as_stored
from ...universal import permuted_steps, step_blocks
from .config import CostEffArchitecture
from .model import CostEffModel, EveryExit

# Error of one layer in float32: sums in another order.
_LIMIT_PER_LAYER = 1e-5


def read_weights(checkpoint: Checkpoint, architecture: CostEffArchitecture) -> dict[str, torch.Tensor]:
    """Every parameter by name, in float32. Kept heads and channels stay in ascending order.

    Raises CheckpointError if a value is not finite.
    """
    parameters = architecture.parameters
    weights = {name: stored_tensor(checkpoint, name) for name in parameters.shapes}
    for cut in parameters.slices:
        if cut.axis in architecture.kept:
            kept = torch.tensor(architecture.kept[cut.axis])
            weights[cut.parameter] = permuted_steps(weights[cut.parameter], cut, kept)
    return weights


def model_of(architecture: CostEffArchitecture, weights: Mapping[str, torch.Tensor]) -> CostEffModel:
    """The model with ``weights``, in eval mode, without gradients."""
    with torch.device("meta"):
        model = CostEffModel(architecture)
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)


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


def prove_load(
    checkpoint: Checkpoint, architecture: CostEffArchitecture, feeds: Mapping[str, np.ndarray]
) -> Iterator[Proof]:
    """The loaded model equals the stored one with everything that is not kept set to zero, where there are kept maps;
    a lookup in it equals the rows of the stored factors' product, where the embedding is factorised."""
    loaded = model_of(architecture, read_weights(checkpoint, architecture))
    if architecture.kept:
        layers = architecture.exits.layers
        with torch.no_grad():
            inputs = [torch.from_numpy(np.asarray(array)) for array in feeds.values()]
            models = (_zeroed(checkpoint, architecture), loaded)
            pairs = list(zip(*(EveryExit(model, layers, layers[-1])(*inputs) for model in models), strict=True))
        worst = max(_difference(found, expected) for expected, found in pairs)
        limit = _LIMIT_PER_LAYER * len(architecture.layers)
        yield Proof("load", "kept heads and channels", len(pairs), worst, limit)
    if loaded.embeddings.word_projection is not None:
        ids = torch.from_numpy(np.unique(feeds["input_ids"]))
        w1, w2 = (  # without what the loader makes of them
            tensor_as_stored(checkpoint, f"embeddings.word_{part}.weight").double()
            for part in ("embeddings", "projection")
        )
        with torch.no_grad():
            found = loaded.embeddings.word_projection(loaded.embeddings.word_embeddings(ids)).double()
        yield Proof("load", "factorised embedding", len(ids), _difference(found, w1[ids] @ w2.T), _LIMIT_PER_LAYER)


def _zeroed(checkpoint: Checkpoint, architecture: CostEffArchitecture) -> CostEffModel:
    """The stored model with all that is not kept set to zero."""
    whole = replace(architecture, layers=architecture.stored, kept={})
    weights = read_weights(checkpoint, whole)
    for cut in whole.parameters.slices:
        if cut.axis in architecture.kept:
            blocks = step_blocks(weights[cut.parameter], cut)
            dropped = torch.ones(len(blocks), dtype=torch.bool)
            dropped[list(architecture.kept[cut.axis])] = False
            blocks[dropped] = 0.0
    return model_of(whole, weights)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, in root mean squares of what is ``expected``, or in ones where those are smaller."""
    return float((found - expected).abs().max()) / max(1.0, float(expected.square().mean().sqrt()))
