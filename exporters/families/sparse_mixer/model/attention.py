"""Who may attend to whom in an encoder whose padding is known by the token ids alone."""

from __future__ import annotations

import torch

from ....modules.attention import additive_mask


def attention_mask(input_ids: torch.Tensor, pad: int, like: torch.Tensor) -> torch.Tensor:
    """``input_ids`` [B, S] to [B, 1, S, S] in the dtype of ``like``, added to scores: 0 where neither query nor key is
    ``pad``; a pad sees nothing.
    """
    is_token = input_ids != pad
    both = is_token[:, None, :, None] & is_token[:, None, None, :]
    return additive_mask(both, like)
