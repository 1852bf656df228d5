"""What reading selected tokens and adding to them costs in each variant that engines may have (no torch here).

``coda.dispatch``: by index (``gather``), or as a product with a matrix of zeros and ones (``one_hot``);
``coda.combine``: read, added and written by index (``scatter``), or such a product. model/rows.py has the modules. The
first variant is what figures without a device count.
"""

from __future__ import annotations

from .....elastic import Bucket, Submodel
from .....workload import Op, added_rows, lookup, one_hot_product
from .config import CodaConfig
from .selection import capacity, token_bucket

DISPATCH, COMBINE = "coda.dispatch", "coda.combine"


def variant_ops(config: CodaConfig, submodel: Submodel, bucket: Bucket) -> dict[str, dict[str, list[Op]]]:
    """What is computed, to variant, to its operations over all layers; nothing where all tokens pass.

    Raises PlanError for a reduction above the tokens of a row.
    """
    count = capacity(config, submodel, bucket)
    if count is None:
        return {}
    d, rows, bucket = config.hidden_size, bucket.batch * count, token_bucket(config, bucket)
    reads = ("normed", "raw") if config.reads_raw else ("normed",)
    at = [f"layers.{layer}" for layer in config.conditional]

    def product(name: str) -> list[Op]:
        return one_hot_product(name, rows, bucket.sequence, bucket.batch, d)

    return {
        DISPATCH: {
            "gather": [lookup(f"{layer}.dispatch.{what}", rows * d) for layer in at for what in reads],
            "one_hot": [op for layer in at for what in reads for op in product(f"{layer}.dispatch.{what}")],
        },
        COMBINE: {
            "scatter": [op for layer in at for op in added_rows(f"{layer}.combine", rows * d, bucket.tokens * d)],
            "one_hot": [op for layer in at for op in product(f"{layer}.combine")],
        },
    }
