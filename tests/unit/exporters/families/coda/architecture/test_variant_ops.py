from __future__ import annotations

from nestforge.bucket import Bucket
from nestforge.exporters.families.coda.ops import elastic_spec, variant_ops
from nestforge.workload import macs
from support.tiny_coda import coda_config


def test_products_grow_with_the_tokens_and_indices_do_not() -> None:
    config = coda_config()
    quarter = elastic_spec(config).submodel({"coda.reduction": 4})
    offered = variant_ops(config, quarter, Bucket(2, 8))
    assert {computed: list(options) for computed, options in offered.items()} == {
        "coda.dispatch": ["gather", "one_hot"],
        "coda.combine": ["scatter", "one_hot"],
    }
    # k = 2 of 8 tokens, 2 rows, width 32, 2 layers; the raw residual is read beside the normed rows.
    assert macs(offered["coda.dispatch"]["one_hot"]) == 2 * 2 * (2 * 2 * 8 * 32)
    assert macs(offered["coda.combine"]["one_hot"]) == 2 * (2 * 2 * 8 * 32)
    assert macs(offered["coda.dispatch"]["gather"]) == macs(offered["coda.combine"]["scatter"]) == 0
    normed = variant_ops(coda_config(ffn_residual="normed"), quarter, Bucket(2, 8))
    assert len(normed["coda.dispatch"]["gather"]) == 2


def test_where_all_tokens_pass_nothing_is_moved() -> None:
    config = coda_config(reduction_of_one="dense")
    assert variant_ops(config, elastic_spec(config).universal(), Bucket(2, 8)) == {}
