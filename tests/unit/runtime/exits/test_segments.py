from collections.abc import Mapping
from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.runtime.exits.segments import BatchPlanner

STATIC = [Bucket(batch, sequence) for batch in (1, 4, 8) for sequence in (16, 32)]
RANGE = Bucket(8, 32, 1, 1)


def by_tokens(*buckets: Bucket) -> BatchPlanner:
    return BatchPlanner(dict.fromkeys(buckets, lambda shape: float(shape.tokens)))


def fixed(costs: Mapping[Bucket, float]) -> BatchPlanner:
    """For engines that cost the same whatever they run."""
    return BatchPlanner({bucket: lambda _, cost=cost: cost for bucket, cost in costs.items()})


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
    assert sizes(by_tokens(*STATIC), rows, longest) == expected


def test_where_a_larger_engine_is_cheaper_it_is_filled_up() -> None:
    planner = fixed({bucket: 10.0 + bucket.batch for bucket in STATIC})
    assert sizes(planner, 5, 16) == [(8, 16)]
    assert sizes(planner, 13, 16) == [(8, 16), (8, 16)]
    assert sizes(planner, 12, 16) == [(8, 16), (4, 16)]


def test_no_engine_is_passed_over_for_a_larger_one_that_was_measured_faster() -> None:
    planner = fixed({Bucket(1, 16): 6.0, Bucket(2, 16): 4.0, Bucket(2, 32): 5.0})
    assert sizes(planner, 1, 16) == [(1, 16)]
    assert sizes(planner, 2, 16) == [(2, 16)]
    assert planner.cheapest(1, 16).cost == 4.0


def test_a_longer_sequence_answers_only_where_it_is_cheaper() -> None:
    planner = fixed({Bucket(8, 16): 8.0, Bucket(1, 32): 2.0})
    assert sizes(planner, 3, 16) == [(1, 32)] * 3
    assert sizes(planner, 4, 16) == [(8, 16)]  # as cheap, and shorter
    assert planner.shortest(3, 16).buckets == (Bucket(8, 16),)


def test_the_cost_of_a_cover_on_other_engines() -> None:
    plan = by_tokens(*STATIC).cheapest(5, 16)
    assert (plan.rows, plan.sequence, plan.cost) == (5, 16, 80.0)
    assert fixed(dict.fromkeys(STATIC, 3.0)).cost(plan) == 6.0


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
    plan = fixed(costs).cheapest(rows, longest)
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
    planner = by_tokens(*STATIC)
    assert len({id(planner.cheapest(3, longest)) for longest in range(1, 33)}) == 2
    assert len({id(planner.shortest(3, longest)) for longest in range(1, 33)}) == 2


@pytest.mark.parametrize("bucket", [RANGE, Bucket(8, 32, 1), Bucket(8, 32, 2, 4)], ids=str)
@pytest.mark.parametrize(("rows", "longest"), [(1, 1), (3, 5), (8, 32)])
def test_a_range_runs_all_rows_at_once_at_their_own_length(bucket: Bucket, rows: int, longest: int) -> None:
    """No shorter than it can, and no fewer."""
    plan = by_tokens(bucket).cheapest(rows, longest)
    assert plan.buckets == (bucket.filled(Bucket(rows, longest)),)
    assert plan.cost == plan.rows * plan.sequence
    assert by_tokens(bucket).shortest(rows, longest) == plan


def test_a_range_of_lengths_alone_is_split_like_buckets() -> None:
    planner = by_tokens(Bucket(1, 32, None, 1), Bucket(4, 32, None, 1))
    assert sizes(planner, 6, 7) == [(4, 7), (1, 7), (1, 7)]


def test_the_cheapest_of_ranges_and_buckets_runs() -> None:
    """By what each costs at the shape that it runs at."""
    dear, cheap = (lambda shape: 2.0 * shape.tokens), (lambda shape: float(shape.tokens))
    planner = BatchPlanner({RANGE: dear, **dict.fromkeys(STATIC, cheap)})
    assert sizes(planner, 1, 9) == [(1, 16)]
    assert sizes(planner, 1, 7) == [(1, 7)]
    assert sizes(planner, 6, 7) == [(6, 7)]
    assert sizes(planner, 6, 15) == [(4, 16), (1, 16), (1, 16)]
    assert planner.shortest(6, 15).buckets == (Bucket(6, 15),)
    assert planner.cheapest(4, 16).cost == 64.0, "the static engine runs its own shape"


def test_a_shape_has_one_engine_a_static_one_or_the_smallest_range() -> None:
    planner = by_tokens(RANGE, Bucket(1, 16, None, 1), Bucket(1, 16))
    assert planner.bucket_of(Bucket(1, 16)) == Bucket(1, 16)
    assert planner.bucket_of(Bucket(1, 15)) == Bucket(1, 16, None, 1)
    assert planner.bucket_of(Bucket(2, 15)) == RANGE


def test_plans_of_the_same_runs_are_equal_whatever_they_cost() -> None:
    one, other = by_tokens(RANGE).cheapest(3, 5), fixed({RANGE: 1.0}).cheapest(3, 5)
    assert one.cost != other.cost
    assert {one: "step"}[other] == "step"
    assert one != by_tokens(RANGE).cheapest(3, 6)


@given(st.integers(1, 12), st.integers(1, 32), st.lists(st.integers(1, 9), min_size=3, max_size=3))
def test_whatever_engines_cost_a_plan_holds_its_rows(rows: int, longest: int, costs: list[int]) -> None:
    buckets = [Bucket(8, 32, 1, 1), Bucket(1, 32), Bucket(12, 32)]
    planner = fixed(dict(zip(buckets, map(float, costs), strict=True)))
    plan = planner.cheapest(rows, longest)
    assert plan.rows >= rows
    assert plan.sequence >= longest
    for shape in plan.buckets:
        assert shape.is_static
        assert planner.bucket_of(shape).nearest(shape) == shape
