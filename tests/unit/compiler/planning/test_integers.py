from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from nestforge.compiler.request import plan
from nestforge.errors import PlanError
from support.tiny_compile import board
from support.tiny_mhe import save_tiny_mhe, save_tiny_pair


def test_scales_of_several_forms_are_refused_before_any_work(tmp_path: Path) -> None:
    """Examples show what goes into the products of one form."""
    folder = save_tiny_mhe(tmp_path / "m", decoder=True, elastic_heads=False)
    device = board(precision=["int8"], variants={"attention": "literal"}, budgets={"full": {}})
    problem = (
        "^precision int8: activations are scaled by examples in one variant, and engines have attention=literal at 2x8 "
        "and attention=normal at `generate`; ask for one with `variants={'attention': 'normal'}`, or for int8-dynamic"
    )
    with pytest.raises(PlanError, match=problem):
        plan(folder, device, generate=True, measure=False)
    plan(folder, device, measure=False)
    plan(folder, replace(device, variants={"attention": "normal"}), generate=True, measure=False)


def test_each_role_of_attention_is_named_as_it_would_be_asked_for(tmp_path: Path) -> None:
    folder = save_tiny_pair(tmp_path / "m", elastic_heads=False)
    device = board(precision=["int8"], variants={"cross_attention": "literal"}, budgets={"full": {}})
    one_form = {f"{role}_attention": "normal" for role in ("encoder", "decoder", "cross")}
    with pytest.raises(
        PlanError, match=f"cross_attention=literal at 2x8 and .*; ask for one with `variants={one_form}`, or for"
    ):
        plan(folder, device, generate=True, measure=False)
    plan(folder, replace(device, variants=one_form), generate=True, measure=False)
