"""Why attention of a transformers model has one form alone, said to who asks for another (docs/mhe.md, section 11)."""

from __future__ import annotations

from ..architecture import EVERY_VARIANT


def attention_problems(heads: int, shared: int) -> dict[str, dict[str, str]]:
    """For ``Architecture.variant_problems``, of a model whose ``heads`` read ``shared`` pairs of keys and values."""
    if shared == 1 < heads:
        why = (
            "all heads share keys and values already, engines that generate keep one pair of them, and their queries "
            "have projections of their own, which leaves nothing to fold"
        )
    else:
        own = "each head has keys and values of its own" if shared == heads else f"{heads} heads share {shared} pairs"
        why = (
            f"{own}; making heads share one pair (multi-query attention) is another function, which takes retraining, "
            "and nestforge does not do that"
        )
    return {"attention": {EVERY_VARIANT: f"{why} (docs/mhe.md)"}}
