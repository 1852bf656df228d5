from __future__ import annotations

from typing import Any

import pytest
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.own_folder import config_from_json
from nestforge.exporters.families.coda.config import CodaConfig, stated_tokens_problem, tokens_of_layers
from support.tiny_coda import coda_config

JSON = coda_config(reduction=2, reductions=(4, 2)).to_json()


def test_the_paper_s_pretraining_selects_192_of_512() -> None:
    stated = {"512": {"3": 192}}
    assert stated_tokens_problem(stated, (5, 3, 2, 1), 12, 512) is None
    assert tokens_of_layers(stated, 512, 3, 12) == (192,) * 12
    assert tokens_of_layers(stated, 512, 5, 2) == (103, 103)
    assert tokens_of_layers(None, 512, 3, 1) == (171,)


def test_what_is_written_reads_back() -> None:
    stated = {"8": {"4": 3, "2": [4, 6]}}
    config = config_from_json(CodaConfig, {**JSON, "tokens_selected": stated}, "m")
    assert config.tokens_selected == {"8": {"4": 3, "2": (4, 6)}}
    assert config_from_json(CodaConfig, config.to_json(), "m") == config


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        ({"25": {"4": 3}}, "'25': expected the tokens of a row, 1 to 24"),
        ({"eight": {"4": 3}}, "'eight': expected the tokens of a row, 1 to 24"),
        ({"08": {"4": 3}}, "'08': expected the tokens of a row, 1 to 24"),
        ({"8": {"3": 3}}, "8: 3: expected a reduction that is offered, 4, 2"),
        ({"8": {"1": 8}}, "8: 1: expected a reduction that is offered, 4, 2"),
        ({"3": {"4": 1}}, "3: 4: expected a reduction that is offered, 2"),
        ({"8": {"4": [1, 2, 3]}}, "8: 4: expected a number for each of 2 conditional layers, got 3"),
        ({"8": {"4": 9}}, "8: 4: expected 1 to 8 tokens, got 9"),
        ({"8": {"4": [2, 0]}}, "8: 4: expected 1 to 8 tokens, got 0"),
        ({"8": {"4": [2, 5]}}, "8: 4: selects more tokens of a layer than reduction 2 does"),
        ({"8": {"2": [4, 1]}}, "8: 4: selects more tokens of a layer than reduction 2 does"),
        ({"8": {"4": 2.5}}, "8.4: expected a whole number, got float 2.5"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(stated: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError) as error:
        config_from_json(CodaConfig, {**JSON, "tokens_selected": stated}, "m")
    assert str(error.value).startswith("m: tokens_selected")
    assert problem in str(error.value)
    assert "\n" not in str(error.value)
