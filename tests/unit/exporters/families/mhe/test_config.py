"""The reference's parameter tables (sections 4.1 to 4.4) as ``nestforge inspect preset:...`` counts them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.own_folder import config_from_json
from nestforge.exporters.families.mhe.config import PRESETS, MheEncoderConfig, MheEncoderDecoderConfig
from nestforge.exporters.source import open_source
from support.tiny_mhe import TINY_MHE

ENCODER: dict[str, Any] = {**TINY_MHE, "factors": "e", "model_type": "mhe_encoder"}
PAIR: dict[str, Any] = {**ENCODER, "model_type": "mhe_encoder_decoder", "decoder_start_token_id": 0}


def read(**changes: Any) -> MheEncoderConfig:
    data = {key: value for key, value in {**ENCODER, **changes}.items() if value is not ...}
    return config_from_json(MheEncoderConfig, data, "config.json")


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_written_reads_back(name: str) -> None:
    config = PRESETS[name]
    assert config_from_json(type(config), json.loads(json.dumps(config.to_json())), "here") == config


@pytest.mark.parametrize(
    ("attention", "heads"),
    [("mha", True), ("sha", False), ("mqa", True), ("skv", True), ("el_att", False), ("mhe_add", True)],
)
def test_what_shrinks_of_heads(attention: str, heads: bool) -> None:
    """How many there are where one can be left out, in a decoder of both its attentions; or how many numbers each has,
    at a scale that stays."""
    kind: dict[str, Any] = {"attention": attention, "factors": ...}
    assert read(**kind).kinds == (("ffn", "heads") if heads else ("ffn",))
    assert read(**kind, elastic_heads=False).kinds == ("ffn",)
    data = {key: value for key, value in PAIR.items() if key != "factors"}
    pair = config_from_json(MheEncoderDecoderConfig, {**data, "attention": attention}, "config.json")
    assert (pair.kinds, pair.decoder_layers) == (("ffn", "heads", "cross_heads") if heads else ("ffn",), 2)
    if attention != "el_att":
        config = read(**kind, layout="width_first")
        assert (config.kinds, config.axis_size, config.step, config.scale) == (("ffn", "head_width"), 8, 4, 8**-0.5)


def test_levels_of_a_nested_model() -> None:
    assert read().levels is None
    assert read(nested=True).levels == {"ffn": (0.25, 0.5, 0.75, 1.0), "heads": (0.25, 0.5, 0.75, 1.0)}
    assert read(nested=True, granularities={"ffn": [0.5, 1.0]}).levels == {"ffn": (0.5, 1.0)}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"num_attention_heads": 5},
            "num_attention_heads: 5 heads do not divide hidden_size 32; state head_dim where heads have another size",
        ),
        ({"factors": ...}, 'factors: expected "e" or "1+e", got None with mhe_mul'),
        ({"factors": "e", "attention": "mhe_add"}, "factors: expected with mhe_mul alone, got 'e' with mhe_add"),
        ({"softmax_scale": 0.0}, "softmax_scale: expected a number above 0, got 0"),
        ({"position": "rotary", "head_dim": 7}, "position: rotary positions need heads of even size, got 7"),
        (
            {"attention": "el_att", "factors": ..., "head_dim": 4},
            "head_dim: el_att reads keys and values from slices of the hidden state, so that 4 heads need size 8, ",
        ),
        (
            {"attention": "el_att", "factors": ..., "layout": "width_first"},
            "layout: el_att reads keys and values from slices of the hidden state; expected heads_first",
        ),
        ({"position": "rotary", "layout": "width_first"}, "layout: rotary positions turn each number of a head with o"),
        (
            {"granularities": {"heads": [1.0], "head_width": [1.0]}},
            "granularities: expected heads or head_width, got both; what layout has in front is one range of bytes",
        ),
        ({"head": "classifier"}, "num_labels: expected with head classifier alone, got None with classifier"),
        ({"num_labels": 3}, "num_labels: expected with head classifier alone, got 3 with none"),
        ({"granularities": {"experts": [1.0]}}, "granularities: this model has no axis kind 'experts'"),
        ({"num_hidden_layers": 1025}, "num_hidden_layers: expected at most 1024, got 1025"),
    ],
)
def test_what_makes_no_model_is_one_line(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json: {re.escape(problem)}"):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"decoder_start_token_id": 40}, "decoder_start_token_id: expected a token of the vocabulary, 0..39, got 40"),
        ({"num_decoder_layers": 1025}, "num_decoder_layers: expected at most 1024, got 1025"),
        ({"position": "rotary"}, "position: expected learned in an encoder-decoder, whose attentions read two texts"),
        ({"num_attention_heads": 5}, "num_attention_heads: 5 heads do not divide hidden_size 32"),
    ],
)
def test_what_makes_no_translation_model(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json: {re.escape(problem)}"):
        config_from_json(MheEncoderDecoderConfig, {**PAIR, **changes}, "config.json")


QKV, OUTPUT = "attention q/k/v", "attention output"
# Section 4.1: queries, keys and values of one sublayer, d_m = 768, n = 12, d = 64.
ONE_SUBLAYER = {
    "sha": 147_456,
    "mha": 1_769_472,
    "el-att": 589_824,
    "mqa": 688_128,
    "skv": 1_179_648,
    "mhe-add": 149_760,
    "mhe-mul": 149_760,
}
# Section 4.3: 12 layers with the output projection, in millions.
WITH_OUTPUT = {
    "mha": 28.31,
    "skv": 21.23,
    "mqa": 15.34,
    "el-att": 14.16,
    "mhe-add": 8.88,
    "mhe-mul": 8.88,
    "sha": 8.85,
}
# Section 4.4: queries, keys and values of GPT-3's shape, in billions.
GPT3 = {"mha": 43.48, "skv": 28.99, "mqa": 14.80, "el-att": 14.50, "mhe-add": 0.46, "mhe-mul": 0.46}


def groups(preset: str) -> dict[str, int]:
    source = open_source(f"preset:{preset}")
    return source.named_groups(source.spec.universal())


@pytest.mark.parametrize(("kind", "count"), ONE_SUBLAYER.items())
@pytest.mark.parametrize("shape", ["encoder-base", "decoder-base"])
def test_one_sublayer_and_twelve_layers(kind: str, count: int, shape: str) -> None:
    found = groups(f"{kind}-{shape}")
    assert found == {QKV: 12 * count, OUTPUT: 12 * 589_824}
    assert round(sum(found.values()) / 1e6, 2) == WITH_OUTPUT[kind]


@pytest.mark.parametrize(("kind", "billions"), GPT3.items())
def test_the_shape_of_gpt3(kind: str, billions: float) -> None:
    """The reference cuts 43.486 to 43.48 and rounds the others."""
    found = groups(f"{kind}-decoder-gpt3")[QKV] / 1e9
    assert abs(found - billions) < 0.007


def test_training_memory_by_the_papers_rule() -> None:
    """Section 4.5, at batch 32 and L = 512: weights 6, gradients 6 and Adam 8 bytes a parameter, activations batch x L
    x d_m x 2; the row of docs/mhe.md."""
    page = (Path(__file__).parents[5] / "docs" / "mhe.md").read_text()
    kinds = ("mha", "skv", "mqa", "el-att", "mhe-mul")
    parameters = [sum(groups(f"{kind}-encoder-base").values()) // 12 for kind in kinds]
    row = " | ".join(f"{20 * count + 32 * 512 * 768 * 2:,}" for count in parameters)
    assert row == "72,351,744 | 60,555,264 | 50,724,864 | 48,758,784 | 39,957,504"
    assert f"| bytes of training one block | {row} |" in page


# Section 4.4: 6 and 6 layers of 512, 8 heads, 18 sublayers with the cross-attention's, in millions.
TRANSLATION = {
    "mha": 18.87,
    "skv": 14.16,
    "mqa": 10.62,
    "el-att": 9.44,
    "mhe-add": 6.52,
    "mhe-mul": 6.52,
    "sha": 6.49,
}


@pytest.mark.parametrize(("kind", "millions"), TRANSLATION.items())
def test_eighteen_sublayers_of_a_translation_model(kind: str, millions: float) -> None:
    found = groups(f"{kind}-encoder-decoder-base")
    assert found[OUTPUT] == 18 * 512 * 512
    assert round(sum(found.values()) / 1e6, 2) == millions
    if kind.startswith("mhe"):
        assert found[QKV] == 18 * (3 * 512 * 64 + 3 * 8 * 64)


def test_inspect_shows_both_counts_without_torch() -> None:
    code = "import sys; from nestforge.tools.cli import main; main.main(sys.argv[1:], standalone_mode=False); " + (
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, "inspect", "preset:mhe-mul-encoder-base", "--profile", "raspberry-pi-5"]
    view = json.loads(subprocess.run([*command, "--json"], check=True, capture_output=True, text=True).stdout)
    assert view["levels"][-1]["groups"] == {QKV: 12 * 149_760, OUTPUT: 12 * 589_824}
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "M attention q/k/v" in shown
    assert "M attention output" in shown
