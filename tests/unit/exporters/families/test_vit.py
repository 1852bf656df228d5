import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import nestforge
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from nestforge.bucket import Bucket
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.graph.store import recover_order
from nestforge.compiler.verify import verify_bundle
from nestforge.errors import CheckpointError, InputError
from nestforge.exporters.source import ModelSource, open_source
from nestforge.exporters.universal import UniversalModel, load_universal, permute_axis
from nestforge.profiles.load_profile import dump_profile
from nestforge.tools.cli import main
from nestforge.workload import macs
from safetensors.torch import load_file, save_file
from support.tiny_compile import assert_tensorrt_takes, board
from support.tiny_models import CLASSES, cut_ffn, edit_config, save_tiny_matvit, save_tiny_vit

IMAGES = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vit(tmp_path_factory.mktemp("vit") / "m", task="ForImageClassification")


@pytest.fixture
def source(folder: Path) -> ModelSource:
    return open_source(folder)


@pytest.fixture
def universal(source: ModelSource) -> UniversalModel:
    return load_universal(source)


def test_axes_and_signature(source: ModelSource) -> None:
    assert [axis.name for axis in source.spec.axes] == [
        "layers.0.ffn",
        "layers.0.heads",
        "layers.1.ffn",
        "layers.1.heads",
    ]
    assert source.spec.universal().id == "ffn32-heads2"
    assert source.signature.inputs[0].dims == ("batch", 2, 8, 8)
    assert [(s.name, s.dims, s.role) for s in source.signature.outputs] == [("logits", ("batch", CLASSES), "classes")]
    assert source.signature.buckets(None, [Bucket(4, 64), Bucket(4, 128), Bucket(1, 64)]) == (
        Bucket(4, 1),
        Bucket(1, 1),
    )


def test_weights_that_files_name_in_the_old_way_reach_the_modules(folder: Path, universal: UniversalModel) -> None:
    stored, parameters = load_file(folder / "model.safetensors"), universal.parameters()
    at, renamed = "vit.encoder.layer.1", "vit.layers.1"
    for name, in_module in [
        (f"{at}.attention.attention.query.bias", f"{renamed}.attention.q_proj.bias"),
        (f"{at}.attention.output.dense.weight", f"{renamed}.attention.o_proj.weight"),
        (f"{at}.intermediate.dense.weight", f"{renamed}.mlp.fc1.weight"),
        (f"{at}.output.dense.weight", f"{renamed}.mlp.fc2.weight"),
    ]:
        assert torch.equal(stored[name], parameters[in_module]), name


def test_weights_that_files_name_as_the_modules_do_are_read_too(folder: Path, tmp_path: Path) -> None:
    source = open_source(folder)
    universal = load_universal(source)
    other = tmp_path / "m"
    other.mkdir()
    (other / "config.json").write_bytes((folder / "config.json").read_bytes())
    parameters = {name: value.data.clone() for name, value in universal.parameters().items()}
    save_file(parameters, other / "model.safetensors", metadata={"format": "pt"})
    again = load_universal(open_source(other))
    assert dict(again.source.shapes) == dict(source.shapes)
    assert torch.equal(again.module(IMAGES)[0], universal.module(IMAGES)[0])


def test_narrowing_equals_masking_what_was_cut(universal: UniversalModel) -> None:
    """Independent of any slicing code: zero the down columns of cut neurons and the output columns of cut heads."""
    submodel = universal.spec.parse("ffn8x1_24x1-heads1x1_2x1")
    narrowed = universal.narrow(submodel)
    for index, layer in enumerate(universal.module.model.vit.layers):
        layer.mlp.fc2.weight.data[:, submodel[f"layers.{index}.ffn"] :] = 0
        layer.attention.o_proj.weight.data[:, 8 * submodel[f"layers.{index}.heads"] :] = 0
    torch.testing.assert_close(narrowed(IMAGES)[0], universal.module(IMAGES)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("model_type", "task"), [("vit", "Model"), ("deit", "ForImageClassification")])
def test_widths_that_differ_by_layer(tmp_path: Path, model_type: str, task: str) -> None:
    folder = save_tiny_vit(tmp_path / "m", model_type, task)
    whole = load_universal(open_source(folder))
    expected = whole.narrow(whole.spec.parse("ffn24x1_32x1"))(IMAGES)
    cut = load_universal(open_source(cut_ffn(folder, [24, 32])))
    assert cut.spec.universal().id == "ffn24x1_32x1-heads2"
    for found, output in zip(cut.module(IMAGES), expected, strict=True):
        assert torch.equal(found, output)


def test_a_model_without_pooler_answers_with_its_hidden_states(tmp_path: Path) -> None:
    folder = save_tiny_vit(tmp_path / "m")
    weights = {n: t for n, t in load_file(folder / "model.safetensors").items() if not n.startswith("pooler.")}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    source = open_source(folder)
    assert [(s.name, s.dims, s.role) for s in source.signature.outputs] == [
        ("last_hidden_state", ("batch", 5, 16), None),
        ("embedding", ("batch", 16), "embedding"),
    ]
    hidden, embedding = load_universal(source).module(IMAGES)
    assert torch.equal(embedding, hidden[:, 0])


def test_attention_is_counted_over_patches_and_class_token(source: ModelSource) -> None:
    rows, tokens, hidden, patches = 3, 5, 16, 4
    ops = source.workload(source.spec.universal(), Bucket(rows, 1))
    linear = 2 * rows * tokens * (4 * hidden * hidden + 2 * hidden * 32)
    attention = 2 * rows * 2 * tokens * tokens * hidden
    ends = 2 * rows * patches * (2 * 4 * 4) * hidden + 2 * rows * hidden * CLASSES
    assert sum(op.flops for op in ops if op.kind != "elementwise") == 2 * (linear + attention) + ends
    read = sum(op.weight_bytes for op in ops)
    left_out = 16 + 5 * 16 + 2 * 4 * 16 + 2 * 16  # [CLS], positions, norms
    assert read == 4 * (source.parameters(source.spec.universal()) - left_out)


def test_the_base_model_of_the_papers_is_known_without_weights(tmp_path: Path) -> None:
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "num_labels": 1000}
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes, "image_size": 224, "patch_size": 16}))
    source = open_source(tmp_path)
    universal = source.spec.universal()
    assert source.parameters(universal) == 86_567_656
    assert macs(source.workload(universal, Bucket(1, 1))) == 17_563_828_224
    with pytest.raises(CheckpointError, match=r"model\.safetensors: no such file"):
        load_universal(source)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"architectures": ["ViTForPretending"]},
            "architecture 'ViTForPretending' is not supported; supported are ViTModel, ViTForImageClassification, "
            "ViTForMaskedImageModeling",
        ),
        ({"intermediate_size": [32]}, "intermediate_size: expected 2 numbers, one per layer, got 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected at most 1024, got 1000000000"),
        ({"image_size": [8, 8, 8]}, "image_size: expected a number of pixels or [height, width], got [8, 8, 8]"),
        ({"num_labels": -1}, "num_labels: expected a whole number of at least 1, got -1"),
        ({"id2label": {}}, "num_labels: expected a whole number of at least 1, got 0"),
        ({"patch_size": 16}, "patch_size: expected at most image_size [8, 8], got [16, 16]"),
        (
            {"granularities": {"fnn": [0.5, 1]}},
            "granularities: this model has no axis kind 'fnn'; did you mean 'ffn'?",
        ),
    ],
)
def test_a_config_that_makes_no_sense(folder: Path, tmp_path: Path, changes: dict[str, object], problem: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "m")
    edit_config(copy, **changes)
    with pytest.raises(CheckpointError, match=rf"^{re.escape(f'{copy}/config.json: {problem}')}$"):
        open_source(copy).spec  # noqa: B018  (a property that reads)


def test_weights_that_do_not_fit_config(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "m")
    name = "vit.encoder.layer.0.intermediate.dense.weight"
    edit_config(copy, intermediate_size=[24, 32])
    problem = f"{copy}: tensor {name} has shape [32, 16]; expected [24, 16] as config.json says"
    with pytest.raises(CheckpointError, match=rf"^{re.escape(problem)}$"):
        open_source(copy)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"qkv_bias": False}, "vit.encoder.layer.0.attention.attention.key.bias"),
        ({"num_hidden_layers": 1}, "vit.encoder.layer.1.attention.attention.key.bias"),
    ],
)
def test_tensors_without_a_place_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, object], name: str
) -> None:
    """transformers passes over them: the answer would be another model's."""
    copy = edit_config(Path(shutil.copytree(folder, tmp_path / "m")), **changes)
    problem = f"{copy}: tensor {name!r} has no place in the model that config.json describes"
    with pytest.raises(CheckpointError, match=rf"^{re.escape(problem)}$"):
        open_source(copy)


def test_the_number_of_classes_counts_before_their_names(folder: Path, tmp_path: Path) -> None:
    copy = edit_config(Path(shutil.copytree(folder, tmp_path / "m")), num_labels=3, id2label={"0": "a"})
    assert load_universal(open_source(copy)).module(IMAGES)[0].shape == (2, 3)
    (copy / "model.safetensors").unlink()
    assert open_source(edit_config(copy, num_labels=...)).signature.outputs[0].dims == ("batch", 1)


@pytest.mark.parametrize("widths", [32, [32, 32]])
def test_a_folder_that_names_no_class_is_the_base_model(tmp_path: Path, widths: object) -> None:
    """The head of another class is passed over, and there need be no pooler."""
    folder = save_tiny_vit(tmp_path / "m", task="ForImageClassification")
    whole = load_universal(open_source(folder)).parameters()
    edit_config(folder, architectures=..., intermediate_size=widths, return_dict=False)
    universal = load_universal(open_source(folder))
    assert [spec.name for spec in universal.source.signature.outputs] == ["last_hidden_state", "embedding"]
    assert torch.equal(universal.parameters()["layernorm.weight"], whole["vit.layernorm.weight"])
    assert [tuple(output.shape) for output in universal.module(IMAGES)] == [(2, 5, 16), (2, 16)]


BUCKETS = [Bucket(1, 1), Bucket(4, 1)]
PIXELS = np.random.default_rng(0).standard_normal((3, 2, 8, 8)).astype(np.float32)
MODELS: dict[str, Callable[[Path], Path]] = {
    "matvit": save_tiny_matvit,
    "vit": lambda folder: cut_ffn(save_tiny_vit(folder), [24, 32]),
}


@pytest.fixture(scope="module", params=list(MODELS))
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = MODELS[request.param](tmp_path_factory.mktemp(request.param) / "m")
    return compile_bundle(folder, board(budgets={"full": {}}), folder.with_suffix(".bundle"), buckets=BUCKETS)


def test_every_engine_is_a_slice_of_one_store(bundle: Path) -> None:
    manifest = nestforge.open_bundle(bundle).manifest
    assert [engine.slice_problem for engine in manifest.engines] == [None] * len(manifest.engines)
    assert {engine.bucket for engine in manifest.engines} == set(BUCKETS)
    assert len(manifest.submodels) > 2
    assert all(engine.private_bytes < 2000 for engine in manifest.engines), "no weights outside the store"
    cases = {engine.bucket: engine.parity.cases for engine in manifest.engines if engine.parity}
    assert cases == {BUCKETS[0]: ("random-0", "random-1"), BUCKETS[1]: ("random-0", "random-1", "padded")}
    assert {proof.suite for proof in manifest.proofs} == {"slice"}
    assert_tensorrt_takes(bundle)


def test_answers_are_pytorchs_for_every_submodel(bundle: Path) -> None:
    universal = load_universal(open_source(bundle.with_suffix("")))
    for axis, order in recover_order([bundle / WEIGHTS_NAME], universal).items():
        permute_axis(universal, axis, order)
    with nestforge.load(bundle) as model:
        for entry in model.bundle.manifest.submodels:
            answer = model({"pixel_values": PIXELS}, submodel=entry.id)
            assert answer.bucket == BUCKETS[1]
            assert answer.padding is not None, "three images in a bucket of four"
            expected = universal.narrow(universal.spec.parse(entry.id))(torch.from_numpy(PIXELS))
            for (name, found), output in zip(answer.outputs.items(), expected, strict=True):
                np.testing.assert_allclose(found, output, atol=2e-5, rtol=1e-4, err_msg=f"{entry.id}: {name}")
        with pytest.raises(InputError, match=r"^input pixel_values: expected float32 \[batch, 2, 8, 8\]"):
            model({"pixel_values": PIXELS[:, :, :4]})


def test_the_written_bundle_verifies_against_its_model(bundle: Path) -> None:
    engines = verify_bundle(bundle, bundle.with_suffix("")).engines
    assert len(engines) == len(nestforge.open_bundle(bundle).manifest.engines)
    assert [engine.problem for engine in engines] == [None] * len(engines)


def test_every_command_knows_models_of_images(bundle: Path, tmp_path: Path) -> None:
    images, profile = tmp_path / "images.npz", tmp_path / "board.yaml"
    profile.write_text(dump_profile(board(budgets={"full": {}})))
    np.savez(images, pixel_values=PIXELS)
    for command in (
        ["inspect", str(bundle.with_suffix(""))],
        ["inspect", str(bundle)],
        ["plan", str(bundle.with_suffix("")), "--profile", str(profile)],
        ["verify", str(bundle)],
        ["run", str(bundle), "--inputs", str(images), "--output", str(tmp_path / "answer.npz")],
    ):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.output
    with np.load(tmp_path / "answer.npz") as answer:
        outputs = nestforge.open_bundle(bundle).manifest.outputs
        assert {name: answer[name].shape for name in answer} == {s.name: s.shape(Bucket(3, 1)) for s in outputs}


def test_images_and_labels_show_what_submodels_keep(tmp_path: Path) -> None:
    folder, data = save_tiny_vit(tmp_path / "m", task="ForImageClassification"), tmp_path / "images.npz"
    rng = np.random.default_rng(0)
    np.savez(data, pixel_values=rng.standard_normal((250, 2, 8, 8), np.float32), labels=rng.integers(0, CLASSES, 250))
    bundle = compile_bundle(folder, board(budgets={"full": {}}), tmp_path / "b", data=data, buckets=BUCKETS[1:])
    manifest = nestforge.open_bundle(bundle).manifest
    assert manifest.ranking.method == "taylor"
    quality = {entry.id: entry.quality for entry in manifest.submodels}
    expected = {"accuracy", "class_agreement", "kl_small_to_universal", "kl_universal_to_small"}
    assert all(figures is not None and figures.figures.keys() == expected for figures in quality.values())
    universal = quality["ffn32-heads2"]
    assert universal.figures["class_agreement"] == 1
    result = CliRunner().invoke(main, ["consistency", str(bundle), "--data", str(data)])
    assert result.exit_code == 0, result.output
