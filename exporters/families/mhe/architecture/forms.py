"""The forms in which engines may compute attention of heads with embeddings, and when each gives the same numbers.

Section 6 of the reference derives them: ``literal`` (form A) as the module is written; ``expanded`` (B), an ordinary
MHA; ``expanded_queries`` (C), queries of each head over keys and values that all share; ``normal`` (D), those queries
made of one projection; ``one_head``, the same by one operator of ONNX Runtime, which is given all heads' queries as
rows of one head; ``shared_scores`` (E), one matrix of scores for all heads and a number for each key;
``one_exponential`` (6.7), that matrix's softmax for all heads, times an exponential for each head and key.
"""

from __future__ import annotations

from .config import WITH_SHARED_KEYS, MheConfig, MheDecoderConfig, MheEncoderDecoderConfig

# What has these forms, as variants call it: all attention of a model with one side; of one with two, by its role.
ATTENTION = "attention"
ENCODER, DECODER, CROSS = "encoder_attention", "decoder_attention", "cross_attention"
# The first that holds is what figures without a device count.
FORMS = ("normal", "one_head", "shared_scores", "one_exponential", "expanded_queries", "expanded", "literal")
# Those in which heads share keys and values, so that a cache has two vectors for each token and layer.
SHARED_KEYS = ("normal", "one_head", "shared_scores", "one_exponential", "expanded_queries")
# Those in which heads share a matrix of scores too.
_SHARED_SCORES = ("shared_scores", "one_exponential")
# Those with an operator that ONNX Runtime alone has, and in float32 alone.
ONNXRUNTIME_FORMS = frozenset({"one_head"})
# What a head adds to the scores of two keys may differ by so much where its exponential is taken apart: between 1 and
# exp(-8), 3e-4, which half precision has too.
MOST_SPREAD = 8.0


def held_forms(config: MheConfig, spread: float = 0.0, role: str | None = None) -> tuple[str, ...]:
    """The forms that attention in a ``role``, or in all roles of a model, may have, cheapest cache first; none where
    heads have no embeddings. ``spread`` is ``key_spread``'s."""
    return tuple(form for form in FORMS if form_problem(config, form, spread, role) is None)


def cached_form(config: MheConfig) -> str:
    """The form of engines that keep a cache: the one with the smallest, which is as cheap as any for one token."""
    return "normal" if form_problem(config, "normal") is None else "literal"


def prompt_form(config: MheConfig, spread: float = 0.0) -> str:
    """The form of engines that read a prompt of any length, whole: the one with the fewest products and exponentials of
    long ones."""
    held = held_forms(config, spread)
    return next(form for form in (*reversed(_SHARED_SCORES), "normal") if form in held)


def cached_heads(config: MheConfig) -> int:
    """Heads of keys and values that a cache has of each layer."""
    is_turned = config.has_tables and cached_form(config) == "literal"
    return 1 if config.attention in WITH_SHARED_KEYS and not is_turned else config.num_attention_heads


def form_problem(config: MheConfig, form: str, spread: float = 0.0, role: str | None = None) -> str | None:
    """Why ``form`` would be another function than the model (section 6.8) in a ``role``, or in one of its roles where
    none is stated, or None."""
    if not config.has_tables:
        return f"{config.attention} attention has no head embeddings, and one form alone"
    if form in SHARED_KEYS and config.position == "rotary":
        return (
            "rotary positions turn keys after their head embeddings, so that heads do not share keys; "
            "expanded and literal hold"
        )
    if form == "one_head" and _is_causal(config, role):
        return (
            "the operator takes one mask for all queries of a row, and a decoder's tokens do not see the same keys; "
            "normal holds"
        )
    if form == "one_head" and config.heads_axis == "head_width":
        return "a mask lies behind the numbers of each head, which shrink here; normal holds"
    if form in _SHARED_SCORES and config.attention == "mhe_mul":
        return "a head of mhe_mul stretches queries and keys by factors of its own; one matrix of scores is mhe_add's"
    if form == "one_exponential" and not spread <= MOST_SPREAD:
        return (
            f"by the weights of this model a head may weigh two keys exp({spread:.3g}) apart, more than exp("
            f"{MOST_SPREAD:g}), up to which no product of exponentials rounds to nothing; shared_scores holds"
        )
    return None


def _is_causal(config: MheConfig, role: str | None) -> bool:
    """Whether tokens see those before them alone, in ``role`` or in any."""
    if isinstance(config, MheEncoderDecoderConfig):
        return role in (DECODER, None)
    return isinstance(config, MheDecoderConfig)
