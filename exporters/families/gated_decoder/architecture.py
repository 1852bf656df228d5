"""The shape of a gated-FFN decoder: what determines its graph, and every parameter of its module (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass

from ...hugging_face.interface import DecoderInterface
from ...hugging_face.tensors import Shape, linear_shapes
from .gemma3n import Gemma3nParts


@dataclass(frozen=True)
class DecoderArchitecture:
    """What determines the graph. ``widths`` are FFN neurons by layer.

    ``qkv_bias``, ``output_bias`` and ``ffn_bias`` say which linear layers have one. ``head_norms``: queries and keys
    are normalised per head. ``norms_around``: attention and FFN have a norm behind them as well as before.
    ``score_cap`` and ``logit_cap``: attention scores or logits are bent by a tanh. ``packed``: one layer makes queries,
    keys and values, and files hold gate above up in one tensor; the module has them apart. ``gemma3n`` is what only
    that model has, or None. ``positions`` are the tokens of the longest text, ``stated_positions`` the ones that the
    configuration states. ``windows``: how many tokens each layer sees, None where it sees all.
    """

    interface: DecoderInterface
    heads: int
    kv_heads: int
    head_dim: int
    widths: tuple[int, ...]
    positions: int
    stated_positions: int
    windows: tuple[int | None, ...]
    tied: bool
    qkv_bias: bool
    output_bias: bool
    ffn_bias: bool
    head_norms: bool
    norms_around: bool
    score_cap: bool
    logit_cap: bool
    packed: bool = False
    gemma3n: Gemma3nParts | None = None

    def has_keys(self, layer: int) -> bool:
        """Whether a layer makes its own keys and values: the last ones of Gemma 3n read those of an earlier layer."""
        return self.gemma3n is None or layer < len(self.widths) - self.gemma3n.shared_layers

    @property
    def prefix(self) -> str:
        """What stands before the decoder's names."""
        return self.interface.prefix

    @property
    def hidden(self) -> int:
        """Numbers of a token between layers."""
        return self.interface.hidden

    @property
    def parameter_shapes(self) -> dict[str, Shape]:
        """Every parameter of the module, by the module's names."""
        shapes: dict[str, Shape] = {f"{self.prefix}embed_tokens.weight": (self.interface.vocabulary, self.hidden)}
        for layer in range(len(self.widths)):
            at = f"{self.prefix}layers.{layer}"
            shapes |= self._attention(f"{at}.self_attn", layer) | self._ffn(f"{at}.mlp", self.widths[layer])
            norms = ["input_layernorm", "post_attention_layernorm"]
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if self.norms_around else []
            shapes |= {f"{at}.{name}.weight": (self.hidden,) for name in norms}
            if self.gemma3n is not None:
                shapes |= self.gemma3n.layer_shapes(at, self.hidden)
        shapes[f"{self.prefix}norm.weight"] = (self.hidden,)
        if self.gemma3n is not None:
            shapes |= self.gemma3n.model_shapes(self.prefix, self.hidden, len(self.widths))
        return shapes | self.interface.head_shapes(self.tied)

    @property
    def stacked(self) -> dict[str, tuple[str, ...]]:
        """Tensors of files to the parameters that lie one above the other in them."""
        if not self.packed:
            return {}
        ffns = (f"{self.prefix}layers.{layer}.mlp" for layer in range(len(self.widths)))
        return {f"{at}.gate_up_proj.weight": (f"{at}.gate_proj.weight", f"{at}.up_proj.weight") for at in ffns}

    @property
    def stored_shapes(self) -> dict[str, Shape]:
        """Every tensor that files have of the module."""
        shapes = self.parameter_shapes
        for tensor, parts in self.stacked.items():
            parted = [shapes.pop(part) for part in parts]
            shapes[tensor] = (sum(rows for rows, *_ in parted), *parted[0][1:])
        return shapes

    def ffn_slices(self, layer: int) -> list[tuple[str, int]]:
        """The parameters that the width of a layer slices, each with its dimension: gate and up alike."""
        at = f"{self.prefix}layers.{layer}.mlp"
        rows = [f"{at}.gate_proj.weight", f"{at}.up_proj.weight"]
        rows += [f"{at}.gate_proj.bias", f"{at}.up_proj.bias"] if self.ffn_bias else []
        return [*((name, 0) for name in rows), (f"{at}.down_proj.weight", 1)]

    def _attention(self, at: str, layer: int) -> dict[str, Shape]:
        inner, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        parts = [("q", inner)] + ([("k", keys), ("v", keys)] if self.has_keys(layer) else [])
        if self.packed:
            parts = [("qkv", inner + 2 * keys)]
        shapes: dict[str, Shape] = {}
        for name, size in parts:
            shapes |= linear_shapes(f"{at}.{name}_proj", self.hidden, size, self.qkv_bias)
            if self.head_norms and name != "v":
                shapes[f"{at}.{name}_norm.weight"] = (self.head_dim,)
        return shapes | linear_shapes(f"{at}.o_proj", inner, self.hidden, self.output_bias)

    def _ffn(self, at: str, width: int) -> dict[str, Shape]:
        return (
            linear_shapes(f"{at}.gate_proj", self.hidden, width, self.ffn_bias)
            | linear_shapes(f"{at}.up_proj", self.hidden, width, self.ffn_bias)
            | linear_shapes(f"{at}.down_proj", width, self.hidden, self.ffn_bias)
        )
