"""Model types of gated decoders: what their classes in transformers have that ``config.json`` does not say."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..checkpoints.config import MOST_LAYERS
from ..hugging_face.decoder_positions import (
    Window,
    every_layer,
    every_second_layer,
    four_in_five,
    later_layers,
    pattern,
)
from ..hugging_face.interface import LAST_TOKEN_CLASSES, NEXT_TOKEN, QUESTION, Dense, Head

TOKEN_CLASSES = Head({"logits": ("sequence", "classes")}, {"score": Dense("hidden", "classes")})
HEADS = (NEXT_TOKEN, LAST_TOKEN_CLASSES, TOKEN_CLASSES, QUESTION)


@dataclass(frozen=True)
class Layout:
    """One model type: what its classes have that ``config.json`` does not say. ``classes`` are those read, with their
    heads; the first is the base model. ``defaults`` are those of the transformers class for keys that files leave out.

    ``qkv_bias``: queries, keys and values always have a bias. ``heeds``: which keys of ``_HEEDED`` the class reads; it
    passes over the others. ``head_norms``: queries and keys are normalised per head. ``norms_around``: attention and
    FFN have a norm behind them as well as before. ``packed``: one layer makes queries, keys and values, and files hold
    gate above up in one tensor; the module has them apart. ``pad`` is its padding token. ``original_positions`` are the
    ones that its model type has where ``config.json`` is silent, before rotary positions turn to other frequencies.
    ``window``: how its class reads sliding windows, None where it has none.
    """

    classes: Mapping[str, Head | None]
    qkv_bias: bool = False
    heeds: tuple[str, ...] = ()
    head_norms: bool = False
    norms_around: bool = False
    gemma3n: bool = False
    packed: bool = False
    pad: int | None = None
    original_positions: int | None = None
    window: Window | None = None
    defaults: Mapping[str, object] = field(default_factory=dict)

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """``config`` as the class reads it."""
        passed_over = _HEEDED.difference(self.heeds)
        return {key: value for key, value in {**self.defaults, **config}.items() if key not in passed_over}


def _classes(stem: str, question: str | None = None) -> dict[str, Head | None]:
    """``question`` is the attribute that holds the decoder in the class that answers questions, if there is one."""
    classes = {
        f"{stem}Model": None,
        f"{stem}ForCausalLM": NEXT_TOKEN,
        f"{stem}ForSequenceClassification": LAST_TOKEN_CLASSES,
        f"{stem}ForTokenClassification": TOKEN_CLASSES,
    }
    return classes | ({f"{stem}ForQuestionAnswering": replace(QUESTION, prefix=question)} if question else {})


_BIASES, _CAPS = ("attention_bias", "mlp_bias"), ("attn_logit_softcapping", "final_logit_softcapping")
_HEEDED = frozenset([*_BIASES, *_CAPS])
_QWEN: dict[str, object] = {"num_key_value_heads": 32, "sliding_window": 4096}
_GEMMA: dict[str, object] = {"head_dim": 256, "tie_word_embeddings": True}
_GEMMA3: dict[str, Any] = {
    "heeds": ("attention_bias", *_CAPS),
    "head_norms": True,
    "norms_around": True,
    "pad": 0,
}
LAYOUTS: dict[str, Layout] = {
    "llama": Layout(_classes("Llama", "transformer"), heeds=_BIASES),
    "granite": Layout({"GraniteModel": None, "GraniteForCausalLM": NEXT_TOKEN}, heeds=_BIASES),
    "mistral": Layout(
        _classes("Mistral", "model"),
        window=every_layer,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Layout(_classes("Qwen2", "transformer"), qkv_bias=True, window=later_layers, defaults=_QWEN),
    "qwen3": Layout(
        _classes("Qwen3", "transformer"),
        heeds=("attention_bias",),
        head_norms=True,
        window=later_layers,
        defaults={**_QWEN, "head_dim": 128},
    ),
    "phi3": Layout(_classes("Phi3"), packed=True, pad=32_000, original_positions=4096, window=every_layer),
    "gemma": Layout(
        _classes("Gemma"), heeds=("attention_bias",), pad=0, defaults={**_GEMMA, "num_key_value_heads": 16}
    ),
    "gemma2": Layout(
        _classes("Gemma2"),
        heeds=("attention_bias", *_CAPS),
        norms_around=True,
        pad=0,
        window=every_second_layer,
        defaults={
            **_GEMMA,
            "sliding_window": 4096,
            "num_key_value_heads": 4,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": Layout(
        {
            "Gemma3TextModel": None,
            "Gemma3ForCausalLM": NEXT_TOKEN,
            "Gemma3TextForSequenceClassification": LAST_TOKEN_CLASSES,
        },
        **_GEMMA3,
        window=pattern,
        defaults={**_GEMMA, "num_key_value_heads": 4, "sliding_window": 4096},
    ),
    "gemma3n_text": Layout(
        {"Gemma3nTextModel": None, "Gemma3nForCausalLM": NEXT_TOKEN},
        **_GEMMA3,
        gemma3n=True,
        window=four_in_five,
        defaults={**_GEMMA, "num_key_value_heads": 2, "final_logit_softcapping": 30.0, "sliding_window": 512},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Stated:
    """The keys that determine the graph, with the defaults that all model types share."""

    vocab_size: int = field(metadata={"min": 1})
    hidden_size: int = field(metadata={"min": 1})
    num_hidden_layers: int = field(metadata={"min": 1, "max": MOST_LAYERS})
    num_attention_heads: int = field(metadata={"min": 1})
    max_position_embeddings: int = field(metadata={"min": 1})
    num_key_value_heads: int | None = field(default=None, metadata={"min": 1})
    head_dim: int | None = field(default=None, metadata={"min": 1})
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = None
    is_causal: bool = True

    def problems(self, masked: bool) -> Iterator[str]:
        """Why no static graph can keep it. ``masked``: the model takes a mask, which hides padding from positions that
        see later ones."""
        heads, pairs = self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads
        if heads % pairs:
            yield f"num_key_value_heads: {heads} heads cannot share {pairs} pairs of keys and values"
        if (self.use_bidirectional_attention or not self.is_causal) and not masked:
            key = "is_causal" if not self.is_causal else "use_bidirectional_attention"
            yield (
                f"{key}: positions that see later ones are not supported; this model takes no mask, so the padding "
                "behind a text would change its answer"
            )
