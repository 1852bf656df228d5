"""Kinds of exports: folders as optimum lays them out, TensorRT's plans, custom operators, bundles, and their texts."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nestforge
import numpy as np
import openvino
import pytest
import torch
from nestforge.errors import CheckpointError, InputError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from nestforge.parity.cases import DECODER_IDS, IDS, MASK, Trial
from nestforge.parity.receipt import as_receipt
from nestforge.parity.values import Dependence, Event
from support.export_recipes import RECIPES
from support.exports import Zoo, quiet
from support.fake_cuda import World
from support.fake_tensorrt import host_with_gpu
from support.sentence_folders import HIDDEN, Layout
from support.tiny_compile import board, builder_in, save_tiniest, template_of, write_levels


def exported(zoo: Zoo, name: str) -> tuple[Path, Path]:
    recipe = next(recipe for recipe in RECIPES if recipe.name == name)
    return zoo.export(recipe), zoo.model(recipe.family)


def test_a_folder_of_optimum_is_checked_graph_by_graph(zoo: Zoo, tmp_path: Path) -> None:
    encoder, model = exported(zoo, "t5, its encoder")
    decoder, _ = exported(zoo, "t5, its decoder with a past")
    shutil.copy(encoder, tmp_path / "encoder_model.onnx")
    shutil.copy(decoder, tmp_path)
    report = nestforge.check_parity(tmp_path, model)
    assert report.is_right, report.line
    assert [Path(graph.export).name for graph in report.graphs] == [
        "decoder_with_past_model.onnx",
        "encoder_model.onnx",
    ]
    assert "length 1" not in report.graphs[0].cases  # which has no step


def test_a_merged_decoder_is_asked_with_a_past_and_without(zoo: Zoo) -> None:
    report = nestforge.check_parity(*exported(zoo, "gpt2 merged"))
    assert report.is_right, report.line
    report = nestforge.check_parity(*exported(zoo, "bias dropped, merged"))
    fault = report.graphs[0].fault
    assert (fault.module, fault.kind) == ("transformer.h.0.attn.c_proj", "a bias that is dropped")


def test_a_mask_says_nothing_of_what_a_decoder_answers_behind_an_encoder() -> None:
    ids = np.ones((1, 3), np.int64)
    trial = Trial("one", {IDS: ids, MASK: np.array([[1, 1, 0]]), DECODER_IDS: ids})
    assert trial.counted(np.ones((1, 3, 2)), "encoder_last_hidden_state").sum() == 4
    assert trial.counted(np.ones((1, 3, 2)), "logits").sum() == 6
    assert trial.counted(np.ones((1, 3, 2)), "model.decoder.layers.0.encoder_attn").sum() == 6


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "net.onnx"
    names = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": {"x": {0: "batch"}, "y": {0: "batch"}}}
    with quiet():
        torch.onnx.export(Net(), (torch.randn(1, 8),), str(path), dynamo=False, **names)
    return path


def test_an_openvino_ir_is_searched_as_a_graph_is(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.xml"
    openvino.save_model(openvino.convert_model(str(small)), path, compress_to_fp16=False)
    net = Net()
    assert nestforge.check_parity(path, net).is_right
    net.first.bias.data += 1
    fault = nestforge.check_parity(path, net).graphs[0].fault
    assert fault.module == "first"
    path.with_suffix(".bin").unlink()
    with pytest.raises(InputError, match=r"net\.bin are missing"):
        nestforge.check_parity(path, net)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with host_with_gpu(tmp_path / "cache") as found:
        yield found


def plan_of(graph: Path, path: Path) -> Path:
    shapes = [[[1, 8], [2, 8], [4, 8]]]
    path.write_text(json.dumps({"graph": str(graph), "stripped": False, "profiles": [{"x": shapes[0]}]}))
    return path


def test_a_plan_is_asked_where_tensorrt_is(small: Path, tmp_path: Path, world: World) -> None:
    report = nestforge.check_parity(plan_of(small, tmp_path / "net.plan"), Net())
    assert report.is_right, report.line
    assert report.graphs[0].kind == "TensorRT plan"
    other = Net()
    other.last.bias.data += 1
    assert not nestforge.check_parity(tmp_path / "net.plan", other).is_right
    world.opens = False
    with pytest.raises(InputError, match=r"net\.plan: TensorRT .* cannot open this plan"):
        nestforge.check_parity(tmp_path / "net.plan", Net())


def test_a_plan_is_refused_where_tensorrt_is_not(small: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"net\.plan: needs tensorrt, which is not installed"):
        nestforge.check_parity(plan_of(small, tmp_path / "net.plan"), Net())


def test_a_library_of_operators_is_loaded_or_refused(small: Path, tmp_path: Path) -> None:
    source, library = tmp_path / "operators.c", tmp_path / "operators.so"
    source.write_text(
        """#include <stdio.h>
    void *RegisterCustomOps(void *options, void *api) { fclose(fopen("%s", "w")); return 0; }"""
        % (tmp_path / "seen")
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    assert nestforge.check_parity(small, Net(), library=library).is_right
    assert (tmp_path / "seen").exists()
    with pytest.raises(InputError, match="ONNX Runtime does not run it"):
        nestforge.check_parity(small, Net(), library=source)
    with pytest.raises(InputError, match="a plan holds its plugins"):
        nestforge.check_parity(plan_of(small, tmp_path / "net.plan"), Net(), library=library)


def test_every_submodel_of_a_bundle_is_compared_with_its_slice(tmp_path: Path) -> None:
    model = save_tiniest(tmp_path / "model")
    universal = load_universal(open_source(model))
    bundle = write_levels(builder_in(tmp_path / "bundle", universal, template_of(universal), board()))
    report = nestforge.check_parity(bundle, model)
    assert report.is_right, report.line
    submodels = nestforge.open_bundle(bundle).manifest.submodels
    assert len(report.graphs) == len(submodels) > 1
    whole = nestforge.check_parity(bundle, universal.module.model)
    assert whole.is_right, whole.line
    assert len(whole.graphs) == 1
    with pytest.raises(CheckpointError, match="another model"):
        nestforge.check_parity(bundle, save_tiniest(tmp_path / "other", initializer_range=0.5))


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
