import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from nestforge.compiler.graph.template import Template
from nestforge.compiler.verify import verify_bundle
from nestforge.errors import BundleCorruptError, CheckpointError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from support.sealing import reseal
from support.tiny_compile import board, builder_in, save_tiniest, write_levels
from support.tiny_models import add_pooling


@pytest.fixture(scope="module")
def written(tiniest: Path, template: Template, tmp_path_factory: pytest.TempPathFactory) -> Path:
    universal = load_universal(open_source(tiniest))
    builder = builder_in(tmp_path_factory.mktemp("verified") / "bundle", universal, template, board())
    folder = write_levels(builder)
    shutil.rmtree(builder.stage.work)
    return folder


@pytest.fixture
def bundle(written: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(written, tmp_path / "bundle"))


@pytest.fixture
def copy(tiniest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiniest, tmp_path / "model"))


def edit(model: Path, name: str, change: Any) -> None:
    tensors = safetensors.numpy.load_file(model / "model.safetensors")
    tensors[name] = change(tensors[name])
    safetensors.numpy.save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def test_bytes_alone(bundle: Path) -> None:
    report = verify_bundle(bundle)
    assert report
    assert (report.files, report.against, report.engines) == (6, None, ())
    assert report.bytes == sum(path.stat().st_size for path in bundle.iterdir() if path.suffix not in {".md"}) - sum(
        (bundle / name).stat().st_size for name in ("manifest.json", "build.json")
    )


def test_against_its_model_every_engine_is_compared(bundle: Path, tiniest: Path) -> None:
    stages: list[str] = []
    report = verify_bundle(bundle, tiniest, lambda stage, *_: stages.append(stage))
    assert report
    assert [verdict.engine for verdict in report.engines] == [
        "ffn8-heads1@b2-s8",
        "ffn16-heads1@b2-s8",
        "ffn24-heads2@b2-s8",
        "ffn32-heads2@b2-s8",
    ]
    assert all(len(verdict.outputs) == 3 and verdict.problem is None for verdict in report.engines)
    assert list(dict.fromkeys(stages)) == ["hashes", "model", "parity"]


def test_a_flipped_byte_is_found_before_a_model_is_opened(bundle: Path) -> None:
    raw = bytearray((bundle / "weights.safetensors").read_bytes())
    raw[len(raw) // 2] ^= 1
    (bundle / "weights.safetensors").write_bytes(raw)
    for against in (None, bundle / "no model"):
        with pytest.raises(BundleCorruptError, match=r"weights.safetensors: sha256 \w+, expected \w+"):
            verify_bundle(bundle, against)


@pytest.mark.usefixtures("blatant")
def test_engines_that_changed_places_under_new_hashes_are_caught_by_parity(bundle: Path, tiniest: Path) -> None:
    one, other = bundle / "ffn8-heads1.b2-s8.onnx", bundle / "ffn16-heads1.b2-s8.onnx"
    raw = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(raw)
    reseal(bundle)
    assert verify_bundle(bundle), "bytes alone cannot tell"
    report = verify_bundle(bundle, tiniest)
    assert not report
    assert [bool(verdict.problem) for verdict in report.engines] == [True, True, False, False]
    assert (report.engines[0].problem or "").startswith("output last_hidden_state, case random-0: max abs ")


@pytest.mark.usefixtures("blatant")
def test_a_changed_weight_under_new_hashes_is_caught(bundle: Path, tiniest: Path) -> None:
    """A LayerNorm has no axis, so that only parity can see it."""
    tensors = safetensors.numpy.load_file(bundle / "weights.safetensors")
    tensors["encoder.layer.1.output.LayerNorm.weight"][3] *= 1.01
    safetensors.numpy.save_file(tensors, bundle / "weights.safetensors", metadata={"format": "nestforge"})
    reseal(bundle)
    assert not verify_bundle(bundle, tiniest)


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        ({"num_hidden_layers": 3}, "axes"),
        ({"intermediate_size": 40}, "axes"),
        ({"vocab_size": 65}, "inputs"),
        ({"model_type": "roberta"}, "inputs"),
        ({"hidden_size": 32}, "outputs"),
        ({"task": "ForSequenceClassification"}, "outputs"),
    ],
    ids=str,
)
def test_another_kind_of_model(bundle: Path, tmp_path: Path, overrides: dict[str, Any], what: str) -> None:
    other = save_tiniest(tmp_path / "other", **overrides)
    if "task" not in overrides:
        add_pooling(other)
    with pytest.raises(
        CheckpointError, match=rf"other: its {what} are not those of .*; the bundle was made from another"
    ):
        verify_bundle(bundle, other)


def test_the_same_kind_with_other_weights(bundle: Path, copy: Path) -> None:
    edit(copy, "encoder.layer.1.intermediate.dense.weight", lambda weight: np.ascontiguousarray(weight * 1.5))
    with pytest.raises(
        CheckpointError, match=r"weights of layers.1.ffn are not those in .*bundle; the bundle was made"
    ):
        verify_bundle(bundle, copy)


@pytest.mark.usefixtures("blatant")
def test_other_weights_where_no_axis_is(bundle: Path, copy: Path) -> None:
    edit(copy, "embeddings.LayerNorm.bias", lambda bias: bias + 0.01)
    report = verify_bundle(bundle, copy)
    assert not report
    assert all(verdict.problem for verdict in report.engines)


def test_a_model_whose_steps_stand_in_another_order_is_the_same_model(bundle: Path, copy: Path) -> None:
    """Function and steps are the same, so the bundle could have been made from it."""
    order = np.random.default_rng(0).permutation(32)
    block = "encoder.layer.0."
    edit(copy, f"{block}intermediate.dense.weight", lambda w: np.ascontiguousarray(w[order]))
    edit(copy, f"{block}intermediate.dense.bias", lambda b: np.ascontiguousarray(b[order]))
    edit(copy, f"{block}output.dense.weight", lambda w: np.ascontiguousarray(w[:, order]))
    assert verify_bundle(bundle, copy)
