"""The chain on engines of ranges, whose numbers are exact: rows run at their own length, with those that stay."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.bundle.build_record import Latency, LatencyPoint
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import InputError
from nestforge.runtime.engines.runner import EnginePool
from nestforge.runtime.exits.chain import ExitChain
from nestforge.runtime.exits.policy import ExitPolicy, closed
from support.exit_bundles import LEVELS, check_exits, every_exit, open_chain, requests, shapes_of, write_exits_bundle
from support.latencies import latency

RANGE = Bucket(8, 16, 1, 1)
BUNDLES = {
    "free": (RANGE,),
    "lengths": (Bucket(1, 16, None, 1), Bucket(8, 16, None, 1)),
    "batches": (Bucket(8, 16, 1),),
    "from 2x4": (Bucket(8, 16, 2, 4),),
    "beside buckets": (RANGE, Bucket(1, 8), Bucket(4, 16)),
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Bundle, EnginePool]]]:
    found = {}
    for name, buckets in BUNDLES.items():
        bundle = open_bundle(write_exits_bundle(tmp_path_factory.mktemp("ranges") / "b", buckets))
        found[name] = bundle, EnginePool(bundle, {engine.id: "shared" for engine in bundle.manifest.engines}, 1)
    yield found
    for _, pool in found.values():
        pool.close()


def chain_of(opened: tuple[Bundle, EnginePool], latencies: list[Latency] | None = None) -> ExitChain:
    bundle, pool = opened
    return ExitChain(bundle, "depth4", pool, latencies or ())


@pytest.fixture(scope="module")
def chain(opened: dict[str, tuple[Bundle, EnginePool]]) -> ExitChain:
    return chain_of(opened["free"])


def measured(bundle: Bundle, costs: Iterator[int]) -> list[Latency]:
    """Latencies of the next ``costs``, at the corners of a range."""
    found = []
    for engine in bundle.manifest.engines:
        if engine.segment:
            least, most = engine.bucket.smallest, engine.bucket
            corners = [
                LatencyPoint(batch, sequence, 1.0, float(next(costs)))
                for batch in sorted({least.batch, most.batch})
                for sequence in sorted({least.sequence, most.sequence})
            ]
            found.append(latency(engine.id, points=corners))
    return found


@settings(deadline=None, max_examples=40)
@pytest.mark.parametrize("kind", BUNDLES)
@given(
    lengths=st.lists(st.integers(1, 16), min_size=1, max_size=8),
    extra=st.integers(0, 16),
    thresholds=st.tuples(st.sampled_from(LEVELS), st.sampled_from(LEVELS)),
    costs=st.lists(st.integers(1, 9), min_size=8, max_size=8),
    seed=st.integers(0, 99),
)
def test_an_answer_does_not_depend_on_the_batch_that_a_row_is_in(
    opened: dict[str, tuple[Bundle, EnginePool]],
    kind: str,
    lengths: list[int],
    extra: int,
    thresholds: tuple[float, float],
    costs: list[int],
    seed: int,
) -> None:
    bundle = opened[kind][0]
    chain = chain_of(opened[kind], measured(bundle, (costs[n % len(costs)] for n in range(1000))))
    feeds, policy = requests(lengths, min(16, max(lengths) + extra), seed), ExitPolicy(thresholds)
    together = chain.run(feeds, policy)
    check_exits(together, feeds, thresholds)
    order = np.random.default_rng(seed).permutation(len(lengths))
    for rows in (order, order[: len(order) // 2 + 1], order[:1]):
        other = chain.run({name: array[rows] for name, array in feeds.items()}, policy)
        assert other.logits.tolist() == together.logits[rows].tolist()
        assert other.index.tolist() == together.index[rows].tolist()
        assert other.entropy.tolist() == together.entropy[rows].tolist()


def test_nothing_is_padded_and_the_rows_that_stay_run_alone(chain: ExitChain) -> None:
    lengths = np.array([15, 3, 9, 13, 5, 2, 8, 7])
    feeds = requests(lengths.tolist(), 16, seed=1)
    first, second, _ = (entropy for _, _, entropy in every_exit(feeds["input_ids"], feeds["attention_mask"]))
    stay = first > np.sort(first)[3]
    limits = (float(np.sort(first)[3]), float(second[stay].min()))
    left = stay & (second > limits[1])
    assert 8 > stay.sum() > left.sum() > 0
    want = ["8x15", f"{stay.sum()}x{lengths[stay].max()}", f"{left.sum()}x{lengths[left].max()}"]
    assert shapes_of(chain, feeds, ExitPolicy(limits)) == want
    check_exits(chain.run(feeds, ExitPolicy(limits)), feeds, limits)


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [("lengths", "1x5+1x5+1x5"), ("batches", "3x16"), ("from 2x4", "3x5"), ("beside buckets", "3x5")],
)
def test_only_what_is_free_follows_the_request(
    opened: dict[str, tuple[Bundle, EnginePool]], kind: str, shapes: str
) -> None:
    assert shapes_of(chain_of(opened[kind]), requests([5, 2, 3]), closed(3)) == [shapes] * 3


def test_a_range_is_filled_up_to_its_least_shape(opened: dict[str, tuple[Bundle, EnginePool]]) -> None:
    feeds = requests([3])
    assert shapes_of(chain_of(opened["from 2x4"]), feeds, closed(3)) == ["2x4"] * 3
    check_exits(chain_of(opened["from 2x4"]).run(feeds, closed(3)), feeds, (-1.0, -1.0))


def test_the_cheapest_of_range_and_buckets_runs_by_what_was_measured(
    opened: dict[str, tuple[Bundle, EnginePool]],
) -> None:
    bundle, _ = opened["beside buckets"]
    feeds = requests([7])
    slow = [
        latency(engine.id, 1.0, 9.0 if engine.bucket == RANGE else 1.0)
        for engine in bundle.manifest.engines
        if engine.segment
    ]
    assert shapes_of(chain_of(opened["beside buckets"], slow), feeds, closed(3)) == ["1x8"] * 3
    assert shapes_of(chain_of(opened["beside buckets"]), feeds, closed(3)) == ["1x7"] * 3
    unknown = [one for one in slow if not one.engine.endswith("@b1-s8")]
    assert shapes_of(chain_of(opened["beside buckets"], unknown), feeds, closed(3)) == ["1x7"] * 3, "by tokens again"


def test_where_padding_counts_the_requests_own_length_decides(tmp_path: Path) -> None:
    bundle = open_bundle(write_exits_bundle(tmp_path / "b", (RANGE, Bucket(1, 8)), trims=False))
    with open_chain(bundle) as chain:
        assert shapes_of(chain, requests([3, 5, 1], 11), closed(3)) == ["3x11"] * 3
        assert shapes_of(chain, requests([3], 8), closed(3)) == ["1x8"] * 3
        feeds = requests([3, 8, 1], 11)
        check_exits(chain.run(feeds, ExitPolicy((0.5, 0.5))), feeds, (0.5, 0.5))


def test_a_row_pays_for_the_steps_that_it_ran(chain: ExitChain) -> None:
    feeds = requests([9, 4, 6], seed=3)
    run = chain.run(feeds, closed(3))
    assert run.flops.tolist() == [100 * 4 * 9] * 3
    first = every_exit(feeds["input_ids"], feeds["attention_mask"])[0][2]
    limits = (float(np.sort(first)[1]), -1.0)
    stays = first > limits[0]
    assert stays.any()
    longest = int(np.array([9, 4, 6])[stays].max())
    run = chain.run(feeds, ExitPolicy(limits))
    assert run.flops.tolist() == [900 + 300 * longest if stay else 900 for stay in stays]


def test_rows_move_for_a_saving_alone(opened: dict[str, tuple[Bundle, EnginePool]]) -> None:
    """Moving costs time too: for what saves next to nothing rows stay in place."""
    bundle, _ = opened["free"]
    feeds = requests([8, 8, 8, 8], seed=5)
    first = every_exit(feeds["input_ids"], feeds["attention_mask"])[0][2]
    policy = ExitPolicy((float(first.min()), -1.0))
    stays = int((first > first.min()).sum())
    assert 0 < stays < 4
    for most, shapes in ((1.01, "4x8"), (8.0, f"{stays}x8")):
        corners = tuple(LatencyPoint(batch, n, 1.0, most if batch == 8 else 1.0) for batch in (1, 8) for n in (1, 16))
        latencies = [latency(engine.id, points=corners) for engine in bundle.manifest.engines if engine.segment]
        assert shapes_of(chain_of(opened["free"], latencies), feeds, policy)[1] == shapes


def test_refuses_what_no_range_holds(chain: ExitChain) -> None:
    for feeds, found in ((requests([4] * 9), "9 rows x 4"), (requests([17]), "1 rows x 17")):
        with pytest.raises(InputError, match=f"^input of {found} is larger than every bucket of these exits"):
            chain.run(feeds, closed(3))
