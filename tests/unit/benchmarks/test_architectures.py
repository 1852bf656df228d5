"""The tool behind `make zoo`, on a sample of transformers' types, and the tables that it writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from nestforge.benchmarks.architecture_tables import main_tables, read_found

SAMPLE = {"olmo2": "Olmo2ForCausalLM", "convnext": "ConvNextModel", "led": "LEDForConditionalGeneration"}


def test_a_sample_is_tried_and_tabled(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nestforge.benchmarks.architectures", "--jobs", "2"]
    subprocess.run([*command, "--results", str(tmp_path / "found"), *SAMPLE], check=True, capture_output=True)
    by_class = read_found(tmp_path / "found")
    found = {f"{kind}/{name}": by_class.pop(f"{kind}/{name}") for kind, name in SAMPLE.items()}
    assert by_class == {}
    text, image, refused = found.values()
    assert (text["result"], text["generates"], text["axes"]) == ("range", "tokens", "ffn")
    assert (image["result"], image["axes"]) == ("batch", "ffn")
    # PyTorch itself runs it, so it counts as refused.
    assert (refused["result"], refused["torch"]) == ("not understood", "")
    assert "LEDForConditionalGeneration does not run without numbers at modeling_led.py" in refused["reason"]
    text_key, image_key, refused_key = found
    lines = main_tables(found, [text_key, refused_key, "bert/BertModel", image_key], "transformers")
    assert lines[0].startswith("transformers: 3 of 4 types tried, the first 2 of an order at random, which are the sam")
    assert "| compile and pass, of those that PyTorch runs | 1 of 2, 50 % | 2 of 3, 67 % |" in lines
    writes = "| write what transformers' `generate` writes, of classes that write and compile | 1 of 1, 100 % |"
    assert f"{writes} 1 of 1, 100 % |" in lines
    assert "| inputs of one size, any batch | 1 | `convnext` |" in lines
    assert any(line.startswith("| `led` | not understood | `LEDForConditionalGeneration does not") for line in lines)
