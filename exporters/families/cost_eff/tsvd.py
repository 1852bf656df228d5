"""Truncated SVD of a word embedding, for those who make checkpoints: a factorised model is stored factorised."""

from __future__ import annotations

import torch

from ....errors import CheckpointError


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
