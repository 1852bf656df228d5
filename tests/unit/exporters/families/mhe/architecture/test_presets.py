"""The reference's parameter tables (sections 4.1 to 4.4) as ``nestforge inspect preset:...`` counts them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from nestforge.exporters.source import open_source

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
# Section 4.5: bytes of training one block, batch 32, L = 512.
TRAINING = {"mha": 72_351_744, "skv": 60_555_264, "mqa": 50_724_864, "el-att": 48_758_784, "mhe-mul": 39_957_504}


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


@pytest.mark.parametrize(("kind", "total"), TRAINING.items())
def test_training_memory_by_the_papers_rule(kind: str, total: int) -> None:
    """Weights 6, gradients 6 and Adam 8 bytes a parameter; activations batch x L x d_m x 2 bytes (docs/mhe.md)."""
    assert sum(groups(f"{kind}-encoder-base").values()) // 12 * 20 + 32 * 512 * 768 * 2 == total


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
