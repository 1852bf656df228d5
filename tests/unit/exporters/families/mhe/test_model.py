"""The model, and FLOPs of its forms as section 7 of the reference has them: d_m = 768, n = 12, d = 64, L = 512."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.compiler.planning.cost_model import predict
from nestforge.exporters.families.mhe.attention import fold, in_forms
from nestforge.exporters.families.mhe.config import PRESETS, MheConfig
from nestforge.exporters.families.mhe.forms import (
    elastic_spec,
    folded_shapes,
    folded_slices,
    held_forms,
    parameters,
    places_of,
)
from nestforge.exporters.families.mhe.model import MheEncoder, made, turned
from nestforge.exporters.families.mhe.ops import (
    Sublayer,
    encoding_ops,
    form_ops,
    forward_ops,
    plain_ops,
    step_ops,
    variant_ops,
)
from nestforge.exporters.modules.layers import on_same_weights
from nestforge.workload import macs
from support.tiny_compile import board
from support.tiny_mhe import decoder_config, encoder_config, pair_config, tiny_mhe

LIMIT = 1e-12
KINDS = ["mha", "sha", "mqa", "skv", "mhe_add", "mhe_mul", "mhe_mul 1+e"]
# The numbers of a head of 8.
KEPT = 5


def config(kind: str, config_of: Any = encoder_config, **overrides: Any) -> MheConfig:
    attention, *stored = kind.split()
    settings = {"factors": stored[0]} if stored else {}
    return config_of(attention=attention, attention_bias=True, **settings, **overrides)


def asked(model: Any) -> torch.Tensor:
    ids = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    return model(
        *{1: (ids,), 2: (ids, mask), 3: (ids, mask, (ids + 7)[:, :5] % 40)}[model.forward.__code__.co_argcount - 1]
    )


def narrowed(model: Any, kept: int = KEPT) -> Any:
    """As the compiler narrows it: the first numbers of every head, or the first heads, by what the spec says."""
    spec, narrow = elastic_spec(model.config), on_same_weights(model)
    submodel = spec.submodel({axis.name: kept for axis in spec.axes if axis.kind != "ffn"})
    for name, parameter in list(narrow.named_parameters()):
        view = parameter.data
        for cut in spec.slices_of(name):
            view = view.narrow(cut.dim, 0, submodel[cut.axis] * cut.unit)
        at, _, own = name.rpartition(".")
        setattr(narrow.get_submodule(at), own, torch.nn.Parameter(view, False))
    return narrow


def cut_by_hand(model: Any) -> Any:
    """The first numbers of every head of a model that has heads in front, as a model of such heads: what scores are
    multiplied by stays."""
    before: MheConfig = model.config
    n, d = before.num_attention_heads, before.head_size
    found = made(replace(before, head_dim=KEPT, softmax_scale=d**-0.5)).to(torch.float64).eval()
    own = dict(model.named_parameters())
    for name, parameter in found.named_parameters():
        value = own[name]
        for dim, (have, want) in enumerate(zip(value.shape, parameter.shape, strict=True)):
            if have != want:
                heads = have // d
                assert heads in (1, n)
                value = value.unflatten(dim, (heads, d)).narrow(dim + 1, 0, KEPT).flatten(dim, dim + 1)
        parameter.data = value.data.clone()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config_of", [encoder_config, decoder_config, pair_config], ids=["encoder", "decoder", "pair"])
def test_a_turned_model_is_the_same_and_its_narrow_heads_are_those_cut_by_hand(config_of: Any, kind: str) -> None:
    model = tiny_mhe(config(kind, config_of)).double()
    other = turned(model)
    assert (asked(other) - asked(model)).abs().max() < LIMIT
    assert (asked(narrowed(other)) - asked(cut_by_hand(model))).abs().max() < LIMIT
    back = dict(turned(other).named_parameters())
    assert all(torch.equal(back[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("kind", ["mhe_add", "mhe_mul", "mhe_mul 1+e"])
@pytest.mark.parametrize("config_of", [encoder_config, decoder_config, pair_config], ids=["encoder", "decoder", "pair"])
def test_every_form_of_narrow_heads(config_of: Any, kind: str) -> None:
    """In float64, against the literal module as it is narrowed."""
    model = narrowed(tiny_mhe(config(kind, config_of, layout="width_first")).double())
    roles, expected = {place.role for place in places_of(model.config)}, asked(model)
    for form in held_forms(model.config):
        assert (asked(in_forms(model, dict.fromkeys(roles, form))) - expected).abs().max() < LIMIT, form


@pytest.mark.parametrize("kind", ["mhe_add", "mhe_mul"])
@pytest.mark.parametrize(("layout", "kept"), [("heads_first", 3), ("width_first", KEPT)])
def test_slicing_first_and_folding_second_is_a_prefix_of_what_is_folded(kind: str, layout: str, kept: int) -> None:
    """Section 8, to the bit, in float32."""
    model = tiny_mhe(config(kind, layout=layout))
    whole, narrow = model.layers[0].attention, narrowed(model, kept).layers[0].attention
    axis = places_of(model.config)[0].axis
    for name, cut in folded_slices(model.config, "", axis).items():
        folded = fold(whole, name.removeprefix("."))
        assert tuple(folded.shape) == folded_shapes(model.config, "")[name]
        expected = folded if cut is None else folded.narrow(cut.dim, 0, kept * cut.unit)
        assert torch.equal(fold(narrow, name.removeprefix(".")), expected), name


def test_places_are_those_that_are_given() -> None:
    embeddings, ids = tiny_mhe(decoder_config()).embeddings, torch.tensor([[3, 1, 2]])
    assert torch.equal(embeddings(ids, position_ids=torch.tensor([[0, 1, 2]])), embeddings(ids))
    assert torch.equal(embeddings(ids[:, 1:], position_ids=torch.tensor([[1, 2]])), embeddings(ids)[:, 1:])
    rotary = tiny_mhe(decoder_config(position="rotary")).embeddings
    assert torch.equal(rotary(ids, position_ids=torch.tensor([[7, 8, 9]])), rotary.word(ids))


def test_heads_start_alike_however_their_factors_are_stored() -> None:
    """Section 2.2: at the beginning values pass through mhe_mul unchanged, nearly."""
    for factors in ("e", "1+e"):
        model = MheEncoder(encoder_config(factors=factors))
        for role in ("query", "key", "value"):
            found = model.layers[0].attention.factors(role).detach()
            assert found.shape == (4, 8)
            assert 0.8 < float(found.min()) < 1 < float(found.max()) < 1.2
    assert (model.embeddings.norm.weight == 1).all()
    assert (model.layers[0].ffn.up.bias == 0).all()


DRAW = torch.Generator().manual_seed(0)
READ, WRITTEN = torch.randint(0, 40, (2, 7), generator=DRAW), torch.randint(0, 40, (2, 5), generator=DRAW)
MASK = torch.ones_like(READ).index_fill(1, torch.tensor([5, 6]), 0)


@pytest.mark.parametrize("attention", ["mha", "sha", "mhe_add", "mhe_mul"])
def test_a_position_sees_the_first_text_and_what_is_written_up_to_it(attention: str) -> None:
    model = tiny_mhe(pair_config(attention=attention, num_decoder_layers=2))
    logits = model(READ, MASK, WRITTEN)
    assert logits.shape == (2, 5, 40)
    changed = WRITTEN.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 40
    other = model(READ, MASK, changed)
    torch.testing.assert_close(other[:, :3], logits[:, :3], rtol=0, atol=1e-5)
    assert (other[:, 3:] - logits[:, 3:]).abs().amax((0, 2)).min() > 1e-3, "and later positions see it"
    padded, read = READ.clone(), READ.clone()
    padded[:, 6], read[:, 4] = (padded[:, 6] + 1) % 40, (read[:, 4] + 1) % 40
    torch.testing.assert_close(model(padded, MASK, WRITTEN), logits, rtol=0, atol=1e-5)
    assert (model(read, MASK, WRITTEN) - logits).abs().amax((0, 2)).min() > 1e-3, "every position reads the first text"


def test_a_matrix_of_its_own_back_to_the_vocabulary() -> None:
    config = pair_config(tie_word_embeddings=False)
    model = tiny_mhe(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes == parameters(config).shapes
    before = model(READ, MASK, WRITTEN)
    model.lm_head.weight *= 2
    torch.testing.assert_close(model(READ, MASK, WRITTEN), 2 * before)


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
