"""How many tokens a conditional layer computes: a static number of an engine (no torch here)."""

from __future__ import annotations

from .....bucket import Bucket
from .....elastic import Submodel
from .....errors import PlanError
from .config import REDUCTION, CodaConfig
from .stated_tokens import tokens_of_layers


def reduction_of(config: CodaConfig, submodel: Submodel) -> int:
    """The r of ``submodel``."""
    chosen = {axis.name: value for axis, value in submodel.values}
    return chosen.get(REDUCTION, config.offered[-1])


def selects(config: CodaConfig, reduction: int) -> bool:
    """Whether conditional layers choose tokens at ``reduction``; else all pass, without a gate."""
    return bool(config.conditional) and (reduction > 1 or config.reduction_of_one == "routed")


def token_bucket(config: CodaConfig, bucket: Bucket) -> Bucket:
    """The tokens that layers see at ``bucket``: of images, whose buckets have no sequence, always as many."""
    return bucket if config.image is None else Bucket(bucket.batch, config.image.tokens)


def layer_tokens(config: CodaConfig, tokens: int, reduction: int, any_length: bool = False) -> dict[int, int]:
    """By conditional layer how many of the ``tokens`` of a row it computes; empty where all pass without a gate. Of
    rows of ``any_length`` one where there are fewer than the reduction.

    Raises PlanError for a reduction below 1 or, otherwise, above ``tokens``.
    """
    if not selects(config, reduction):
        return {}
    if not any_length and not 1 <= reduction <= tokens:
        raise PlanError(f"{REDUCTION} {reduction}: expected 1 to {tokens}, the tokens of a row")
    layers = config.conditional
    return dict(zip(layers, tokens_of_layers(config.tokens_selected, tokens, reduction, len(layers)), strict=True))


def capacities(config: CodaConfig, submodel: Submodel, bucket: Bucket) -> dict[int, int]:
    """``layer_tokens`` of ``submodel`` at ``bucket``. Raises PlanError for a reduction above the tokens of a row."""
    try:
        return layer_tokens(config, token_bucket(config, bucket).sequence, reduction_of(config, submodel))
    except PlanError as failure:
        raise PlanError(
            f"bucket {bucket.label}: {failure}; ask for a longer bucket, or leave that level out "
            f"(`levels` of {REDUCTION})"
        ) from None
