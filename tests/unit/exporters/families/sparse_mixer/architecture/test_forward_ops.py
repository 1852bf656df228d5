"""The paper's compute (Table 8), taken apart as its reference explains it, per example of 512 tokens."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from nestforge.bucket import Bucket
from nestforge.errors import PlanError
from nestforge.exporters.families.sparse_mixer.ops import elastic_spec, forward_ops, head_ops, variant_ops
from nestforge.exporters.families.sparse_mixer.presets import PRESETS
from nestforge.workload import Op, macs
from support.tiny_mixer import mixer_config

# The training groups of 4096 tokens.
EIGHT = Bucket(8, 512)
HEADS = ("head.", "pooler", "classifier")


def gflops(ops: Iterable[Op], examples: int = 1) -> float:
    """FLOPs of the matrix products, two per multiply-add, in units of 1e9 per example."""
    return 2 * macs(ops) / examples / 1e9


def parts(name: str, bucket: Bucket) -> dict[str, float]:
    """GFLOPs per example by part, with gathers; the heads at 80 predicted positions, as in the paper's training."""
    config = PRESETS[name]
    universal = elastic_spec(config).universal()
    body = [op for op in forward_ops(config, universal, bucket) if not op.name.startswith(HEADS)]
    for ops in variant_ops(config, universal, bucket).values():
        body += next(iter(ops.values()))
    found = {
        part: gflops((op for op in body if f".{part}." in op.name), bucket.batch)
        for part in ("ffn", "experts", "mixing", "attention")
    }
    found["router"] = gflops((op for op in body if op.name.endswith(".router")), bucket.batch)
    found["projection"] = gflops((op for op in body if op.name == "embeddings.projection"), bucket.batch)
    assert sum(found.values()) == pytest.approx(gflops(body, bucket.batch))
    return {**found, "heads": gflops(head_ops(config, 1, 80))}


def one_hot(name: str, bucket: Bucket) -> float:
    config = PRESETS[name]
    variants = variant_ops(config, elastic_spec(config).universal(), bucket)
    return gflops([*variants["moe.dispatch"]["one_hot"], *variants["moe.combine"]["one_hot"]], bucket.batch)


def test_sparse_mixer_base_part_by_part() -> None:
    found = {part: round(value, 1) for part, value in parts("sparse-mixer-base", EIGHT).items()}
    assert found == {
        "ffn": 21.5,
        "experts": 8.6,
        "mixing": 5.4,
        "attention": 6.4,
        "router": 0.0,
        "projection": 0.3,
        "heads": 2.7,
    }


@pytest.mark.parametrize(
    ("name", "gathers", "with_one_hot"),
    [("sparse-mixer-base", 44.8, 62.0), ("fast-sparse-mixer-base", 40.5, 49.1)],
)
def test_totals(name: str, gathers: float, with_one_hot: float) -> None:
    total = sum(parts(name, EIGHT).values())
    assert round(total, 1) == gathers
    assert round(total + one_hot(name, EIGHT), 1) == with_one_hot


def test_bert_base() -> None:
    """102 in Table 8."""
    found = parts("bert-base", Bucket(1, 512))
    assert {part: round(value, 1) for part, value in found.items() if value} == {
        "ffn": 58.0,
        "attention": 38.7,
        "projection": 0.6,
        "heads": 4.0,
    }
    assert round(sum(found.values()), 1) == 101.3


def test_half_the_capacity_saves_what_the_paper_prints() -> None:
    """73 - 60 = 13 GFLOPs in Table 8: 4.3 of experts and 8.6 of one-hot products."""
    names = ("sparse-mixer-base", "fast-sparse-mixer-base")
    mixer, fast = ((parts(name, EIGHT)["experts"], one_hot(name, EIGHT)) for name in names)
    saved = [whole - half for whole, half in zip(mixer, fast, strict=True)]
    assert [round(value, 1) for value in saved] == [4.3, 8.6]
    assert round(sum(saved)) == 13


@pytest.mark.parametrize(("batch", "ratio"), [(1, 0.25), (8, 2.0)])
def test_one_hot_against_experts_is_tokens_over_width(batch: int, ratio: float) -> None:
    bucket = Bucket(batch, 512)
    experts = parts("sparse-mixer-base", bucket)["experts"]
    assert one_hot("sparse-mixer-base", bucket) == pytest.approx(ratio * experts)


def test_the_heads_of_an_engine_predict_every_position() -> None:
    config = PRESETS["sparse-mixer-base"]
    ops = forward_ops(config, elastic_spec(config).universal(), Bucket(1, 512))
    found = gflops(op for op in ops if op.name.startswith(HEADS))
    assert found == pytest.approx(2 * (512 * (512 * 512 + 512 * 32_000) + 512 * 512 + 512 * 2) / 1e9)


def test_capacity_changes_no_weight_and_work_outside_the_experts() -> None:
    config = mixer_config()
    spec = elastic_spec(config)
    whole, half = (
        forward_ops(config, submodel, Bucket(2, 16))
        for submodel in (spec.universal(), spec.submodel({"moe.capacity_factor": 50}))
    )
    assert [op.weight_bytes for op in whole] == [op.weight_bytes for op in half]
    changed = {op.name for op, less in zip(whole, half, strict=True) if less != op}
    assert changed == {f"layers.{n}.moe.experts.{part}" for n in (1, 2) for part in ("activation", "gates")}


@pytest.mark.parametrize("mixing", ["linear", "circulant", "toeplitz"])
def test_learned_mixing_is_two_products(mixing: str) -> None:
    config = mixer_config(mixing=mixing)
    ops = forward_ops(config, elastic_spec(config).universal(), Bucket(2, 16))
    found = [op for op in ops if ".mixing." in op.name]
    assert macs(found) == 2 * 2 * (16 * 16 * 16 + 16 * 16 * 16)  # layers, batch, hidden and sequence
    assert sum(op.weight_bytes for op in found) == 2 * 4 * (16 * 16 + 16 * 16)


def test_a_capacity_without_slots_is_refused() -> None:
    config = mixer_config(min_capacity=0)
    quarter = elastic_spec(config).submodel({"moe.capacity_factor": 25})
    with pytest.raises(PlanError, match="rounds to 0 slots"):
        forward_ops(config, quarter, Bucket(1, 8))
