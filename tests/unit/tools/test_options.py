"""Values of shared options, as click reads them."""

from __future__ import annotations

import click
import pytest
from nestforge.bucket import Bucket
from nestforge.profiles.budget import BudgetSpec
from nestforge.tools.options import (
    BucketType,
    BudgetType,
    LevelsType,
    VariantType,
)


def test_bucket() -> None:
    assert BucketType()("1x128") == Bucket(1, 128)
    with pytest.raises(click.BadParameter, match="bucket '0x1': expected BATCHxSEQUENCE, such as 1x128"):
        BucketType()("0x1")


def test_levels() -> None:
    assert LevelsType()("ffn=0.25,0.5,1") == ("ffn", (0.25, 0.5, 1.0))


@pytest.mark.parametrize("text", ["ffn", "=1", "ffn=", "ffn=a,1", "ffn=0.5;1"])
def test_levels_that_cannot_be_read(text: str) -> None:
    with pytest.raises(click.BadParameter, match="expected an axis kind and fractions"):
        LevelsType()(text)


def test_budget() -> None:
    assert BudgetType()("flops<=2G") == ("flops<=2G", BudgetSpec(flops="2G"))
    with pytest.raises(click.BadParameter, match="unknown key 'flop'; did you mean 'flops'"):
        BudgetType()("flop<=1")


def test_a_variant_is_what_is_computed_and_how() -> None:
    assert VariantType()("moe.combine=one_hot") == ("moe.combine", "one_hot")
    assert VariantType()(" mixing = folded ") == ("mixing", "folded")
    for text in ("moe.combine", "moe.combine=", "=one_hot"):
        with pytest.raises(click.BadParameter, match="expected what is computed and its variant"):
            VariantType()(text)
