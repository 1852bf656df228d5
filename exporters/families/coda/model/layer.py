"""One layer: a frozen Transformer layer of which some tokens, or all, pass through, and an adapter for all.

Equations (1) to (7) of Conditional Adapters (arXiv 2304.04947), which are of layers whose norms come first. Where norms
come last the paper has none, and what a layer adds to the rows that it computes is the frozen layer of them less the
rows: with every token at a gate of 1 and no adapter, it is the frozen layer there too.

Shapes: ``B`` rows of ``n`` tokens, ``d`` hidden, ``k`` selected tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from ..architecture.config import CodaConfig
from .attention import Attention
from .norms import make_norm
from .places import Places
from .router import Router, Selection
from .rows import Rows

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


class Ffn(torch.nn.Module):
    """``down(activation(up(x)))``, or with a gate ``down(activation(gate(x)) * up(x))``."""

    def __init__(self, config: CodaConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.intermediate_size
        self.activation = _ACTIVATIONS[config.activation]
        self.gate = torch.nn.Linear(hidden, width, config.bias) if config.gated_ffn else None
        self.up = torch.nn.Linear(hidden, width, config.bias)
        self.down = torch.nn.Linear(width, hidden, config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., d] to [..., d]."""
        inner = self.activation(self.up(x)) if self.gate is None else self.activation(self.gate(x)) * self.up(x)
        updated: torch.Tensor = self.down(inner)
        return updated


class Adapter(torch.nn.Module):
    """A small FFN beside the whole layer, for all tokens: ``scale * up(activation(down(x)))``."""

    def __init__(self, config: CodaConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.adapter_size
        self.activation, self.scale = _ACTIVATIONS[config.adapter_activation], config.adapter_scale
        self.down = torch.nn.Linear(hidden, width, config.adapter_bias)
        self.up = torch.nn.Linear(width, hidden, config.adapter_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [B, n, d] to [B, n, d]."""
        updated: torch.Tensor = self.up(self.activation(self.down(x)))
        return updated if self.scale == 1 else updated * self.scale


class Layer(torch.nn.Module):
    """Adapter, attention and FFN; with a router where ``conditional``. ``rows`` says how tokens are read and added."""

    def __init__(self, config: CodaConfig, conditional: bool) -> None:
        super().__init__()
        self.config, self.norms_first = config, config.norm_place == "before"
        self.rows: Rows = Rows()
        self.attention_norm, self.ffn_norm = make_norm(config), make_norm(config)
        self.attention, self.ffn, self.adapter = Attention(config), Ffn(config), Adapter(config)
        self.router = Router(config) if conditional else None

    def forward(
        self, x: torch.Tensor, places: Places, count: int | None, given: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Selection | None]:
        """``x`` [B, n, d] to [B, n, d] and, of a conditional layer, the ``count`` tokens of each row that it computed:
        its own, or those ``given`` [B, k]. Without ``count`` all tokens pass, without a gate."""
        normed = self.attention_norm(x) if self.norms_first else x  # [B, n, d]
        base = x + self.adapter(normed)  # (1)
        if self.router is None or count is None:
            turn = places.turn()
            return base + self._computed(x, normed, normed, places.added(), turn, turn), None
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
        return self.rows.add(base, chosen, selection.gates[..., None] * computed), selection

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
        attended: torch.Tensor = self.attention(asking, read, added, turn_queries, turn_keys)
        if not self.norms_first:
            middle = self.attention_norm(residual + attended)
            whole: torch.Tensor = self.ffn_norm(middle + self.ffn(middle))
            return whole - residual
        updated: torch.Tensor = attended + self.ffn(self.ffn_norm(residual + attended))
        return updated
