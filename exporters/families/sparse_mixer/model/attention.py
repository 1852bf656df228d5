"""Who may attend to whom in an encoder whose padding is known by the token ids alone."""

from __future__ import annotations

import torch


def attention_mask(input_ids: torch.Tensor, pad: int, like: torch.Tensor) -> torch.Tensor:
    """``input_ids`` [B, S] to [B, 1, S, S] in the dtype of ``like``, added to scores: 0 where neither query nor key is
    ``pad``.

    A finite number elsewhere that takes up every score, so that a pad, which sees nothing, gets the mean of all values
    and not NaN.
    """
    is_token = input_ids != pad
    both = is_token[:, None, :, None] & is_token[:, None, None, :]
    lowest = max(torch.finfo(like.dtype).min, torch.finfo(torch.float32).min)
    return torch.where(both, 0.0, lowest).to(like.dtype)
