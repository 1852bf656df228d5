"""The road as a whole: what is written, what it is worth, that it resumes, and what it refuses."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler import distill as distill_module
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.nest import NestReport, nest, refuse_unwritable, write_folder
from nestforge.compiler.work import staging as staging_module
from nestforge.compiler.work.staging import Stage
from nestforge.errors import BundleCorruptError, CheckpointError, InputError, NestforgeError, OutputError, PlanError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal
from nestforge.strict import unstructure
from safetensors.torch import load_file, save_file
from support.cost_eff_models import save_tiny as save_tiny_exits
from support.gated_decoders import save_decoder
from support.tiny_compile import board
from support.tiny_models import add_pooling, save_tiny_encoder

from .conftest import Ordinary

STEPS = 40


@pytest.fixture(scope="module")
def made(ordinary: Ordinary, tmp_path_factory: pytest.TempPathFactory) -> NestReport:
    return nest(ordinary.model, ordinary.text, tmp_path_factory.mktemp("made") / "nested", steps=STEPS)


def test_the_folder_states_what_its_levels_are_worth(made: NestReport) -> None:
    record = json.loads((made.output / "nest.json").read_text())
    assert record["levels"] == [unstructure(level) for level in made.levels]


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_every_level_is_closer_to_the_original_than_ranking_alone(made: NestReport) -> None:
    assert [level.submodel for level in made.levels] == [f"ffn{width}-heads4" for width in (16, 32, 48, 64)]
    assert [level.fractions for level in made.levels] == [{"ffn": share} for share in (0.25, 0.5, 0.75, 1.0)]
    *lower, whole = made.levels
    assert all(level.nested > level.ranked for level in lower)
    assert lower[0].nested - lower[0].ranked > 0.03
    assert whole.ranked == pytest.approx(1, abs=1e-6)
    assert whole.nested > 0.98
    # Per layer 16 neurons: a row, a bias and a column each.
    assert whole.parameters - lower[-1].parameters == 3 * 16 * (32 + 1 + 32)
    assert (made.steps, made.seed, made.texts + made.held_out) == (STEPS, 0, 400)


def test_the_folder_is_an_ordinary_one_that_says_it_is_nested(made: NestReport, ordinary: Ordinary) -> None:
    written = {path.relative_to(made.output).as_posix() for path in made.output.rglob("*") if path.is_file()}
    original = {path.relative_to(ordinary.model).as_posix() for path in ordinary.model.rglob("*") if path.is_file()}
    assert written == original | {"nest.json"}
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (ordinary.model, made.output))
    changed = {"nested": True, "granularities": {"ffn": [0.25, 0.5, 0.75, 1.0]}, "_name_or_path": "tiny-nested"}
    assert after == before | changed
    source = open_source(made.output)
    assert source.spec.trained_nested
    assert source.spec.granularities == {"ffn": (0.25, 0.5, 0.75, 1.0)}
    assert source.signature == ordinary.source.signature


def test_transformers_itself_opens_the_folder(made: NestReport) -> None:
    import transformers

    model = transformers.AutoModel.from_pretrained(made.output, local_files_only=True)
    assert torch.equal(
        model.state_dict()["encoder.layer.0.output.dense.weight"],
        load_file(made.output / "model.safetensors")["encoder.layer.0.output.dense.weight"],
    )


def test_the_folder_compiles_as_a_nested_model(made: NestReport, ordinary: Ordinary, tmp_path: Path) -> None:
    bundle = open_bundle(compile_bundle(made.output, board(budgets={"full": {}}), tmp_path / "b", text=ordinary.text))
    assert bundle.manifest.ranking.method == "none"
    assert {entry.id for entry in bundle.manifest.submodels} >= {level.submodel for level in made.levels}


def test_embedding_tables_stay_as_they_were(made: NestReport, ordinary: Ordinary) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (ordinary.model, made.output))
    same = {name for name in before if torch.equal(before[name], after[name])}
    tables = {name for name in before if "embeddings" in name and "LayerNorm" not in name}
    # The pooler's answer follows from the hidden states, so nothing asks it to change.
    assert same == tables | {"pooler.dense.weight", "pooler.dense.bias"}


def test_the_same_seed_gives_the_same_bytes_and_another_others(ordinary: Ordinary, tmp_path: Path) -> None:
    folders = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        folders[name] = nest(ordinary.model, ordinary.text, tmp_path / name, steps=6, seed=seed).output
    for path in folders["a"].iterdir():
        if path.is_file():
            assert path.read_bytes() == (folders["b"] / path.name).read_bytes(), path.name
    assert weights(folders["a"]) != weights(folders["c"])


def test_an_interrupted_training_goes_on_and_ends_alike(
    made: NestReport, ordinary: Ordinary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill_module, "_SAVE_SECONDS", 0.0)
    seen: list[int] = []

    def until(stop: int) -> Callable[[str, int, int], None]:
        def listen(stage: str, done: int, total: int) -> None:
            if (stage, total) == ("distill", STEPS):
                seen.append(done)
                if done == stop:
                    raise KeyboardInterrupt

        return listen

    with pytest.raises(KeyboardInterrupt):
        nest(ordinary.model, ordinary.text, tmp_path / "out", steps=STEPS, progress=until(15))
    assert not (tmp_path / "out").exists()
    assert seen == list(range(16))
    seen.clear()
    report = nest(ordinary.model, ordinary.text, tmp_path / "out", steps=STEPS, progress=until(-1))
    assert seen == list(range(15, STEPS))
    assert report.steps == STEPS
    assert weights(report.output) == weights(made.output)
    assert [level.nested for level in report.levels] == [level.nested for level in made.levels]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_minutes_bound_the_training(ordinary: Ordinary, tmp_path: Path) -> None:
    report = nest(ordinary.model, ordinary.text, tmp_path / "out", minutes=0.001)
    assert report.steps >= 1
    assert report.seconds >= 0.06
    assert json.loads((tmp_path / "out" / "nest.json").read_text())["effort"] == {"seed": 0, "seconds": 0.06}


def test_kinds_move_together(ordinary: Ordinary, tmp_path: Path) -> None:
    levels = {"ffn": (0.5, 1.0), "heads": (0.5, 1.0)}
    report = nest(ordinary.model, ordinary.text, tmp_path / "out", levels=levels, steps=20)
    small = report.levels[0]
    assert (small.label, small.submodel, small.fractions) == ("50%", "ffn32-heads2", {"ffn": 0.5, "heads": 0.5})
    assert small.nested > small.ranked
    assert open_source(report.output).spec.granularities == levels


@pytest.mark.parametrize(
    ("model_type", "task"),
    [("bert", "ForMaskedLM"), ("bert", "ForSequenceClassification"), ("roberta", "ForTokenClassification")],
)
def test_models_with_a_task_keep_their_tied_weights(
    model_type: str, task: str, ordinary: Ordinary, tmp_path: Path
) -> None:
    model = save_tiny_encoder(tmp_path / "model", model_type, task)
    report = nest(model, ordinary.text, tmp_path / "out", steps=4)
    reopened = load_universal(open_source(report.output)).parameters()
    stored = load_file(report.output / "model.safetensors")
    original = load_file(model / "model.safetensors")
    assert {name: data.shape for name, data in stored.items()} == {name: d.shape for name, d in original.items()}
    assert all(torch.equal(reopened[name], stored[name]) for name in reopened.keys() & stored.keys())
    assert not torch.equal(stored[(name := next(n for n in stored if "intermediate" in n))], original[name])


def test_half_precision_weights_are_written_in_float32(ordinary: Ordinary, tmp_path: Path) -> None:
    model = tmp_path / "half"
    shutil.copytree(ordinary.model, model)
    halves = {name: data.half() for name, data in load_file(model / "model.safetensors").items()}
    save_file(halves, model / "model.safetensors", metadata={"format": "pt"})
    edit(model / "config.json", dtype="float16")
    output = nest(model, ordinary.text, tmp_path / "out", steps=2).output
    assert {data.dtype for data in load_file(output / "model.safetensors").values()} == {torch.float32}
    assert json.loads((output / "config.json").read_text())["dtype"] == "float32"


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def nested_already(folder: Path) -> None:
    edit(folder / "config.json", nested=True)


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def with_exits(folder: Path) -> None:
    shutil.rmtree(folder)
    save_tiny_exits(folder)


def with_a_foreign_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["vocab"] = {word: 1000 * number for word, number in data["model"]["vocab"].items()}
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (nested_already, CheckpointError, "nested already, as its config.json says; compile it as it is"),
        (without_tokenizer, CheckpointError, "no tokenizer.json, so the text file cannot be read by this model"),
        (with_exits, CheckpointError, "a model with exits cannot be nested here; expected one that answers once"),
        (
            with_a_foreign_tokenizer,
            BundleCorruptError,
            "which takes 0..63; use the tokenizer that belongs to this model",
        ),
    ],
)
def test_models_that_cannot_be_nested(
    change: Callable[[Path], None], error: type[NestforgeError], says: str, ordinary: Ordinary, tmp_path: Path
) -> None:
    shutil.copytree(ordinary.model, tmp_path / "model")
    change(tmp_path / "model")
    refused(error, says, tmp_path, tmp_path / "model", ordinary.text, steps=2)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"levels": {"fnn": (0.5, 1)}}, PlanError, "levels: this model has no axis kind 'fnn'; did you mean 'ffn'?"),
        ({"levels": {"ffn": (1.0,)}}, PlanError, "levels: expected a level below 1, got only the whole model"),
        ({"levels": {"ffn": (0.5, 0.75)}}, PlanError, "expected fractions that increase from above 0 to 1"),
        ({"minutes": 1, "steps": 1}, PlanError, "minutes and steps: expected one of them, got both"),
        ({"minutes": 0}, InputError, "minutes: expected a positive number, got 0"),
        ({"steps": 0}, InputError, "steps: expected a whole number, 1 or above, got 0"),
    ],
)
def test_options_that_make_no_sense(
    options: dict[str, Any], error: type[NestforgeError], says: str, ordinary: Ordinary, tmp_path: Path
) -> None:
    refused(error, says, tmp_path, ordinary.model, ordinary.text, **options)


def refused(
    error: type[NestforgeError], says: str, folder: Path, model: Path, text: Path | str, **options: Any
) -> None:
    with pytest.raises(error) as failure:
        nest(model, text, folder / "out", **options)
    assert says in str(failure.value)
    assert "\n" not in str(failure.value)
    assert not list(folder.glob("out*"))


def test_an_output_that_exists_is_left_alone(ordinary: Ordinary, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="out: exists already; choose another `output` or `overwrite=True`"):
        nest(ordinary.model, ordinary.text, tmp_path / "out", steps=2)
    assert list((tmp_path / "out").iterdir()) == []


def test_an_ordinary_model_is_never_replaced_by_a_nested_one(ordinary: Ordinary) -> None:
    before = {path.name: path.read_bytes() for path in ordinary.model.iterdir() if path.is_file()}
    with pytest.raises(OutputError, match=r"has no nest\.json, and `overwrite` replaces no other folder"):
        nest(ordinary.model, ordinary.text, ordinary.model, steps=2, overwrite=True)
    assert {path.name: path.read_bytes() for path in ordinary.model.iterdir() if path.is_file()} == before


def test_a_call_that_was_stopped_while_it_cleared_its_work_does_not_train_again(
    ordinary: Ordinary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = staging_module._remove_entry

    def stopped(entry: Path) -> None:
        remove(entry)
        if entry.name == "outcome.json":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(staging_module, "_remove_entry", stopped)
        with pytest.raises(KeyboardInterrupt):
            nest(ordinary.model, ordinary.text, tmp_path / "out", steps=2)
    stages: list[str] = []
    with pytest.raises(OutputError, match="out: exists already, made by a call with these arguments"):
        nest(ordinary.model, ordinary.text, tmp_path / "out", steps=2, progress=lambda stage, *_: stages.append(stage))
    assert stages == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_loss_that_is_not_finite_stops_the_training(
    ordinary: Ordinary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill_module, "difference", lambda *_: torch.tensor(float("nan")))
    refused(
        CheckpointError, "training diverged at step 1: the loss is not finite", tmp_path, ordinary.model, ordinary.text
    )


def written_back(universal: UniversalModel, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of ``folder/out``, which is written."""
    refuse_unwritable(universal)
    (folder / "out").mkdir()
    write_folder(universal, {"ffn": (0.5, 1.0)}, Stage(folder / "out", folder))
    return load_file(folder / "out" / "model.safetensors")


def test_sharded_weights_become_one_file_and_only_companions_are_copied(tmp_path: Path) -> None:
    model = save_tiny_encoder(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    for name, part in (("a", list(weights)[:9]), ("b", list(weights)[9:])):
        save_file({key: weights[key] for key in part}, model / f"{name}.safetensors")
    listed = {key: "a.safetensors" if key in list(weights)[:9] else "b.safetensors" for key in weights}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    for name in ("README.md", "vocab.txt", "pytorch_model.bin"):
        (model / name).write_text("x")
    add_pooling(model)
    (model / "1_Pooling").rename(model / "pooling")
    modules = (model / "modules.json").read_text().replace("1_Pooling", "pooling")
    modules = modules.replace("2_Normalize", "2_Dense").replace("Normalize", "Dense")
    (model / "modules.json").write_text(modules)
    (model / "2_Dense").mkdir()
    (model / "2_Dense" / "config.json").write_text(json.dumps({"in_features": 32, "out_features": 8, "bias": False}))
    save_file({"linear.weight": torch.ones(8, 32)}, model / "2_Dense" / "model.safetensors")
    (model / "onnx").mkdir()
    (model / "onnx" / "model.onnx").write_text("x")
    written = written_back(load_universal(open_source(model)), tmp_path)  # modules behind it are not trained
    found = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {
        *("config.json", "model.safetensors", "tokenizer.json", "vocab.txt", "modules.json"),
        *("pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
    }
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)


def test_parameters_that_share_a_tensor_are_written_into_it(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path / "model", "phi3")
    universal = load_universal(open_source(folder))
    universal.parameters()["model.layers.0.mlp.up_proj.weight"].data += 1
    written = written_back(universal, tmp_path)
    expected = load_file(folder / "model.safetensors")
    expected["model.layers.0.mlp.gate_up_proj.weight"][32:] += 1
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_what_the_module_has_not_is_kept_as_it_was(tmp_path: Path) -> None:
    model = save_tiny_encoder(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    more = {"cls.seq_relationship.weight": torch.ones(2, 32).half(), "embeddings.position_ids": torch.arange(40)}
    save_file({**weights, **more}, model / "model.safetensors", metadata={"format": "pt"})
    written = written_back(load_universal(open_source(model)), tmp_path)
    assert written["cls.seq_relationship.weight"].dtype == torch.float32
    assert torch.equal(written["embeddings.position_ids"], torch.arange(40))


def test_a_weight_is_written_back_under_the_name_that_the_files_give_it(tmp_path: Path) -> None:
    model = save_tiny_encoder(tmp_path / "model")
    stored = {
        f"bert.{name.replace('LayerNorm.weight', 'LayerNorm.gamma')}": tensor
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
    universal = load_universal(open_source(model))
    for parameter in universal.parameters().values():
        parameter.data += 1
    written = written_back(universal, tmp_path)
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], tensor + 1) for name, tensor in stored.items())


def test_a_weight_that_the_checkpoint_does_not_have_is_refused(ordinary: Ordinary) -> None:
    universal = ordinary.universal
    refuse_unwritable(universal)
    checkpoint = universal.source.checkpoint
    renamed = {re.sub("LayerNorm.weight", "LayerNorm.scale", name): h for name, h in checkpoint.tensors.items()}
    other = replace(universal, source=replace(universal.source, checkpoint=replace(checkpoint, tensors=renamed)))
    with pytest.raises(CheckpointError, match=r"parameter embeddings\.LayerNorm\.weight of the loaded model is not"):
        refuse_unwritable(other)
