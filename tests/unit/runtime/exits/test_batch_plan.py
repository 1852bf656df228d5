from __future__ import annotations

from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.elastic import Bucket
from nestforge.runtime.exits.batch_plan import BatchPlanner

TOKENS = {Bucket(batch, sequence): float(batch * sequence) for batch in (1, 4, 8) for sequence in (16, 32)}


def sizes(planner: BatchPlanner, rows: int, longest: int) -> list[tuple[int, int]]:
    return [(bucket.batch, bucket.sequence) for bucket in planner.cheapest(rows, longest).buckets]


@pytest.mark.parametrize(
    ("rows", "longest", "expected"),
    [
        (1, 1, [(1, 16)]),
        (8, 16, [(8, 16)]),
        (13, 16, [(8, 16), (4, 16), (1, 16)]),
        (6, 17, [(4, 32), (1, 32), (1, 32)]),
        (17, 32, [(8, 32), (8, 32), (1, 32)]),
    ],
)
def test_by_tokens_no_row_is_wasted(rows: int, longest: int, expected: list[tuple[int, int]]) -> None:
    assert sizes(BatchPlanner(TOKENS), rows, longest) == expected


def test_where_a_larger_engine_is_cheaper_it_is_filled_up() -> None:
    costs = {bucket: 10.0 + bucket.batch for bucket in TOKENS}
    assert sizes(BatchPlanner(costs), 5, 16) == [(8, 16)]
    assert sizes(BatchPlanner(costs), 13, 16) == [(8, 16), (8, 16)]
    assert sizes(BatchPlanner(costs), 12, 16) == [(8, 16), (4, 16)]


def test_no_engine_is_passed_over_for_a_larger_one_that_was_measured_faster() -> None:
    costs = {Bucket(1, 16): 6.0, Bucket(2, 16): 4.0, Bucket(2, 32): 5.0}
    assert sizes(BatchPlanner(costs), 1, 16) == [(1, 16)]
    assert sizes(BatchPlanner(costs), 2, 16) == [(2, 16)]
    assert BatchPlanner(costs).cheapest(1, 16).cost == 4.0


def test_a_longer_sequence_answers_only_where_it_is_cheaper() -> None:
    costs = {Bucket(8, 16): 8.0, Bucket(1, 32): 2.0}
    planner = BatchPlanner(costs)
    assert sizes(planner, 3, 16) == [(1, 32)] * 3
    assert sizes(planner, 4, 16) == [(8, 16)]  # as cheap, and shorter
    assert planner.shortest(3, 16).buckets == (Bucket(8, 16),)


def test_the_cost_of_a_cover_on_other_engines() -> None:
    plan = BatchPlanner(TOKENS).cheapest(5, 16)
    assert (plan.rows, plan.sequence, plan.cost) == (5, 16, 80.0)
    assert BatchPlanner(dict.fromkeys(TOKENS, 3.0)).cost(plan) == 6.0


COSTS = st.dictionaries(
    st.builds(Bucket, st.sampled_from([1, 2, 3, 5, 8]), st.sampled_from([8, 16])),
    st.integers(1, 40).map(float),
    min_size=1,
)


@given(COSTS, st.integers(1, 9), st.integers(1, 16))
def test_no_cover_is_cheaper_and_only_the_last_run_has_spare_rows(
    costs: dict[Bucket, float], rows: int, longest: int
) -> None:
    fitting = [bucket for bucket in costs if bucket.sequence >= longest]
    if not fitting:
        return
    for bucket in costs:  # what a disturbed measurement gives, and what counts
        larger = [c for o, c in costs.items() if o.batch >= bucket.batch and o.sequence >= bucket.sequence]
        costs = {**costs, bucket: min(larger)}
    plan = BatchPlanner(costs).cheapest(rows, longest)
    assert plan.cost == sum(costs[bucket] for bucket in plan.buckets)
    assert {bucket.sequence for bucket in plan.buckets} == {plan.sequence}
    assert plan.sequence >= longest
    assert list(plan.buckets) == sorted(plan.buckets, reverse=True)
    assert 0 <= plan.rows - rows < plan.buckets[-1].batch
    for count in range(1, min(rows, 5) + 1):
        for runs in combinations_with_replacement(fitting, count):
            if len({bucket.sequence for bucket in runs}) == 1 and sum(bucket.batch for bucket in runs) >= rows:
                assert plan.cost <= sum(costs[bucket] for bucket in runs)


def test_lengths_of_one_bucket_share_one_cover() -> None:
    planner = BatchPlanner(TOKENS)
    assert len({id(planner.cheapest(3, longest)) for longest in range(1, 33)}) == 2
    assert len({id(planner.shortest(3, longest)) for longest in range(1, 33)}) == 2
