from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from nestforge.bucket import Bucket
from nestforge.compiler.job import plan
from nestforge.compiler.planning.candidate import VariantView, chosen_variants, variant_views, variant_workload
from nestforge.compiler.planning.cost_model import predict
from nestforge.elastic import Axis, ElasticSpec, Submodel
from nestforge.errors import PlanError
from nestforge.exporters.architecture import EVERY_VARIANT
from nestforge.exporters.source import open_source
from nestforge.workload import Op
from support.tiny_compile import board
from support.tiny_mhe import save_tiny_mhe, save_tiny_pair

SPEC = ElasticSpec((Axis("layers.0.ffn", 8), Axis("capacity", 100, (50, 100))), ())
BUCKET = Bucket(1, 4)
PROFILE = board()  # 10 GFLOPS, 5 of batched products, 5 GB/s, 1 us an operation


def product(name: str, mflops: float) -> Op:
    return Op(name, "gemm", round(mflops * 1e6), 0, 0)


@dataclass(frozen=True)
class HasVariants:
    """``sum`` in two variants: one of many small operations, one of few large products that grow with the tokens."""

    spec: ElasticSpec = SPEC
    few: float = 1.0
    variant_problems: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    onnxruntime_variants: frozenset[str] = frozenset()

    def variants(self, submodel: Submodel, bucket: Bucket) -> Mapping[str, Mapping[str, Sequence[Op]]]:
        many = [product(f"small.{index}", 0.001) for index in range(submodel["layers.0.ffn"] * 10)]
        return {"sum": {"many": many, "few": [product("large", self.few * bucket.tokens * submodel["capacity"] / 100)]}}

    def workload(self, submodel: Submodel, bucket: Bucket, variants: Mapping[str, str] | None = None) -> Sequence[Op]:
        return [product("rest", 1), *self.variants(submodel, bucket)["sum"][(variants or {})["sum"]]]


def chosen(few: float = 1.0, wanted: Mapping[str, str] | None = None, submodel: str = "capacity100") -> dict[str, str]:
    profile = board(variants=dict(wanted)) if wanted else PROFILE
    return chosen_variants(HasVariants(few=few), SPEC.parse(submodel), BUCKET, profile)


def test_the_cheapest_on_the_device() -> None:
    """80 small operations take 80 us beside their 8 us of products; a large one takes 100 us per million FLOPs."""
    assert chosen(few=0.05) == {"sum": "few"}
    assert chosen(few=1.0) == {"sum": "many"}


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({"sum": "tree"}, "variant sum=tree: this model's terms do not commute"),
        ({"sum": "fwe"}, "variant sum=fwe: expected one of many, few"),
        ({"sun": "few"}, "variant sun=few: no such computation in this model; did you mean 'sum'?"),
        ({"other": "few"}, "variant other=few: there is but one way"),
    ],
)
def test_a_variant_that_cannot_be_had_is_refused_with_the_reason(wanted: dict[str, str], problem: str) -> None:
    problems = {"sum": {"tree": "this model's terms do not commute"}, "other": {EVERY_VARIANT: "there is but one way"}}
    with pytest.raises(PlanError) as failure:
        chosen_variants(HasVariants(variant_problems=problems), SPEC.universal(), BUCKET, board(variants=wanted))
    assert str(failure.value) == problem


@pytest.mark.parametrize(
    ("device", "given"),
    [
        ({"backend": "tensorrt"}, "backend tensorrt"),
        ({"precision": ["fp32", "int8-dynamic"]}, "precision fp32, int8-dynamic"),
    ],
)
def test_what_onnxruntime_alone_computes_in_fp32(device: dict[str, Any], given: str) -> None:
    """The cheapest where it can be had; elsewhere the next, and refused where it is requested."""
    source = HasVariants(onnxruntime_variants=frozenset({"many"}))
    assert chosen_variants(source, SPEC.universal(), BUCKET, PROFILE) == {"sum": "many"}
    assert chosen_variants(source, SPEC.universal(), BUCKET, board(**device)) == {"sum": "few"}
    problem = f"an operator that ONNX Runtime alone has, and in fp32 alone; profile board has {given}"
    with pytest.raises(PlanError, match=f"^variant sum=many: {problem}$"):
        chosen_variants(source, SPEC.universal(), BUCKET, board(variants={"sum": "many"}, **device))


def test_of_equal_forms_the_first() -> None:
    @dataclass(frozen=True)
    class Equal(HasVariants):
        def variants(self, submodel: Submodel, bucket: Bucket) -> Mapping[str, Mapping[str, Sequence[Op]]]:
            return {"sum": {"one": [product("a", 1)], "other": [product("b", 1)]}}

    assert chosen_variants(Equal(), SPEC.universal(), BUCKET, PROFILE) == {"sum": "one"}


def test_submodels_of_one_structure_have_one_variant() -> None:
    """They share a template, whatever their widths make of the costs."""
    assert chosen(few=0.3, submodel="ffn1-capacity100") == chosen(few=0.3, submodel="ffn8-capacity100")
    assert chosen(few=0.3, submodel="capacity50") == {"sum": "few"}
    assert chosen(few=0.3, submodel="capacity100") == {"sum": "many"}


def test_what_the_profile_asks_for_wins() -> None:
    assert chosen(few=1.0, wanted={"sum": "few"}) == {"sum": "few"}


def test_costs_are_those_of_the_chosen_variant() -> None:
    for few, variant in ((0.05, "few"), (1.0, "many")):
        source = HasVariants(few=few)
        ops = variant_workload(source, SPEC.universal(), BUCKET, PROFILE)
        both = [*[product("rest", 1)], *source.variants(SPEC.universal(), BUCKET)["sum"][variant]]
        assert predict(ops, PROFILE) == predict(both, PROFILE)


def test_a_model_without_forms_refuses_them() -> None:
    source = open_source("preset:bert-base")
    universal = source.spec.universal()
    assert chosen_variants(source, universal, Bucket(1, 512), PROFILE) == {}
    with pytest.raises(PlanError, match=r"^variant sum=few: this model computes nothing in more than one variant$"):
        chosen_variants(source, universal, Bucket(1, 512), board(variants={"sum": "few"}))


def test_figures_without_a_device_count_the_first_variant() -> None:
    source = open_source("preset:sparse-mixer-small")
    universal, bucket = source.spec.universal(), Bucket(1, 512)
    first = {computed: next(iter(variants)) for computed, variants in source.variants(universal, bucket).items()}
    assert source.workload(universal, bucket) == source.workload(universal, bucket, first)
    other = source.workload(universal, bucket, {"moe.combine": "one_hot"})
    assert sum(op.flops for op in other) > sum(op.flops for op in source.workload(universal, bucket))


class ByShape:
    """``sum`` is cheapest in ``few`` products up to 4 tokens, ``copy`` always ``by_index``."""

    spec = ElasticSpec((Axis("capacity", 100, (50, 100)), Axis("sequence", 8, (4, 8))), ())
    variant_problems: Mapping[str, Mapping[str, str]] = {}
    onnxruntime_variants: frozenset[str] = frozenset()

    def variants(self, submodel: Submodel, bucket: Bucket) -> Mapping[str, Mapping[str, Sequence[Op]]]:
        few, many = product("few", bucket.tokens), product("many", 6)
        return {"sum": {"many": [many], "few": [few]}, "copy": {"by_index": [product("copy", 0)], "one_hot": [many]}}

    def workload(self, submodel: Submodel, bucket: Bucket, variants: Mapping[str, str] | None = None) -> Sequence[Op]:
        raise NotImplementedError


def test_views_are_of_every_submodel_at_its_own_buckets() -> None:
    device = replace(PROFILE, buckets=(Bucket(1, 4), Bucket(1, 8)))
    submodels = [ByShape.spec.parse("capacity50-sequence8"), ByShape.spec.parse("capacity100-sequence4")]
    few, many = ({"sum": variant, "copy": "by_index"} for variant in ("few", "many"))
    assert variant_views(ByShape(), submodels, device) == (
        VariantView("capacity50-sequence8", "b1-s8", many),
        VariantView("capacity100-sequence4", "b1-s4", few),
    )
    wanted = variant_views(ByShape(), submodels, replace(device, variants={"sum": "few"}))
    assert {view.variants["sum"] for view in wanted} == {"few"}
    with pytest.raises(PlanError, match="variant sum=none: expected one of many, few"):
        variant_views(ByShape(), submodels, replace(device, variants={"sum": "none"}))


def test_a_model_of_one_variant_has_no_views(tiny_folder: Path) -> None:
    source = open_source(tiny_folder)
    assert variant_views(source, [source.spec.universal()], PROFILE) == ()


def test_scales_of_several_forms_are_refused_before_any_work(tmp_path: Path) -> None:
    """Examples show what goes into the products of one form."""
    folder = save_tiny_mhe(tmp_path / "m", decoder=True, elastic_heads=False)
    device = board(precision=["int8"], variants={"attention": "literal"}, budgets={"full": {}})
    problem = (
        "^precision int8: activations are scaled by examples in one variant, and engines have attention=literal at 2x8 "
        "and attention=normal at `generate`; ask for one with `variants={'attention': 'normal'}`, or for int8-dynamic"
    )
    with pytest.raises(PlanError, match=problem):
        plan(folder, device, generate=True, measure=False)
    plan(folder, device, measure=False)
    plan(folder, replace(device, variants={"attention": "normal"}), generate=True, measure=False)


def test_each_role_of_attention_is_named_as_it_would_be_requested(tmp_path: Path) -> None:
    folder = save_tiny_pair(tmp_path / "m", elastic_heads=False)
    device = board(precision=["int8"], variants={"cross_attention": "literal"}, budgets={"full": {}})
    one_form = {f"{role}_attention": "normal" for role in ("encoder", "decoder", "cross")}
    with pytest.raises(
        PlanError, match=f"cross_attention=literal at 2x8 and .*; ask for one with `variants={one_form}`, or for"
    ):
        plan(folder, device, generate=True, measure=False)
    plan(folder, replace(device, variants=one_form), generate=True, measure=False)
