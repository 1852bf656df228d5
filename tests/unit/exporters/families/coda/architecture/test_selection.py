from __future__ import annotations

from math import ceil

import pytest
from nestforge.bucket import Bucket
from nestforge.errors import PlanError
from nestforge.exporters.families.coda.ops import capacities, elastic_spec, layer_tokens, reduction_of
from support.tiny_coda import coda_config


def test_k_is_a_whole_number_of_tokens() -> None:
    config = coda_config(max_position_embeddings=512)
    assert [layer_tokens(config, 512, r)[0] for r in (1, 2, 3, 5, 8, 512)] == [512, 256, 171, 103, 64, 1]
    for n in range(1, 64):
        assert all(layer_tokens(config, n, r) == dict.fromkeys((0, 1), ceil(n / r)) for r in range(1, n + 1))


def test_reductions_above_the_tokens_of_a_row_are_refused() -> None:
    with pytest.raises(PlanError, match=r"^coda\.reduction 9: expected 1 to 8, the tokens of a row$"):
        layer_tokens(coda_config(), 8, 9)


def test_a_submodel_has_its_own_k_in_each_bucket() -> None:
    config = coda_config()
    spec = elastic_spec(config)
    quarter = spec.submodel({"coda.reduction": 4})
    assert (reduction_of(config, quarter), reduction_of(config, spec.universal())) == (4, 1)
    assert [capacities(config, quarter, Bucket(2, n))[1] for n in (4, 8, 10)] == [1, 2, 3]
    assert capacities(config, spec.universal(), Bucket(2, 8)) == {0: 8, 1: 8}
    assert capacities(coda_config(reduction_of_one="dense"), spec.universal(), Bucket(2, 8)) == {}
    problem = r"^bucket b2-s3: coda\.reduction 4: expected 1 to 3, the tokens of a row; ask for a longer bucket, or"
    with pytest.raises(PlanError, match=problem):
        capacities(config, quarter, Bucket(2, 3))


def test_where_the_checkpoint_states_k_it_is_that() -> None:
    config = coda_config(tokens_selected={"8": {"4": 3}, "10": {"4": (5, 1)}})
    quarter = elastic_spec(config).submodel({"coda.reduction": 4})
    assert capacities(config, quarter, Bucket(2, 8)) == {0: 3, 1: 3}
    assert capacities(config, quarter, Bucket(2, 10)) == {0: 5, 1: 1}
    assert capacities(config, quarter, Bucket(2, 9)) == {0: 3, 1: 3}, "ceil(9 / 4), where nothing is stated"
