"""What a user is told who asks for shared keys, or a form of them, of an ordinary checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from nestforge.exporters.hugging_face.attention_forms import attention_problems
from nestforge.exporters.source import open_source
from nestforge.tools.cli import main
from support.gated_decoders import save_decoder
from support.tiny_t5 import save_t5

RETRAINING = "(multi-query attention) is another function, which takes retraining, and nestforge does not do that"


@pytest.mark.parametrize(
    ("heads", "shared", "expected"),
    [
        (4, 4, "each head has keys and values of its own; making heads share one pair"),
        (4, 2, "4 heads share 2 pairs; making heads share one pair"),
        (4, 1, "all heads share keys and values already, engines that generate keep one pair of them"),
        (1, 1, "each head has keys and values of its own"),
    ],
)
def test_one_line_for_every_form(heads: int, shared: int, expected: str) -> None:
    ((problem,),) = (problems.values() for problems in attention_problems(heads, shared).values())
    assert problem.startswith(expected)
    assert (RETRAINING in problem) == (shared > 1 or heads == 1)


@pytest.mark.parametrize(("pairs", "expected"), [(2, "4 heads share 2 pairs"), (1, "all heads share keys and values")])
def test_the_command_says_it(tmp_path: Path, pairs: int, expected: str) -> None:
    folder = save_decoder(tmp_path / "m", num_attention_heads=4, num_key_value_heads=pairs)
    asked = ["plan", str(folder), "--profile", "raspberry-pi-5", "--variant", "attention=multi_query"]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 1
    assert f"variant attention=multi_query: {expected}" in result.output
    cached = open_source(folder).architecture.cached
    assert cached is not None
    assert {layer.heads for layer in cached.layers} == {pairs}, "forms C and D keep no fewer"


def test_t5_says_it_too(tmp_path: Path) -> None:
    problems = open_source(save_t5(tmp_path / "m", text=False)).variant_problems
    assert RETRAINING in problems["attention"]["*"]
