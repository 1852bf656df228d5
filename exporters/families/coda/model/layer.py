"""One layer: a frozen Transformer layer of which some tokens, or all, pass through, and an adapter for all.

Equations (1) to (7) of Conditional Adapters (arXiv 2304.04947), which are of layers whose norms come first. Where norms
come last the paper has none, and what a layer adds to the rows that it computes is the frozen layer of them less the
rows: with every token at a gate of 1 and no adapter, it is the frozen layer there too.

The equations are of parallel adapters. Of the others the paper says no more than that they work, and the readings are
ours: a sequential adapter reads what the layer made of every token and adds to it; LoRA belongs to the frozen weights
of the conditional branch, so that a token that is left out passes as it is.

Shapes: ``B`` rows of ``n`` tokens, ``d`` hidden, ``k`` selected tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..architecture.config import CodaConfig
from .adapters import ACTIVATIONS, LowRank, make_adapter
from .attention import Attention
from .norms import make_norm
from .places import Places
from .router import Router, Selection
from .rows import Rows


class Ffn(torch.nn.Module):
    """``down(activation(up(x)))``, or with a gate ``down(activation(gate(x)) * up(x))``."""

    def __init__(self, config: CodaConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.intermediate_size
        self.activation = ACTIVATIONS[config.activation]
        self.gate = torch.nn.Linear(hidden, width, config.bias) if config.gated_ffn else None
        self.up = torch.nn.Linear(hidden, width, config.bias)
        self.down = torch.nn.Linear(width, hidden, config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., d] to [..., d]."""
        inner = self.activation(self.up(x)) if self.gate is None else self.activation(self.gate(x)) * self.up(x)
        updated: torch.Tensor = self.down(inner)
        return updated


class Layer(torch.nn.Module):
    """Adapter, attention and FFN; with a router where ``conditional``. ``rows`` says how tokens are read and added."""

    def __init__(self, config: CodaConfig, conditional: bool) -> None:
        super().__init__()
        self.config, self.norms_first = config, config.norm_place == "before"
        self.rows: Rows = Rows()
        self.attention_norm, self.ffn_norm = make_norm(config), make_norm(config)
        self.attention, self.ffn, self.adapter = Attention(config), Ffn(config), make_adapter(config)
        self.router = Router(config) if conditional else None

    def forward(
        self, x: torch.Tensor, places: Places, count: int | None, given: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Selection | None]:
        """``x`` [B, n, d] to [B, n, d] and, of a conditional layer, the ``count`` tokens of each row that it computed:
        its own, or those ``given`` [B, k]. Without ``count`` all tokens pass, without a gate."""
        normed = self.attention_norm(x) if self.norms_first else x  # [B, n, d]
        base = x + self.adapter(normed) if self.config.adapter == "parallel" else x  # (1)
        if self.router is None or count is None:
            turn = places.turn()
            return self._behind(base + self._computed(x, normed, normed, places.added(), turn, turn)), None
        selection: Selection = self.router(normed, places.is_token, count, given)  # (2)
        chosen = selection.chosen
        routed = self.rows.read(normed, chosen)  # (3) [B, k, d]
        raw = self.rows.read(x, chosen) if self.config.reads_raw else routed
        to_selected = self.config.keys_of == "selected"
        computed = self._computed(
            raw,
            routed,
            routed if to_selected else normed,
            places.added(chosen, chosen if to_selected else None),
            places.turn(chosen),
            places.turn(chosen if to_selected else None),
        )
        # (6), (7): gates scale the k rows that were computed, not all n.
        return self._behind(self.rows.add(base, chosen, selection.gates[..., None] * computed)), selection

    def _behind(self, y: torch.Tensor) -> torch.Tensor:
        """What the layer made of all tokens, and a sequential adapter of that."""
        return y + self.adapter(y) if self.config.adapter == "sequential" else y

    def _computed(
        self,
        residual: torch.Tensor,
        asking: torch.Tensor,
        read: torch.Tensor,
        added: torch.Tensor | None,
        turn_queries: Callable[[torch.Tensor], torch.Tensor] | None,
        turn_keys: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> torch.Tensor:
        """(4), (5): what attention and FFN make of the rows ``asking``, and of the ``residual`` beside them; the sum of
        both."""
        low_rank = self.adapter if isinstance(self.adapter, LowRank) else None
        attended: torch.Tensor = self.attention(asking, read, added, turn_queries, turn_keys, low_rank)
        if not self.norms_first:
            middle = self.attention_norm(residual + attended)
            whole: torch.Tensor = self.ffn_norm(middle + self.ffn(middle))
            return whole - residual
        updated: torch.Tensor = attended + self.ffn(self.ffn_norm(residual + attended))
        return updated
