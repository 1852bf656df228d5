"""Values of shared options, as click reads them."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner
from nestforge.bucket import Bucket
from nestforge.profiles.budget import BudgetSpec
from nestforge.tools.options import (
    BucketType,
    BudgetType,
    LevelsType,
    VariantType,
    promotion_order_option,
    variant_option,
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


def test_the_old_name_of_variant_is_said_once_on_stderr() -> None:
    @click.command()
    @variant_option
    def show(variants: tuple[tuple[str, str], ...]) -> None:
        click.echo(str(dict(variants)))

    both = CliRunner().invoke(show, ["--variant", "moe.combine=gather", "--form", "mixing=folded"])
    assert both.stdout == "{'mixing': 'folded', 'moe.combine': 'gather'}\n"
    assert both.stderr == "--form is called --variant now; the next release takes that name alone\n"
    alone = CliRunner().invoke(show, ["--variant", "mixing=folded"])
    assert (alone.stdout, alone.stderr) == ("{'mixing': 'folded'}\n", "")
    twice = CliRunner().invoke(show, ["--form", "mixing=dense", "--variant", "mixing=folded"])
    assert twice.exit_code == 2
    assert "mixing is given 2 times; say it once" in twice.stderr


def test_the_old_name_of_promotion_order_is_said_once_on_stderr() -> None:
    @click.command()
    @promotion_order_option
    def show(promotion_order: str | None) -> None:
        click.echo(str(promotion_order))

    old = CliRunner().invoke(show, ["--shape", "up-down"])
    assert (old.stdout, old.stderr) == (
        "up-down\n",
        "--shape is called --promotion-order now; the next release takes that name alone\n",
    )
    new = CliRunner().invoke(show, ["--promotion-order", "down-up"])
    assert (new.stdout, new.stderr) == ("down-up\n", "")
    assert CliRunner().invoke(show, []).stdout == "None\n"
    both = CliRunner().invoke(show, ["--shape", "up-down", "--promotion-order", "down-up"])
    assert both.exit_code == 2
    assert "--shape is its old name; write --promotion-order alone" in both.stderr
    assert CliRunner().invoke(show, ["--shape", "flat"]).exit_code == 2
    assert "--shape" not in CliRunner().invoke(show, ["--help"]).stdout
