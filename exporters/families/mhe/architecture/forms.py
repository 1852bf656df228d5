"""The forms in which engines may compute attention of heads with embeddings, and when each gives the same numbers.

Section 6 of the reference derives them: ``literal`` (form A) as the module is written; ``expanded`` (B), an ordinary
MHA; ``expanded_queries`` (C), queries of each head over keys and values that all share; ``normal`` (D), those queries
made of one projection; ``shared_scores`` (E), one matrix of scores for all heads and a number for each key.
"""

from __future__ import annotations

from .config import WITH_SHARED_KEYS, MheConfig

# What has these forms, as variants call it: all attention of a model with one side; of one with two, by its role.
ATTENTION = "attention"
ENCODER, DECODER, CROSS = "encoder_attention", "decoder_attention", "cross_attention"
# The first that holds is what figures without a device count.
FORMS = ("normal", "shared_scores", "expanded_queries", "expanded", "literal")
# Those in which heads share keys and values, so that a cache has two vectors for each token and layer.
SHARED_KEYS = ("normal", "shared_scores", "expanded_queries")


def held_forms(config: MheConfig) -> tuple[str, ...]:
    """The forms that a model may have, cheapest cache first; none where heads have no embeddings."""
    return tuple(form for form in FORMS if form_problem(config, form) is None)


def cached_form(config: MheConfig) -> str:
    """The form of engines that keep a cache: the one with the smallest, which is as cheap as any for one token."""
    return "normal" if form_problem(config, "normal") is None else "literal"


def prompt_form(config: MheConfig) -> str:
    """The form of engines that read a prompt of any length, whole: where all heads have one matrix of scores, that."""
    return "shared_scores" if form_problem(config, "shared_scores") is None else "normal"


def cached_heads(config: MheConfig) -> int:
    """Heads of keys and values that a cache has of each layer."""
    is_turned = config.has_tables and cached_form(config) == "literal"
    return 1 if config.attention in WITH_SHARED_KEYS and not is_turned else config.num_attention_heads


def form_problem(config: MheConfig, form: str) -> str | None:
    """Why ``form`` would be another function than the model (section 6.8), or None."""
    if not config.has_tables:
        return f"{config.attention} attention has no head embeddings, and one form alone"
    if form in SHARED_KEYS and config.position == "rotary":
        return (
            "rotary positions turn keys after their head embeddings, so that heads do not share keys; "
            "expanded and literal hold"
        )
    if form == "shared_scores" and config.attention == "mhe_mul":
        return "a head of mhe_mul stretches queries and keys by factors of its own; one matrix of scores is mhe_add's"
    return None
