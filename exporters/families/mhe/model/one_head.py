"""Attention of heads that share keys and values, by the operator of ONNX Runtime that never writes scores to memory.

``com.microsoft::MultiHeadAttention`` does so on a processor where it is given neither mask nor bias: blocks of queries
meet blocks of keys in the caches of a core (FlashAttention, arXiv 2205.14135). Where heads share keys, the queries of
all heads are rows of one head. A mask of keys is a dimension more of queries, 1, and of keys, what is added to their
scores. Shapes as in attention.py.
"""

from __future__ import annotations

import torch

_OPERATOR, _FLOAT = "com.microsoft::MultiHeadAttention", 1


def attend_as_one_head(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """What ``query`` [B, S, n, d], with the softmax scale in it or in ``key`` [B, N, d], reads of ``value`` [B, N, d]:
    [B, S, n, d]. With a ``mask`` [B, 1, 1, N] queries have a 1 behind their numbers, [B, S, n, d + 1]."""
    rows = query.flatten(1, 2)  # [B, S * n, d] or [B, S * n, d + 1]
    if mask is not None:
        key = torch.cat((key, mask[:, 0].transpose(1, 2)), 2)
    if torch.compiler.is_exporting():
        context = torch.onnx.ops.symbolic(
            _OPERATOR,
            [rows, key, value],
            {"num_heads": 1, "scale": 1.0},
            dtype=_FLOAT,
            shape=(*rows.shape[:2], value.shape[2]),
            version=1,
        )
    else:
        context = (rows @ key.transpose(1, 2)).softmax(-1) @ value
    return context.view(*query.shape[:3], value.shape[2])
