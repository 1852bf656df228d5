"""Sparse Mixers that cannot be compiled as asked: one clear line and nothing written; and what ties do instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import nestforge
import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.compiler.compile import compile_bundle
from nestforge.errors import CheckpointError, ExportError, NestforgeError, PlanError
from support.refused_compile import Case
from support.tiny_compile import board
from support.tiny_mixer import save_tiny_mixer

BUCKET = Bucket(1, 16)
ROUTER = "layers.1.moe.router.weight"
UP = "layers.1.moe.experts.up_weight"


@pytest.fixture(scope="module")
def mixer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_mixer(tmp_path_factory.mktemp("mixer") / "m")


@pytest.fixture
def case(tmp_path: Path, mixer: Path) -> Case:
    found = Case(tmp_path, mixer)
    found.profile = board(budgets={"full": {}})
    found.arguments["buckets"] = [BUCKET]
    return found


def cut_expert(weights: dict[str, np.ndarray]) -> None:
    weights[UP] = np.ascontiguousarray(weights[UP][:3])


MIXERS: dict[str, tuple[Callable[[Case], object], type[NestforgeError], str]] = {
    "capacity that rounds to zero": (
        lambda c: c.config(min_capacity=0, capacities=[1, 100]),
        PlanError,
        r"bucket b1-s16: 1 % of 16 tokens over 4 experts rounds to 0 slots \(half_even, min_capacity 0\); raise "
        r"moe.capacity_factor \(`levels`\) or the bucket$",
    ),
    "capacity rounded down to zero": (
        lambda c: c.config(min_capacity=0, capacity_rounding="floor", capacity_factor=0.2),
        PlanError,
        r"20 % of 16 tokens over 4 experts rounds to 0 slots \(floor, min_capacity 0\)",
    ),
    "capacity above the tokens of a group": (
        lambda c: c.config(capacity_factor=4.01),
        CheckpointError,
        r"config.json: capacity_factor: expected 0.01 to 4 \(the experts\), got 4.01$",
    ),
    "capacity that is not offered": (
        lambda c: c.arguments.update(submodels=["moe.capacity_factor60"]),
        PlanError,
        r"axis moe.capacity_factor: expected one of 25, 50, 75, 100, got 60$",
    ),
    "capacity above the trained one": (
        lambda c: c.config(capacities=[100, 125]),
        CheckpointError,
        r"capacities: expected rising numbers from 1 to 100, as trained, got \[100, 125\]$",
    ),
    "bucket shorter than the mixing": (
        lambda c: c.arguments.update(buckets=[Bucket(1, 8)]),
        ExportError,
        r"^bucket b1-s8: linear mixing is bound to 16 tokens; ask for bucket b1-s16, to which shorter texts are "
        r"padded$",
    ),
    "bucket longer than the mixing": (
        lambda c: c.arguments.update(buckets=[Bucket(1, 32)]),
        ExportError,
        r"^bucket b1-s32: the model takes at most 16 tokens$",
    ),
    "sequence of a mixing that has one alone": (
        lambda c: c.config(sequences=[8]),
        CheckpointError,
        r"config.json: sequences: linear mixing serves 16 tokens alone$",
    ),
    "positions that the mixing was not trained for": (
        lambda c: c.config(max_position_embeddings=32),
        CheckpointError,
        r"max_position_embeddings: 32, but the linear mixing of layer 0 is bound to the 16 tokens that it was trained",
    ),
    "another number of experts": (
        lambda c: c.config(num_experts=6),
        CheckpointError,
        r"config.json: num_experts: 6, but the weights of layer 1 hold 4$",
    ),
    "an expert missing in one tensor": (
        lambda c: c.weights(cut_expert),
        CheckpointError,
        r"config.json: num_experts: 4, but the weights of layer 1 hold 3$",
    ),
    "more experts than there are": (
        lambda c: c.arguments.update(submodels=["moe.experts5"]),
        PlanError,
        r"axis moe.experts: expected one of 1, 2, 3, 4, got 5$",
    ),
    "experts of tokens that choose": (
        lambda c: (c.config(router="tokens_choose"), c.arguments.update(submodels=["moe.experts2"])),
        PlanError,
        r"unknown axis kind 'moe.experts': this model has moe.capacity_factor, moe.group_size, or labels: ",
    ),
    "a router of whole numbers": (
        lambda c: c.weights(lambda w: w.update({ROUTER: np.zeros((4, 16), np.int8)})),
        CheckpointError,
        rf"tensor {ROUTER} holds I8; expected F32, F16 or BF16$",
    ),
    "a router that is not finite": (
        lambda c: c.weights(lambda w: w[ROUTER].__setitem__((0, 0), np.inf)),
        CheckpointError,
        rf"tensor {ROUTER} holds NaN or infinite values$",
    ),
    "experts of a dense layer": (
        lambda c: c.config(moe_layers=[1]),
        CheckpointError,
        r"tensor layers.2.ffn.up.weight is missing from the weights$",
    ),
}


@pytest.mark.parametrize(("damage", "error", "message"), MIXERS.values(), ids=MIXERS)
def test_mixers(case: Case, damage: Callable[[Case], object], error: type[NestforgeError], message: str) -> None:
    damage(case)
    refusal = case.refused()
    assert type(refusal) is error
    assert re.search(message, str(refusal)), str(refusal)


def test_more_slots_than_tokens_are_no_error_but_all_tokens(tmp_path: Path) -> None:
    """The rule for groups so small that the floor of slots exceeds them."""
    options = {"num_hidden_layers": 2, "attention_layers": (1,), "moe_layers": (0,), "capacities": (100,)}
    folder = save_tiny_mixer(tmp_path / "m", min_capacity=20, **options)
    bundle = compile_bundle(folder, board(budgets={"full": {}}), tmp_path / "b", buckets=[BUCKET])
    (engine,) = nestforge.open_bundle(bundle).manifest.engines
    metadata = engine.metadata or {}
    assert [metadata[key] for key in ("capacity", "capacity rounding", "min capacity")] == [16, "half_even", 20]


def test_a_router_that_ties_takes_the_lower_tokens(tmp_path: Path) -> None:
    """The rule for routers whose weights were rounded to half precision: float32 scores, ties to the lower index."""
    options = {"num_hidden_layers": 2, "attention_layers": (1,), "moe_layers": (0,), "capacities": (100,)}
    case = Case(tmp_path, save_tiny_mixer(tmp_path / "m", **options))
    parts = {"layers.0.moe.router.weight": (4, 16), "layers.0.moe.router.bias": (4,)}
    case.weights(lambda w: w.update({name: np.zeros(shape, np.float16) for name, shape in parts.items()}))
    bundle = compile_bundle(case.model, board(budgets={"full": {}}), case.output, buckets=[BUCKET])
    with nestforge.load(bundle) as model:
        (entry,) = model.bundle.manifest.submodels
        zeros = np.zeros((1, 16), np.int64)
        ids = np.random.default_rng(0).integers(1, 24, (1, 16))
        answer = model({"input_ids": ids, "token_type_ids": zeros}, submodel=entry.id, routing=True)
    assert answer.routing is not None
    np.testing.assert_array_equal(answer.routing["routes.0"], np.tile(np.arange(4), (1, 4, 1)))
