"""The family, and a converted T5, compiled: at r = 1 it writes what transformers does, at r = 3 what its model does."""

import shutil
from pathlib import Path
from typing import Any

import nestforge
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.tensorrt.graphs import accepted
from nestforge.compiler.verify import verify_bundle
from nestforge.errors import BuildError, CheckpointError, ExportError
from nestforge.exporters.families.coda.encoder_decoder import load_model as load_pair
from nestforge.exporters.families.coda.model import load_model
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from safetensors.torch import load_file, save_file
from support.generating import generated_by_transformers
from support.tiny_coda import coda_config, converted_t5, save_small_t5, save_tiny_coda, tiny_coda
from support.tiny_compile import board
from support.tiny_models import V1_1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_coda(tmp_path_factory.mktemp("coda") / "m")


def test_ranges_are_refused_with_the_reason(folder: Path) -> None:
    signature = open_source(folder).signature
    problem = r"^bucket 1x1\.\.8: k, the tokens that its layers select, is one number for each length; ask for static b"
    with pytest.raises(ExportError, match=problem):
        signature.buckets([Bucket(1, 8, None, 1)], ())
    assert all(bucket.is_static for bucket in signature.buckets(None, [Bucket(1, 24, None, 1)]))


def test_narrowing_cuts_neurons_and_sets_the_reduction(folder: Path) -> None:
    universal = load_universal(open_source(folder))
    assert universal.module.model.reduction == 1
    narrowed = universal.narrow(universal.spec.parse("ffn24-coda.reduction4"))
    assert narrowed.model.reduction == 4
    assert narrowed.model.layers[1].ffn.up.weight.shape == (24, 32)
    assert narrowed.model.layers[1].router.weight.shape == (32,)
    assert universal.module.model.reduction == 1


def test_a_model_of_its_own_folder_has_the_trained_reduction(tmp_path: Path) -> None:
    save_tiny_coda(tmp_path, reduction=2, reductions=(2, 1))
    model, expected = load_model(tmp_path), tiny_coda(coda_config(reduction=2, reductions=(2, 1)))
    assert model.reduction == 2
    ids = torch.randint(0, 40, (2, 8))
    assert torch.equal(model(ids, torch.ones_like(ids)), expected(ids, torch.ones_like(ids)))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"layers.1.router.weight": torch.zeros(24)},
            r"tensor layers.1.router.weight has shape \[24\]; expected \[32\]",
        ),
        ({"layers.1.router.weight": None}, r"tensor layers.1.router.weight is missing"),
        ({"layers.1.conv.weight": torch.zeros(32, 3)}, r"tensor 'layers.1.conv.weight' has no place in the model"),
    ],
    ids=["router of another width", "no router", "a convolution"],
)
def test_weights_of_another_model_are_refused(folder: Path, tmp_path: Path, change: Any, problem: str) -> None:
    """A convolution, which needs its neighbours, has no place in a layer that selects tokens."""
    weights = {**load_file(folder / "model.safetensors"), **change}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=problem) as error:
        open_source(tmp_path)
    assert "\n" not in str(error.value)


WHOLE, REDUCED = "ffn32-coda.reduction1", "ffn32-coda.reduction3"
# One is shorter than the reduction.
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [6, 7], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 11, 12, 30, 31]]
PROFILE = board(budgets={"full": {}}, buckets=["2x8"])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The bundle of the folder ``m``, which was made of the T5 v1.1 ``t5``."""
    folder = tmp_path_factory.mktemp("coda-t5")
    converted_t5(save_small_t5(folder / "t5", **V1_1), folder / "m")
    return open_bundle(nestforge.compile(folder / "m", PROFILE, folder / "b", generate=True, measure=False))


def test_every_engine_passed_the_gate_and_the_encoders_say_what_they_selected(bundle: Bundle) -> None:
    entry = bundle.manifest.generation
    for engine in bundle.manifest.every_engine:
        assert (engine.emitted, engine.slice_problem, engine.parity is None) == ("sliced", None, False)
    selected = {engine.submodel: engine.routing for engine in entry.encoder.engines}
    assert selected[WHOLE] is None
    assert [(one.name, one.shape) for one in selected[REDUCED] or ()] == [("routes.0", (1, 8))]
    (reduced,) = (engine for engine in entry.encoder.engines if engine.submodel == REDUCED)
    assert [judged.made > 0 for judged in reduced.parity.routing or ()] == [True]
    assert all(engine.routing is None for engine in entry.engines)
    graphs = {engine.submodel: bundle.file(engine.file).read_bytes() for engine in entry.encoder.engines}
    accepted(WHOLE, graphs[WHOLE])  # by TensorRT's parser
    with pytest.raises(BuildError, match=r"TopK .*: input 1 is computed; expected a constant"):
        accepted(REDUCED, graphs[REDUCED])


def test_at_one_it_writes_what_transformers_does(bundle: Bundle) -> None:
    with nestforge.load(bundle.path) as served:
        rows = served.generate(PROMPTS, max_tokens=10, submodel=WHOLE, stop=[]).rows
    for prompt, row in zip(PROMPTS, rows, strict=True):
        expected = generated_by_transformers(bundle.path.with_name("t5"), prompt, 10)
        assert list(row.tokens)[: len(expected)] == expected
    assert len({token for row in rows for token in row.tokens}) > 5, "texts that repeat themselves would prove little"


def test_reduced_it_writes_what_its_module_does(bundle: Bundle) -> None:
    """Greedily, with passes of the module over both texts, at the k of each prompt's own length."""
    model = load_pair(bundle.path.with_name("m"))
    assert model.encoder.reduction == 3
    with nestforge.load(bundle.path) as served:
        rows = served.generate(PROMPTS, max_tokens=10, submodel=REDUCED, stop=[]).rows
        whole = served.generate(PROMPTS, max_tokens=10, submodel=WHOLE, stop=[]).rows
    for prompt, row in zip(PROMPTS, rows, strict=True):
        read, text = torch.tensor([prompt]), [0]
        for _ in row.tokens:
            text.append(int(model(read, torch.ones_like(read), torch.tensor([text]))[0, -1].argmax()))
        assert text[1:] == list(row.tokens)
    assert [row.tokens for row in rows] != [row.tokens for row in whole]


def test_another_reduction_goes_on_behind_the_prompt_as_the_first_read_it(bundle: Bundle) -> None:
    with nestforge.load(bundle.path) as served:
        plain = served.generate(PROMPTS[0], max_tokens=9, submodel=WHOLE, stop=[]).rows[0]
        drafted = served.generate(PROMPTS[0], max_tokens=9, submodel=WHOLE, stop=[], draft=REDUCED, drafted=3).rows[0]
        fast = served.generate(PROMPTS[0], max_tokens=9, stop=[], tokens_per_second=1e9).rows[0]
    assert drafted.tokens == plain.tokens
    assert [run.submodel for run in fast.runs] == [WHOLE, REDUCED]
    # Decoders of the two are the same weights, and the prompt was read at r = 1.
    assert fast.tokens == plain.tokens


def test_verify_runs_all_of_it_again(bundle: Bundle) -> None:
    assert verify_bundle(bundle.path, against=bundle.path.with_name("m"))


@pytest.mark.usefixtures("blatant")
def test_tokens_that_the_module_would_not_select_are_named(bundle: Bundle, tmp_path: Path) -> None:
    """For a model whose router says the opposite: the encoder's engine fails, and not the decoder's."""
    folder = shutil.copytree(bundle.path.with_name("m"), tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights["encoder.layers.0.router.weight"] *= -1
    save_file(weights, folder / "model.safetensors")
    problems = {found.engine: found.problem for found in verify_bundle(bundle.path, against=folder).engines}
    named = {engine for engine, problem in problems.items() if problem and "worse than PyTorch's own by" in problem}
    assert {engine.partition("@")[0] for engine in named} >= {REDUCED, f"{REDUCED}.encoder"}
    assert not any(problem for engine, problem in problems.items() if engine.startswith(WHOLE))
