"""Tests."""

from dataclasses import replace
from typing import Any

import pytest
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.own_folder import config_from_json
from nestforge.exporters.families.coda.config import CodaConfig, stated_tokens_problem, tokens_of_layers
from nestforge.exporters.families.coda.family import PRESETS
from nestforge.exporters.source import open_source
from support.tiny_coda import SCHEDULE, coda_config

JSON = coda_config().to_json()
IMAGE = {"channels": 2, "height": 8, "width": 12, "patch_height": 4, "patch_width": 4}
IMAGE_JSON = {key: value for key, value in JSON.items() if key not in ("vocab_size", "max_position_embeddings")}
SCHEDULE_JSON = JSON["soft_top_k"]


def test_every_round_has_its_temperature() -> None:
    """4 * 0.7^t, not below the target (section 3.3)."""
    assert SCHEDULE.temperatures == pytest.approx((4.0, 2.8, 1.96))
    floored = replace(SCHEDULE, rounds=8).temperatures[-3:]
    assert floored == pytest.approx((0.67228, 0.5, 0.5))


def test_reductions_that_are_offered() -> None:
    assert coda_config(reduction=3, reductions=None).offered == (8, 5, 3)
    assert coda_config(reduction=16, reductions=None).offered == (16,)
    assert coda_config(max_position_embeddings=4, reductions=None).offered == (3, 2, 1)
    assert coda_config(reductions=(4, 1)).offered == (4, 1)
    assert coda_config(conditional_layers=(), reductions=None).offered == (1,)


def test_an_image_has_as_many_tokens_as_it_is_cut_into() -> None:
    config = config_from_json(CodaConfig, {**IMAGE_JSON, "image": IMAGE}, "m")
    assert (config.most_tokens, config.inputs) == (1 + 2 * 3, ("pixel_values",))
    assert config_from_json(CodaConfig, config.to_json(), "m") == config


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"reductions": [0]}, "reductions: 0: expected 1 to 24, the tokens of max_position_embeddings"),
    ({"reductions": [1, 2]}, "reductions: expected falling numbers, got [1, 2]"),
    ({"reductions": []}, "reductions: expected falling numbers, got []"),
    ({"reduction": 0}, "reduction: expected at least 1, got 0"),
    ({"reduction": 32, "reductions": None}, "reduction: 32: expected 1 to 24, the tokens of max_position_embeddings"),
    ({"conditional_layers": []}, "reductions: no layer is conditional"),
    ({"conditional_layers": [0, 2]}, "conditional_layers: expected rising numbers from 0 to 1, got [0, 2]"),
    ({"router": "sigmoid"}, "soft_top_k: expected with router soft_top_k alone, got some with sigmoid"),
    ({"soft_top_k": None}, "soft_top_k: expected with router soft_top_k alone, got none with soft_top_k"),
    ({"soft_top_k": {**SCHEDULE_JSON, "rounds": 129}}, "soft_top_k: rounds: expected at most 128, got 129"),
    (
        {"soft_top_k": {**SCHEDULE_JSON, "epsilon": 0}},
        "soft_top_k: epsilon: expected a number from 1e-06 to epsilon_start 4, got 0",
    ),
    (
        {"soft_top_k": {**SCHEDULE_JSON, "epsilon_decay": 1.5}},
        "soft_top_k: epsilon_decay: expected a number above 0 and at most 1, got 1.5",
    ),
    (
        {"router": "first_k", "soft_top_k": None, "selected_by": "gates"},
        "selected_by: first_k compares neither scores nor gates",
    ),
    ({"reductions": [4, 2]}, "reductions: [4, 2] lack 1, the reduction of training; add it"),
    (
        {"reduction": 2, "reductions": [4, 2], "reduction_of_one": "dense"},
        "reduction_of_one: dense says what r = 1 is, which reductions [4, 2] lack; add 1 to reductions, or leave",
    ),
    ({"image": IMAGE}, "vocab_size: got 40 beside image; expected one of them"),
    ({"vocab_size": None}, "vocab_size: missing; a model of texts needs it, and one of images has image in its place"),
    ({"max_position_embeddings": None}, "max_position_embeddings: missing; a model of texts needs it"),
    ({"norm_place": "after", "ffn_residual": "normed"}, "ffn_residual: expected raw with norm_place after, where a l"),
    ({"adapter": "lora"}, "adapter_activation: expected none with lora, got relu"),
    ({"adapter_activation": None}, "adapter_activation: expected one with adapter parallel, got none"),
    ({"num_key_value_heads": 3}, "num_key_value_heads: 3 do not divide num_attention_heads 4"),
    ({"position": "rotary", "head_dim": 7}, "position: rotary positions need heads of even size, got 7"),
    ({"softmax_scale": 0}, "softmax_scale: expected a number above 0, got 0"),
    ({"norm_eps": 1}, "norm_eps: expected a number between 0 and 1, got 1"),
    ({"granularities": {"heads": [1]}}, "granularities: this model has no axis kind 'heads'"),
]


@pytest.mark.parametrize(("change", "problem"), REFUSED, ids=[problem.partition(",")[0] for _, problem in REFUSED])
def test_refuses_in_one_line(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError) as error:
        config_from_json(CodaConfig, {**JSON, **change}, "m")
    assert str(error.value).startswith(f"m: {problem}")
    assert "\n" not in str(error.value)


def test_patches_larger_than_the_image_and_too_few_tokens_are_refused() -> None:
    for image, change, problem in (
        ({**IMAGE, "patch_width": 13}, {}, "image: patch_width: expected at most 12, the image's, got 13"),
        (IMAGE, {"type_vocab_size": 2}, "type_vocab_size: got 2 beside image; expected one of them"),
        (IMAGE, {"reductions": [8, 1]}, "reductions: 8: expected 1 to 7, the tokens of an image"),
    ):
        with pytest.raises(CheckpointError, match=f"^m: {problem}$"):
            config_from_json(CodaConfig, {**IMAGE_JSON, **change, "image": image}, "m")


@pytest.mark.parametrize("key", ["ffn_residual", "keys_of", "router", "reduction"])
def test_what_cannot_be_guessed_is_required(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"^m: missing key '{key}'$"):
        config_from_json(CodaConfig, {name: value for name, value in JSON.items() if name != key}, "m")


STATED = coda_config(reduction=2, reductions=(4, 2)).to_json()


def test_the_paper_s_pretraining_selects_192_of_512() -> None:
    stated = {"512": {"3": 192}}
    assert stated_tokens_problem(stated, (5, 3, 2, 1), 12, 512) is None
    assert tokens_of_layers(stated, 512, 3, 12) == (192,) * 12
    assert tokens_of_layers(stated, 512, 5, 2) == (103, 103)
    assert tokens_of_layers(None, 512, 3, 1) == (171,)


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        ({"25": {"4": 3}}, "'25': expected the tokens of a row, 1 to 24"),
        ({"08": {"4": 3}}, "'08': expected the tokens of a row, 1 to 24"),
        ({"8": {"3": 3}}, "8: 3: expected a reduction that is offered, 4, 2"),
        ({"8": {"1": 8}}, "8: 1: expected a reduction that is offered, 4, 2"),
        ({"3": {"4": 1}}, "3: 4: expected a reduction that is offered, 2"),
        ({"8": {"4": [1, 2, 3]}}, "8: 4: expected a number for each of 2 conditional layers, got 3"),
        ({"8": {"4": 9}}, "8: 4: expected 1 to 8 tokens, got 9"),
        ({"8": {"4": [2, 0]}}, "8: 4: expected 1 to 8 tokens, got 0"),
        ({"8": {"4": [2, 5]}}, "8: 4: selects more tokens of a layer than reduction 2 does"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(stated: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError) as error:
        config_from_json(CodaConfig, {**STATED, "tokens_selected": stated}, "m")
    assert str(error.value).startswith("m: tokens_selected")
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


# Published T5 v1.1 shapes: layers, d, f, heads.
SHAPES = {"base": (12, 768, 2048, 12), "large": (24, 1024, 2816, 16), "xl": (24, 2048, 5120, 32)}


@pytest.mark.parametrize("size", SHAPES)
def test_they_have_the_published_shapes(size: str) -> None:
    for kind in ("k-to-k", "k-to-all", "k-to-all-mq"):
        config = PRESETS[f"coda-t5-{size}-{kind}"]
        shape = (config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads)
        assert shape == SHAPES[size]
        assert (config.head_size, config.scale, config.gated_ffn, config.vocab_size) == (64, 1.0, True, 32128)
        assert config.problem() is None


def test_inspect_knows_them_without_weights() -> None:
    source = open_source("preset:coda-t5-base-k-to-k")
    whole = source.spec.universal()
    assert source.spec.axes[-1].choices == (8, 5, 4, 3, 2, 1)
    attention, ffn, norms = 4 * 768 * 768, 3 * 768 * 2048, 2 * 768
    adapter = 2 * 768 * 64 + 768 + 64
    layers = 12 * (attention + ffn + norms + adapter + 768)
    assert source.parameters(whole) == layers + 768 + 32_128 * 768 + 32 * 12
    assert source.named_groups(whole) == {"adapters": 12 * adapter, "routers": 12 * 768, "norms": 25 * 768}
