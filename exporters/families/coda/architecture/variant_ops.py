"""What reading selected tokens and adding to them costs in each variant that engines may have (no torch here).

``coda.dispatch``: by index (``gather``), or as a product with a matrix of zeros and ones (``one_hot``);
``coda.combine``: read, added and written by index (``scatter``), or such a product. model/rows.py has the modules. The
first variant is what figures without a device count.
"""

from __future__ import annotations

from .....bucket import Bucket
from .....elastic import Submodel
from .....workload import Op, added_rows, lookup, one_hot_product
from .config import CodaConfig
from .selection import capacities, token_bucket

DISPATCH, COMBINE = "coda.dispatch", "coda.combine"


def variant_ops(config: CodaConfig, submodel: Submodel, bucket: Bucket) -> dict[str, dict[str, list[Op]]]:
    """What is computed, to variant, to its operations over all layers; nothing where all tokens pass.

    Raises PlanError for a reduction above the tokens of a row.
    """
    counts, bucket = capacities(config, submodel, bucket), token_bucket(config, bucket)
    if not counts:
        return {}
    d = config.hidden_size
    reads = ("normed", "raw") if config.reads_raw else ("normed",)
    at = {f"layers.{layer}": bucket.batch * count for layer, count in counts.items()}

    read = [(f"{layer}.dispatch.{what}", rows) for layer, rows in at.items() for what in reads]
    written = [(f"{layer}.combine", rows) for layer, rows in at.items()]

    def product(name: str, rows: int) -> list[Op]:
        return one_hot_product(name, rows, bucket.sequence, bucket.batch, d)

    return {
        DISPATCH: {
            "gather": [lookup(name, rows * d) for name, rows in read],
            "one_hot": [op for name, rows in read for op in product(name, rows)],
        },
        COMBINE: {
            "scatter": [op for name, rows in written for op in added_rows(name, rows * d, bucket.tokens * d)],
            "one_hot": [op for name, rows in written for op in product(name, rows)],
        },
    }
