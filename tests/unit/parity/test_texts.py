"""Texts through a bundle, beside sentence-transformers itself, and values as they are shown."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nestforge
import pytest
import torch
from nestforge.parity.receipt import as_receipt
from nestforge.parity.values import Dependence, Event
from support.sentence_folders import HIDDEN, Layout
from support.tiny_compile import board

PROMPTS = {"prompts": {"query": "time budget ", "passage": "a "}, "default_prompt_name": "query"}


def test_a_bundles_receipt_is_of_texts_too(
    tmp_path: Path,
    edit_manifest: Callable[[Path, Callable[[dict[str, Any]], object]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokenizer, case, length, prompts that are not pooled, Dense, Normalize and a cut; then another default prompt,
    and the library missing."""
    folder = Layout(
        "all of it",
        lambda m: [m.Pooling(HIDDEN, include_prompt=False), m.Dense(HIDDEN, 12), m.Normalize()],
        config=PROMPTS,
        transformer={"max_seq_length": 12, "do_lower_case": True},
    ).write(tmp_path / "m")
    profile = board(buckets=["1..4x1..16"], budgets={"full": {}})
    pairs = ["1:4", "2:8"]
    bundle = nestforge.compile(folder, profile=profile, output=tmp_path / "b", include="levels", pairs=pairs)
    report = nestforge.check_parity(bundle, folder)
    assert report.is_right, report.line
    texts, one_layer, tokens = report.graphs[:3]
    assert texts.kind.startswith("bundle, texts; beside sentence-transformers 6.")
    assert texts.cases == ("texts 1 to 6", "texts 7 to 7", "texts 1 to 6, prompt passage")
    assert [match.name for match in texts.outputs] == ["sentence_embedding", "sentence_embedding in 8"]
    assert [match.name for match in one_layer.outputs] == ["sentence_embedding", "sentence_embedding in 4"]
    assert ("pooling_mask", "pooling_mask") in [(match.name, match.model) for match in tokens.inputs]
    assert "sentence-transformers" in json.loads(as_receipt(report))["versions"]
    of_compile = nestforge.open_bundle(bundle).manifest.texts
    assert [receipt.cases for receipt in of_compile] == [texts.cases, one_layer.cases]
    names = [[output.name for output in receipt.outputs] for receipt in of_compile]
    assert names == [[match.name for match in graph.outputs] for graph in (texts, one_layer)]

    edit_manifest(bundle, lambda data: data["text"].update(default_prompt="passage"))
    wrong = nestforge.check_parity(bundle, folder)
    assert [graph.is_right for graph in wrong.graphs] == [False, False, True, True]
    assert "first wrong: texts; it looks like another tokenizer, prompt or longest text" in wrong.line

    monkeypatch.setattr("nestforge.parity.cases.is_installed", lambda: False)
    without = nestforge.check_parity(bundle, folder)
    assert len(without.graphs) == 2
    lack = "needs the folder of sentence-transformers, and that library"
    assert without.not_checked == (f"{texts.export}: {lack}", f"{one_layer.export}: {lack}")


class Own(torch.nn.Module):
    """Modules ``a`` and ``b`` in code that autograd does not follow, by ``kind``, and ``c``, of which nothing comes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(4, 4) for _ in range(3))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._first(x)
        z: torch.Tensor = self.b(y)
        self.c(z)
        return z.argmax(-1) if self.kind == "whole numbers" else z

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "without gradients":
            with torch.no_grad():
                return self.a(x)
        if self.kind == "numpy":
            return torch.from_numpy(self.a(x).numpy().copy())
        if self.kind == "in place in a view":
            first, _ = self.a(torch.cat([x, x])).unbind(0)
            return first.add_(1)
        return self.a(x)


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("as usual", "ab"),
        ("without gradients", "ab"),
        ("numpy", "abc"),
        ("in place in a view", "abc"),
        ("whole numbers", "abc"),
    ],
)
def test_code_that_autograd_does_not_follow_is_searched_in_order(kind: str, kept: str) -> None:
    module = Own(kind).eval()
    model: Any = SimpleNamespace(module=module, tensors=lambda x: {"y": module(x)})
    trial: Any = SimpleNamespace(feeds=torch.randn(1, 4))
    with torch.no_grad():
        found = Dependence(model, trial, ["y"])
    assert {event.module for event in found.sizes if event.side == "out"} == set(kept)
    there = {event: event.module == "a" and event.side == "in" for event in found.sizes}
    assert found.first(there) == Event("a", "out")
