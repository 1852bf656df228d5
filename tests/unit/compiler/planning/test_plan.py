import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.bundle.manifest import Limits
from nestforge.compiler.planning.candidate import Candidate
from nestforge.compiler.planning.cost_model import Correction
from nestforge.compiler.planning.levels import PROMOTION_ORDERS, levels
from nestforge.compiler.planning.plan import Plan, make_plan
from nestforge.errors import PlanError
from nestforge.exporters.source import ModelSource, open_source
from nestforge.profiles.budget import BudgetSpec
from nestforge.profiles.device_profile import DeviceProfile, ProductRates
from nestforge.profiles.load_profile import load_profile
from nestforge.profiles.precision import Precision
from nestforge.strict import structure, unstructure
from support.bare_encoder import Encoder, encoder
from support.tiny_compile import board
from support.tiny_mixer import save_tiny_mixer


def device(budgets: Mapping[str, BudgetSpec], **changes: Any) -> DeviceProfile:
    pi = load_profile("raspberry-pi-5")
    return replace(pi, name="board", budgets=budgets, buckets=(Bucket(1, 32), Bucket(4, 32)), **changes)


def plan_for(source: Encoder | ModelSource, profile: DeviceProfile, **options: Any) -> Plan:
    return make_plan(source, profile, levels=levels(source.spec, profile.levels, profile.width_multiple), **options)


# Budgets.


def test_budget_without_limits_takes_the_universal_model() -> None:
    (budget,) = plan_for(encoder(), device({"full": BudgetSpec()})).budgets
    assert (budget.submodel, budget.limits) == ("ffn256-heads4", Limits())
    assert (budget.reason, budget.rejected) == ("no limits: the universal model", ())


def test_limit_that_the_universal_model_keeps() -> None:
    (budget,) = plan_for(encoder(), device({"roomy": BudgetSpec(parameters=10**6)})).budgets
    assert budget.reason == "the universal model keeps parameters 147,456 of 1,000,000"


def test_reason_and_rejections_name_limit_figure_and_unit() -> None:
    (budget,) = plan_for(encoder(layers=2), device({"small": BudgetSpec(parameters=60_000)})).budgets
    assert budget.submodel == "ffn128-heads2"
    assert budget.reason == (
        "rung 3 of 7 is the largest that keeps parameters 49,152 of 60,000; "
        "in the next, M+1, parameters 61,440 exceeds 60,000 by 1,440"
    )
    assert [(rejection.submodel, rejection.reason) for rejection in budget.rejected] == [
        ("ffn128x1_192x1-heads2x1_3x1", "parameters 61,440 exceeds 60,000 by 1,440"),
        ("ffn192-heads3", "parameters 73,728 exceeds 60,000 by 13,728"),
        ("ffn192x1_256x1-heads3x1_4x1", "parameters 86,016 exceeds 60,000 by 26,016"),
        ("ffn256-heads4", "parameters 98,304 exceeds 60,000 by 38,304"),
    ]


def test_shares_are_of_the_universal_models_own_figures() -> None:
    budget = BudgetSpec(latency_ms="50 %", memory_mb="100 %", parameters="25 %", flops="10 %")
    with pytest.raises(PlanError):  # the smallest level has 25 % of the FLOPs
        plan_for(encoder(), device({"half": budget}))
    plan = plan_for(encoder(), device({"half": replace(budget, flops="75 %")}))
    full = plan.candidates[-1].figures
    assert plan.budgets[0].limits == Limits(
        latency_ms=full["latency_ms"] / 2,
        memory_mb=full["memory_mb"],
        parameters=147_456 // 4,
        flops=int(full["flops"] * 0.75),
    )


def test_latency_and_flops_are_judged_at_the_largest_bucket() -> None:
    plan = plan_for(encoder(), device({"half": BudgetSpec(flops="50 %")}))
    assert plan.budget_bucket == Bucket(4, 32)
    assert plan.budgets[0].limits.flops == 2 * 128 * 147_456 // 2
    assert "compute (b4-s32) 18.87 MFLOP of 18.87 MFLOP" in plan.budgets[0].reason


def test_memory_of_the_device_limits_every_budget() -> None:
    plan = plan_for(encoder(), device({"full": BudgetSpec()}, memory_mb=1.5))
    (budget,) = plan.budgets
    # 4 bytes for each of 110,592 parameters, and 8 times the operands (128 rows of 64 and 192) of the largest product.
    assert plan.candidates[6].memory_mb == (4 * 110_592 + 8 * 4 * 128 * (64 + 192)) / 1e6
    assert plan.candidates[7].memory_mb == (4 * 122_880 + 8 * 4 * 128 * (64 + 256)) / 1e6
    assert (budget.submodel, budget.limits) == ("ffn192-heads3", Limits())
    overrun = "memory of board 1.80 MB exceeds 1.50 MB by 0.30 MB"
    assert budget.reason == (
        f"rung 7 of 10 is the largest that keeps the memory of the device; in the next, L+1, {overrun}"
    )
    assert (budget.rejected[0].submodel, budget.rejected[0].reason) == ("ffn192x2_256x1-heads3x2_4x1", overrun)


def test_budget_too_small_names_budget_limit_and_smallest_figure() -> None:
    with pytest.raises(PlanError) as failure:
        plan_for(encoder(), device({"full": BudgetSpec(), "tiny": BudgetSpec(parameters=1000)}))
    assert str(failure.value) == (
        "budget 'tiny': not even the smallest submodel S fits: parameters 36,864 exceeds 1,000 by 35,864; "
        "raise the limit, add smaller levels, or state other `budgets`"
    )
    with pytest.raises(PlanError, match=r"latency \(predicted, b4-s32\) 0\.\d{3} ms exceeds 0\.001 ms by 0\.\d{3} ms;"):
        plan_for(encoder(), device({"tiny": BudgetSpec(latency_ms=0.001)}))


@pytest.fixture(scope="module")
def matlm() -> ModelSource:
    """The paper's 850M model: 16 layers of 1536, vocabulary 256,000."""
    return open_source("preset:matlm-850m")


# Table 5, whose labels are these counts cut to whole millions; row 4 as its own parameter count demands.
TABLE_5 = {
    "226.8M": ("ffn1536", 226_749_440),
    "245.7M": ("ffn1536x12_3072x4", 245_629_952),
    "278.7M": ("ffn1536x5_3072x11", 278_670_848),
    "377.8M": ("ffn3072x8_6144x8", 377_793_536),
}


def test_mix_n_match_of_the_matformer_paper(matlm: ModelSource) -> None:
    table = 256_000 * 1537
    # Attention and norms with their biases, the bias of the down-projection, and the one of relative positions.
    unsliced = 16 * (4 * 1536**2 + 9 * 1536 + 32 * 16) + 2 * 1536
    budgets = {}
    for label, (_, parameters) in TABLE_5.items():
        budgets[f"{label} as printed"] = BudgetSpec(non_embedding_parameters=label)
        for name, limit in (("ffn_parameters", parameters - unsliced), ("parameters", parameters + table)):
            budgets[f"{label} {name}"] = BudgetSpec(**{name: limit})
            budgets[f"{label} one of {name} less"] = BudgetSpec(**{name: limit - 1})
    plan = plan_for(matlm, device(budgets, memory_mb=1e6))
    candidates = {candidate.id: candidate for candidate in plan.candidates}
    assert len(plan.candidates) == 49
    for budget in plan.budgets:
        expected, parameters = TABLE_5[budget.name.partition(" ")[0]]
        assert (budget.submodel == expected) != budget.name.endswith("less"), budget.name
        candidate = candidates[expected]
        assert candidate.non_embedding_parameters == parameters
        assert candidate.parameters == parameters + table
        assert candidate.ffn_parameters == parameters - unsliced


def test_reasons_name_the_parameters_that_are_meant(matlm: ModelSource) -> None:
    board = device({"a": BudgetSpec(non_embedding_parameters="245.7M"), "b": BudgetSpec(ffn_parameters="94.5M")})
    first, second = plan_for(matlm, replace(board, memory_mb=1e6)).budgets
    assert first.reason.startswith(
        "rung 21 of 49 is the largest that keeps non-embedding parameters 245,629,952 of 245,700,000; in the next, "
    )
    assert "keeps FFN parameters 94,402,560 of 94,500,000; in the next, " in second.reason
    assert first.limits == Limits(non_embedding_parameters=245_700_000)
    assert second.limits == Limits(ffn_parameters=94_500_000)


def test_ffn_parameters_need_feed_forward_networks() -> None:
    with pytest.raises(PlanError) as failure:
        plan_for(encoder(ffn=0), device({"small": BudgetSpec(ffn_parameters="50 %")}))
    assert str(failure.value) == ("budget 'small': ffn_parameters: this model has no feed-forward networks that shrink")


def test_the_promotion_order_is_the_profiles() -> None:
    budgets = {"half": BudgetSpec(parameters="45 %")}
    chosen = {
        order: plan_for(encoder(layers=4), device(budgets, promotion_order=order)).budgets[0].submodel
        for order in PROMOTION_ORDERS
    }
    assert chosen == {
        "increasing": "ffn64x1_128x3-heads1x1_2x3",
        "decreasing": "ffn128x3_64x1-heads2x3_1x1",
        "up-down": "ffn64x1_128x3-heads1x1_2x3",
        "down-up": "ffn128x1_64x1_128x2-heads2x1_1x1_2x2",
    }


share = st.none() | st.integers(40, 100).map("{} %".format)


@given(st.builds(BudgetSpec, *[share] * 6), st.integers(1, 6))
def test_chosen_rung_keeps_every_limit_and_the_next_does_not(budget: BudgetSpec, layers: int) -> None:
    plan = plan_for(encoder(layers), device({"any": budget}))
    (chosen,) = plan.budgets
    index = [candidate.id for candidate in plan.candidates].index(chosen.submodel)
    limits = {name: limit for name, limit in vars(chosen.limits).items() if limit is not None}

    def keeps(candidate: Candidate) -> bool:
        return all(candidate.figures[name] <= limit for name, limit in limits.items())

    assert [keeps(candidate) for candidate in plan.candidates[index : index + 2]] in ([True, False], [True])
    assert [rejection.submodel for rejection in chosen.rejected] == [c.id for c in plan.candidates[index + 1 :]]


@given(st.integers(1, 6), st.integers(1, 1024), st.integers(1, 16))
def test_figures_never_fall_along_the_ladder(layers: int, ffn: int, heads: int) -> None:
    for shape in (Bucket(1, 32), Bucket(4, 32)):
        plan = plan_for(encoder(layers, ffn, heads), device({"full": BudgetSpec()}, budget_at=shape))
        rows = [candidate.figures for candidate in plan.candidates]
        for name in rows[0]:
            values = [row[name] for row in rows]
            assert values == sorted(values)


# Notes of a plan beside its budgets.


def test_plan_is_pure_json_and_the_same_every_time() -> None:
    profile = device({"full": BudgetSpec(), "half": BudgetSpec(latency_ms="50 %")})
    first, second = (plan_for(encoder(ffn=200), profile) for _ in range(2))
    text = json.dumps(unstructure(first))
    assert text == json.dumps(unstructure(second))
    assert structure(Plan, json.loads(text), "plan", PlanError) == first


def test_candidate_figures() -> None:
    candidate = plan_for(encoder(layers=2), device({"full": BudgetSpec()})).candidates[1]
    assert (candidate.id, candidate.rung, candidate.labels) == ("ffn64x1_128x1-heads1x1_2x1", 1, ("S+1",))
    assert candidate.values == {"ffn": (64, 128), "heads": (1, 2)}
    assert candidate.parameters == 64 * 2 * (64 + 128) + 64 * 4 * 16 * (1 + 2)
    assert candidate.ffn_parameters == 64 * 2 * (64 + 128)
    assert candidate.non_embedding_parameters == candidate.parameters
    assert candidate.weight_bytes == 4 * candidate.parameters
    small, large = candidate.costs
    assert (small.bucket, large.flops) == (Bucket(1, 32), 2 * 128 * candidate.parameters)
    assert candidate.memory_mb == (candidate.weight_bytes + large.activation_bytes) / 1e6
    assert candidate.budget_cost == large


def test_the_shape_of_budgets_is_not_among_the_buckets() -> None:
    profile = replace(device({"full": BudgetSpec()}), buckets=(Bucket(1, 64, None, 1),), budget_at=Bucket(1, 32))
    candidate = plan_for(encoder(), profile).candidates[-1]
    assert [cost.bucket for cost in candidate.costs] == [Bucket(1, 64, None, 1)]
    assert candidate.budget_cost.bucket == Bucket(1, 32)
    assert candidate.figures["flops"] == candidate.budget_cost.flops == candidate.costs[0].flops / 2


def test_labels_name_levels_rungs_between_them_and_what_was_asked_for_beside() -> None:
    source = encoder(layers=2)
    beside = [source.spec.parse(name) for name in ("ffn64x1_256x1-heads4", "ffn128-heads2", "ffn256-heads1")]
    plan = plan_for(source, device({"full": BudgetSpec()}), submodels=beside)
    labels = {candidate.id: candidate.labels for candidate in plan.candidates}
    assert list(labels.values()) == [(one,) for one in ("S", "S+1", "M", "M+1", "L", "L+1", "XL", "a", "b")]
    assert labels["ffn256-heads1"] == ("b",)
    assert {name: one for name, one in labels.items() if "x" not in name} == {
        "ffn64-heads1": ("S",),
        "ffn128-heads2": ("M",),
        "ffn192-heads3": ("L",),
        "ffn256-heads4": ("XL",),
        "ffn256-heads1": ("b",),
    }


def test_corrections_replace_predictions_and_the_plan_says_so() -> None:
    profile = device({"fast": BudgetSpec(latency_ms=3.0)})
    raw = plan_for(encoder(), profile)
    slow = {(bucket, "fp32"): Correction(10.0, 10.0, 10.0, rungs=3) for bucket in profile.buckets}
    corrected = plan_for(encoder(), profile, corrections=slow)
    assert (raw.latency_basis, corrected.latency_basis) == ("predicted", "corrected")
    assert raw.candidates[0].costs[0].corrected_ms is None
    for before, after in zip(raw.candidates, corrected.candidates, strict=True):
        for old, new in zip(before.costs, after.costs, strict=True):
            assert new.predicted_ms == old.predicted_ms
            assert new.corrected_ms == pytest.approx(10 * old.predicted_ms)
    assert raw.budgets[0].submodel == "ffn256-heads4"
    assert "latency (corrected, b4-s32)" in corrected.budgets[0].reason
    assert corrected.budgets[0].submodel != "ffn256-heads4"


def test_submodels_asked_for_are_candidates_that_budgets_do_not_choose() -> None:
    source = encoder(layers=2)
    wanted = [source.spec.parse(text) for text in ("ffn256x1_192x1-heads4", "ffn72-heads1", "ffn64-heads1")]
    plan = plan_for(source, device({"big": BudgetSpec(parameters="99 %")}), submodels=wanted)
    # The last one is a rung already; the first would keep the limit and has more parameters than the chosen rung.
    assert [candidate.id for candidate in plan.candidates if candidate.rung is None] == [
        "ffn256x1_192x1-heads4",
        "ffn72-heads1",
    ]
    assert plan.budgets[0].submodel == "ffn192x1_256x1-heads3x1_4x1"
    assert plan.notes == (
        "ffn256x1_192x1-heads4: ffn shrinks with depth, which rungs of the increasing ladder never do",
        "ffn72-heads1: on no level: layers.0.ffn 72, layers.1.ffn 72",
    )


def test_rounding_is_noted() -> None:
    plan = plan_for(encoder(ffn=200), device({"full": BudgetSpec()}))
    assert plan.notes == (
        "S: ffn 50 of 200 rounded to 48 (a multiple of 8)",
        "M: ffn 100 of 200 rounded to 104 (a multiple of 8)",
        "L: ffn 150 of 200 rounded to 152 (a multiple of 8)",
    )


def test_an_optional_budget_that_nothing_keeps_is_left_out_and_said() -> None:
    budgets = {"full": BudgetSpec(), "tiny": BudgetSpec(parameters=1000, optional=True)}
    plan = plan_for(encoder(), device(budgets))
    assert [budget.name for budget in plan.budgets] == ["full"]
    assert plan.notes == (
        "budget 'tiny': not even the smallest submodel S fits: parameters 36,864 exceeds 1,000 by 35,864; "
        "raise the limit, add smaller levels, or state other `budgets`; "
        "this budget is optional and was left out",
    )


def test_a_submodel_of_a_shorter_sequence_costs_what_it_costs_at_its_own(tmp_path: Path) -> None:
    """Budgets hold at the largest bucket: there each candidate is judged at the shape that it has in its place."""
    dense: dict[str, Any] = {
        "attention_layers": (),
        "moe_layers": (),
        "num_experts": 0,
        "expert_intermediate_size": None,
    }
    source = open_source(save_tiny_mixer(tmp_path / "m", mixing="fourier", num_hidden_layers=2, **dense))
    profile = board(buckets=["1x16", "2x16"], budgets={"half": {"flops": "55 %"}})
    steps = levels(source.spec, {"sequence": (0.25, 0.5, 1.0)}, 8)
    plan = make_plan(source, profile, levels=steps)
    short = next(candidate for candidate in plan.candidates if candidate.id == "sequence8")
    assert [cost.bucket for cost in short.costs] == [Bucket(1, 16), Bucket(2, 16)]
    alone = sum(op.flops for op in source.workload(source.spec.parse("sequence8"), Bucket(2, 8)))
    assert short.figures["flops"] == alone
    assert plan.budgets[0].submodel == "sequence8"


# Precision.


def in_precisions(*precisions: Precision, **budgets: BudgetSpec) -> tuple[Encoder, DeviceProfile]:
    return encoder(layers=2), device(budgets, precisions=precisions)


def test_a_budget_takes_the_largest_rung_and_there_the_highest_precision() -> None:
    whole = plan_for(encoder(layers=2), device({"full": BudgetSpec()})).candidates[-1].parameters
    source, profile = in_precisions(
        "fp32", "int8", full=BudgetSpec(), equal=BudgetSpec(parameters=whole), small=BudgetSpec(latency_ms="70 %")
    )
    plan = plan_for(source, profile)
    assert [budget.submodel for budget in plan.budgets] == [
        "ffn256-heads4",
        "ffn256-heads4",
        "ffn256-heads4.int8",
    ]
    assert "in the next, XL, " in plan.budgets[-1].reason, "the next rung is the same submodel in fp32"


def test_every_rung_stands_once_in_each_precision_and_labels_say_which() -> None:
    source, profile = in_precisions("fp32", "int8", full=BudgetSpec())
    plan = plan_for(source, profile)
    plain = plan_for(encoder(layers=2), device({"full": BudgetSpec()}))
    assert [c.id for c in plan.candidates] == [id_ for c in plain.candidates for id_ in (f"{c.id}.int8", c.id)]
    labels = {c.id: c.labels for c in plan.candidates if c.labels}
    assert labels["ffn128-heads2"] == ("M",)
    assert labels["ffn128-heads2.int8"] == ("M.int8",)
    assert labels["ffn64x1_128x1-heads1x1_2x1.int8"] == ("S+1.int8",)
    assert {c.precision for c in plan.candidates if c.id.endswith(".int8")} == {"int8"}


def test_a_narrower_precision_moves_fewer_bytes_and_is_never_predicted_slower() -> None:
    source, profile = in_precisions("fp32", "int8", full=BudgetSpec())
    by_id = {c.id: c for c in plan_for(source, profile).candidates}
    narrow, wide = by_id["ffn256-heads4.int8"], by_id["ffn256-heads4"]
    for low, high in zip(narrow.costs, wide.costs, strict=True):
        assert low.flops == high.flops
        assert low.moved_bytes < high.moved_bytes
        assert low.predicted_ms < high.predicted_ms


def test_corrections_cover_every_bucket_and_precision_or_none() -> None:
    source, profile = in_precisions("fp32", "int8", full=BudgetSpec())
    first, _ = profile.buckets
    for missing in ({(bucket, "fp32") for bucket in profile.buckets}, {(first, "fp32"), (first, "int8")}):
        with pytest.raises(ValueError, match="one for every bucket and precision"):
            plan_for(source, profile, corrections=dict.fromkeys(missing, Correction(1, 1, 1, 1)))


def test_a_budget_that_nothing_keeps_names_what_comes_closest_in_any_precision() -> None:
    smallest = plan_for(*in_precisions("fp32", "int8", full=BudgetSpec())).candidates[:2]
    assert [c.id for c in smallest] == ["ffn64-heads1.int8", "ffn64-heads1"]
    latency, parameters = smallest[0].figures["latency_ms"], smallest[0].parameters
    source, profile = in_precisions("fp32", "int8", tiny=BudgetSpec(latency_ms=latency / 2, parameters=parameters))
    with pytest.raises(PlanError) as failure:
        plan_for(source, profile)
    assert str(failure.value) == (
        "budget 'tiny': no submodel fits in any precision; S.int8 comes closest: "
        f"latency (predicted, b4-s32) {latency:.3f} ms exceeds {latency / 2:.3f} ms by {latency / 2:.3f} ms; "
        "raise the limit, add smaller levels, or state other `budgets`"
    )


def test_what_comes_closest_may_be_the_wider_precision() -> None:
    source, profile = in_precisions("fp32", "int8", tiny=BudgetSpec(latency_ms=1e-6))
    slow = {"int8": ProductRates(1e-3, 1e-3)}
    with pytest.raises(PlanError, match=r"in any precision; S comes closest: latency"):
        plan_for(source, replace(profile, rates=replace(profile.rates, at=slow)))


def test_a_precision_that_no_budget_chose_is_noted() -> None:
    plan = plan_for(*in_precisions("fp32", "int8", full=BudgetSpec()))
    assert plan.notes == ("int8: no budget chose it; `include='levels'` builds it all the same",)
    both = plan_for(*in_precisions("fp32", "int8", full=BudgetSpec(), small=BudgetSpec(latency_ms="70 %")))
    assert both.notes == ()
    assert plan_for(encoder(layers=2), device({"full": BudgetSpec()}, precisions=("int8",))).notes == ()


def test_a_source_in_other_precisions_than_the_profiles_is_refused(matlm: ModelSource) -> None:
    profile = device({"full": BudgetSpec()}, precisions=("int8",))
    with pytest.raises(ValueError, match=r"precisions: the source has \('fp32',\), the profile \('int8',\)"):
        plan_for(matlm, profile)
    (full,) = plan_for(replace(matlm, precisions=("int8",)), profile).budgets
    assert full.submodel == matlm.spec.universal().id


def test_a_note_says_that_rates_were_measured_on_a_busy_host() -> None:
    profile = device({"full": BudgetSpec()})
    busy = replace(profile, rates=replace(profile.rates, others_share=0.85))
    (note,) = plan_for(encoder(), busy).notes
    assert note == (
        "profile board: other programs used 85% of the CPUs (at most 20%) while its rates were measured, so that "
        "predicted latencies are too high; `nestforge profile` measures them again once the host is quiet"
    )
    assert plan_for(encoder(), profile).notes == ()


def test_a_plan_is_short_to_print_and_a_table_in_a_notebook() -> None:
    plan = plan_for(encoder(layers=2), device({"full": BudgetSpec(), "small": BudgetSpec(parameters=60_000)}))
    assert repr(plan).endswith(" for board, 7 candidates; full: ffn256-heads4, small: ffn128-heads2)")
    shown = plan._repr_html_()
    assert "<th>budget small</th><td>rung 3 of 7 is the largest" in shown
    assert shown.count("<td>small</td></tr>") == 1
    assert "&lt;b&gt;" in replace(plan, model="<b>")._repr_html_()
