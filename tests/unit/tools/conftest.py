"""One tiny bundle, compiled once, for every test of the command line."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from nestforge.bucket import Bucket
from nestforge.compiler.compile import compile_bundle
from nestforge.profiles.budget import BudgetSpec
from nestforge.profiles.load_profile import dump_profile, load_profile
from support.tiny_models import add_pooling, corpus, save_tiny_encoder


@dataclass(frozen=True)
class Compiled:
    """A model folder, a profile for another device than this one (1x8, budgets ``full`` and ``small``), the bundle."""

    model: Path
    profile: Path
    bundle: Path


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("compiled")
    model = save_tiny_encoder(folder / "tiny")
    add_pooling(model)
    budgets = {"full": BudgetSpec(), "small": BudgetSpec(parameters="80 %")}
    shapes = {"buckets": (Bucket(1, 8),), "budget_at": None}
    laptop = replace(load_profile("laptop-x86"), width_multiple=8, budgets=budgets, **shapes)
    profile = folder / "small.yaml"
    profile.write_text(dump_profile(laptop))
    text = corpus(folder / "corpus.txt")
    bundle = compile_bundle(model, profile, folder / "tiny.bundle", text=text, include="budgets")
    return Compiled(model, profile, bundle)
