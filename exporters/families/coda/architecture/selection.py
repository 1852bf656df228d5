"""How many tokens a conditional layer computes: a static number of an engine (no torch here)."""

from __future__ import annotations

from .....elastic import Bucket, Submodel
from .....errors import PlanError
from .config import REDUCTION, CodaConfig


def selected_tokens(tokens: int, reduction: int) -> int:
    """``ceil(tokens / reduction)``, exactly. Raises PlanError for a reduction below 1 or above ``tokens``."""
    if not 1 <= reduction <= tokens:
        raise PlanError(f"{REDUCTION} {reduction}: expected 1 to {tokens}, the tokens of a row")
    return -(-tokens // reduction)


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


def capacity(config: CodaConfig, submodel: Submodel, bucket: Bucket) -> int | None:
    """The tokens of each row that a conditional layer of ``submodel`` computes at ``bucket``, or None where all pass.

    Raises PlanError for a reduction above the tokens of a row.
    """
    reduction = reduction_of(config, submodel)
    if not selects(config, reduction):
        return None
    try:
        return selected_tokens(token_bucket(config, bucket).sequence, reduction)
    except PlanError as failure:
        raise PlanError(
            f"bucket {bucket.label}: {failure}; ask for a longer bucket, or leave that level out "
            f"(--levels {REDUCTION}=...)"
        ) from None
