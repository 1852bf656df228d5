"""FLOPs of the forms as section 7 of the reference has them: d_m = 768, n = 12, d = 64, L = 512."""

from __future__ import annotations

import pytest
from nestforge.bucket import Bucket
from nestforge.compiler.planning.cost_model import predict
from nestforge.exporters.families.mhe.config import PRESETS
from nestforge.exporters.families.mhe.forms import elastic_spec
from nestforge.exporters.families.mhe.ops import (
    Sublayer,
    encoding_ops,
    form_ops,
    forward_ops,
    plain_ops,
    step_ops,
    variant_ops,
)
from nestforge.workload import macs
from support.tiny_compile import board
from support.tiny_mhe import decoder_config, encoder_config, pair_config

L512 = Bucket(1, 512)
# Form: projections of queries, keys and values, and scores, in MFLOPs.
SECTION_7 = {
    "literal": (151.0, 402.7),
    "expanded": (1811.9, 402.7),
    "expanded_queries": (704.6, 402.7),
    "normal": (151.0, 402.7),
    "one_head": (151.0, 402.7),
    "shared_scores": (151.8, 33.6),
    "one_exponential": (151.8, 33.6),
}


@pytest.mark.parametrize(("form", "figures"), SECTION_7.items())
def test_flops_of_a_form(form: str, figures: tuple[float, float]) -> None:
    kind = "mhe-add" if form in ("shared_scores", "one_exponential") else "mhe-mul"
    ops = {op.name: op for op in form_ops(Sublayer(PRESETS[f"{kind}-encoder-base"], "a", L512, 12, 64))[form]}
    products = [op for op in ops.values() if op.kind == "gemm" and op.name != "a.output"]
    assert round(sum(op.flops for op in products) / 1e6, 1) == figures[0]
    assert round(ops["a.scores"].flops / 1e6, 1) == figures[1]
    assert round(ops["a.context"].flops / 1e6, 1) == 402.7
    assert round(ops["a.output"].flops / 1e6, 1) == 604.0


def test_scores_that_leave_the_caches_cost_more_than_one_operator() -> None:
    """12 heads of 128 tokens are 0.8 MB, of 512 tokens 12.6 MB."""
    for tokens, is_cheaper in ((128, False), (512, True)):
        ops = form_ops(Sublayer(PRESETS["mhe-mul-encoder-base"], "a", Bucket(1, tokens), 12, 64))
        normal, one_head = (predict(ops[form], board()).predicted_ms for form in ("normal", "one_head"))
        assert one_head < normal if is_cheaper else one_head == normal


def test_weights_that_a_form_reads() -> None:
    """Section 7: the normal form reads the seeds, the expanded one a projection for each head and role."""
    of = Sublayer(PRESETS["mhe-mul-encoder-base"], "a", Bucket(1, 1), 12, 64)
    read = {form: sum(op.weight_bytes for op in ops) // 4 - 768 * 768 for form, ops in form_ops(of).items()}
    assert read["normal"] == 147_456
    assert read["expanded_queries"] == 688_128
    assert read["expanded"] == 1_769_472


@pytest.mark.parametrize(("kind", "widths"), [("mha", 36), ("sha", 3), ("mqa", 14), ("skv", 24), ("el_att", 12)])
def test_kinds_without_head_embeddings(kind: str, widths: int) -> None:
    config = PRESETS[f"{kind.replace('_', '-')}-encoder-base"]
    scores = 1 if kind == "sha" else 12
    expected = 512 * 768 * 64 * widths + 2 * scores * 512**2 * 64 + 512 * 768 * 768
    assert macs(plain_ops(Sublayer(config, "a", L512, 12, 64))) == expected


def test_a_pass_leaves_out_what_has_forms() -> None:
    config = encoder_config()
    whole = elastic_spec(config).universal()
    assert not any(".attention." in op.name for op in forward_ops(config, whole, Bucket(1, 8)))
    (forms,) = variant_ops(config, whole, Bucket(1, 8)).values()
    assert list(forms) == ["normal", "one_head", "expanded_queries", "expanded", "literal"]
    plain = decoder_config(attention="mha")
    assert variant_ops(plain, whole, Bucket(1, 8)) == {}
    assert any(op.name == "layers.1.attention.scores" for op in forward_ops(plain, whole, Bucket(1, 8)))


def test_fewer_heads_cost_less() -> None:
    config = encoder_config()
    spec = elastic_spec(config)
    whole, half = spec.universal(), spec.from_kinds({"heads": [2]})
    for form in ("normal", "literal"):
        flops = [sum(op.flops for op in variant_ops(config, s, Bucket(1, 8))["attention"][form]) for s in (half, whole)]
        assert flops[0] < flops[1]


@pytest.mark.parametrize("attention", ["mha", "sha", "mqa", "skv", "el_att", "mhe_add", "mhe_mul"])
def test_a_prompt_and_a_step_are_parts_of_a_pass(attention: str) -> None:
    """One row of one token on each side: the encoder with what the decoder reads of it, and one step behind."""
    config = pair_config(attention=attention, num_decoder_layers=2)
    whole, one = elastic_spec(config).universal(), Bucket(1, 1)
    forms = variant_ops(config, whole, one)
    assert list(forms) == (["encoder_attention", "decoder_attention", "cross_attention"] if config.has_tables else [])
    normal = [op for offered in forms.values() for op in offered["normal"]]
    passed = [op for op in (*forward_ops(config, whole, one), *normal) if op.kind == "gemm"]
    parts = [*encoding_ops(config, whole, one), *step_ops(config, whole)]
    found = [op for op in parts if op.kind == "gemm" and "key_bias" not in op.name]
    assert sum(op.weight_bytes for op in found) == sum(op.weight_bytes for op in passed)


def test_a_step_reads_the_prompt_and_not_its_weights() -> None:
    """Section 6.8: keys and values of a prompt are made once, of all heads that share them together."""
    config = pair_config(attention="mhe_mul")
    whole = elastic_spec(config).universal()
    at = "decoder.layers.0.cross_attention."
    made = [op for op in encoding_ops(config, whole, Bucket(1, 8)) if op.name.startswith(at)]
    assert [(op.flops, op.weight_bytes) for op in made] == [(2 * 8 * 32 * 8, 32 * 8 * 4)] * 2
    step = {op.name.removeprefix(at): op for op in step_ops(config, whole) if op.name.startswith(at)}
    assert {name for name, op in step.items() if op.kind == "gemm"} == {"query", "output"}
    assert step["scores"].flops == 2 * 4 * 64 * 8
