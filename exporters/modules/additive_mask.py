"""Which keys a query sees, as numbers that are added to attention's scores."""

from __future__ import annotations

import torch


def additive_mask(is_seen: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``is_seen`` (bool, any shape) to the same shape in the dtype of ``like``: 0 where a key is seen.

    The lowest finite number of float32, or of a narrower ``like``, elsewhere: it takes up every score. Not minus
    infinity, so that a query that sees nothing gets the mean of all values and no graph needs a guard against NaN.
    """
    lowest = max(torch.finfo(like.dtype).min, torch.finfo(torch.float32).min)
    return torch.where(is_seen, 0.0, lowest).to(like.dtype)
