from __future__ import annotations

from math import ceil

import pytest
from nestforge.elastic import Bucket
from nestforge.errors import PlanError
from nestforge.exporters.families.coda.architecture.selection import capacity, reduction_of, selected_tokens
from nestforge.exporters.families.coda.architecture.shapes import elastic_spec
from support.tiny_coda import coda_config


def test_k_is_a_whole_number_of_tokens() -> None:
    assert [selected_tokens(512, r) for r in (1, 2, 3, 5, 8, 512)] == [512, 256, 171, 103, 64, 1]
    assert all(selected_tokens(n, r) == ceil(n / r) for n in range(1, 64) for r in range(1, n + 1))


@pytest.mark.parametrize("reduction", [0, -1, 9])
def test_reductions_outside_the_tokens_of_a_row_are_refused(reduction: int) -> None:
    with pytest.raises(PlanError, match=f"^coda.reduction {reduction}: expected 1 to 8, the tokens of a row$"):
        selected_tokens(8, reduction)


def test_a_submodel_has_its_own_k_in_each_bucket() -> None:
    config = coda_config()
    spec = elastic_spec(config)
    quarter = spec.submodel({"coda.reduction": 4})
    assert (reduction_of(config, quarter), reduction_of(config, spec.universal())) == (4, 1)
    assert [capacity(config, quarter, Bucket(2, n)) for n in (4, 8, 10)] == [1, 2, 3]
    assert capacity(config, spec.universal(), Bucket(2, 8)) == 8
    assert capacity(coda_config(reduction_of_one="dense"), spec.universal(), Bucket(2, 8)) is None
    problem = r"^bucket b2-s3: coda\.reduction 4: expected 1 to 3, the tokens of a row; ask for a longer bucket, or"
    with pytest.raises(PlanError, match=problem):
        capacity(config, quarter, Bucket(2, 3))
