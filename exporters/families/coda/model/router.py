"""Which k tokens of each row a conditional layer computes, and how much of what it computes they get.

Shapes: ``B`` rows of ``n`` tokens, ``d`` hidden, ``k`` tokens that are selected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ....modules.top_tokens import highest
from ..architecture.config import CodaConfig
from .soft_top_k import soft_top_k

# The score of padding: below every token's and finite, so that a row of nothing but padding gives no NaN.
_SCORE_OF_PADDING = -1e9


@dataclass(frozen=True)
class Selection:
    """The tokens of one layer in one pass.

    ``ranked`` [B, n] is what the choice compares. ``own`` [B, k] are the tokens that the router chooses, by falling
    rank, ``chosen`` those that were computed: the same unless others were given. ``gates`` [B, k] are those of
    ``chosen``, 0 for padding.
    """

    ranked: torch.Tensor
    own: torch.Tensor
    chosen: torch.Tensor
    gates: torch.Tensor


class Router(torch.nn.Module):
    """``weight`` [d], of routers that compare scores; in float32 or wider, whatever the rest computes in. A soft top-k
    has its ``temperatures`` beside it, which tasks on one frozen model differ in.

    ``choose(scores, k)`` gives the places of the highest.
    """

    choose: Callable[[torch.Tensor, int], torch.Tensor]
    temperatures: torch.Tensor

    def __init__(self, config: CodaConfig) -> None:
        super().__init__()
        self.config = config
        self.choose = highest
        if config.has_scores:
            self.weight = torch.nn.Parameter(torch.empty(config.hidden_size))
        schedule = config.soft_top_k
        if schedule is not None:  # [rounds + 1]; values even where parameters are built without any
            values = torch.tensor(schedule.all_temperatures, dtype=torch.float32, device="cpu")
            self.register_buffer("temperatures", values, persistent=False)

    def forward(
        self, normed: torch.Tensor, is_token: torch.Tensor | None, count: int, given: torch.Tensor | None = None
    ) -> Selection:
        """The ``count`` tokens of ``normed`` [B, n, d], of which ``is_token`` [B, n] says what is no padding (None:
        nothing is); ``given`` [B, k] replaces the router's own."""
        if self.config.route_padding:
            is_token = None
        if not self.config.has_scores:
            return self._first(normed, is_token, count)
        dtype = torch.promote_types(normed.dtype, torch.float32)
        # By a matrix of one column: ONNX Runtime takes ten times as long for a product with a vector.
        scores = (normed.to(dtype) @ self.weight.to(dtype)[:, None])[..., 0]  # [B, n]
        if is_token is not None:
            scores = torch.where(is_token, scores, _SCORE_OF_PADDING)
        schedule = self.config.soft_top_k
        gates = scores.sigmoid() if schedule is None else soft_top_k(scores, count, schedule, self.temperatures)
        if is_token is not None:
            gates = gates * is_token.to(dtype)
        ranked = scores if self.config.selected_by == "scores" else gates
        own = self.choose(ranked, count)
        chosen = own if given is None else given
        return Selection(ranked, own, chosen, gates.gather(-1, chosen).to(normed.dtype))

    def _first(self, normed: torch.Tensor, is_token: torch.Tensor | None, count: int) -> Selection:
        """The first ``count`` tokens of each row, then padding, wherever that stands."""
        rows, tokens = normed.shape[:2]
        if is_token is None:
            places = torch.arange(count, device=normed.device).expand(rows, count)
            gates = torch.ones_like(normed[..., 0])  # [B, n]
            return Selection(gates, places, places, gates[:, :count])
        place = torch.arange(tokens, dtype=torch.float32, device=normed.device)
        ranked = torch.where(is_token, -place, -place - tokens)  # [B, n], no two alike
        own = self.choose(ranked, count)
        return Selection(ranked, own, own, is_token.to(normed.dtype).gather(-1, own))
