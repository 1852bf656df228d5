"""Folders of ordinary encoders, converted and compiled: at r = 1 an engine answers as transformers does."""

from __future__ import annotations

from pathlib import Path

import nestforge
import numpy as np
import pytest
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.convert_coda import convert_coda
from nestforge.errors import CheckpointError, NestforgeError, OutputError
from nestforge.profiles.nest_request import ConversionSettings
from support.tiny_compile import board
from support.tiny_models import save_tiny_encoder, save_tiny_vit

SETTINGS = ConversionSettings(adapter_size=4, reduction=2, reductions=(2, 1))


def bert_inputs() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(4, 64, (2, 8))
    mask = np.ones((2, 8), np.int64)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2}


def vit_inputs() -> dict[str, np.ndarray]:
    return {"pixel_values": np.random.default_rng(0).standard_normal((2, 2, 8, 8)).astype(np.float32)}


@pytest.mark.parametrize(("kind", "bucket", "tokens"), [("bert", "2x8", 8), ("vit", "2x1", 5)])
def test_a_converted_folder_compiles_at_every_reduction(tmp_path: Path, kind: str, bucket: str, tokens: int) -> None:
    import torch
    import transformers

    save = save_tiny_encoder if kind == "bert" else save_tiny_vit
    feeds = bert_inputs() if kind == "bert" else vit_inputs()
    folder = save(tmp_path / "m", num_hidden_layers=1)
    report = convert_coda(folder, tmp_path / "conditional", SETTINGS)
    assert (report.left_out, report.groups["routers"]) == (("pooler",), report.config.hidden_size)
    assert (tmp_path / "conditional" / "tokenizer.json").is_file() == (kind == "bert")

    profile = board(budgets={"full": {}}, buckets=[bucket])
    bundle = open_bundle(compile_bundle(tmp_path / "conditional", profile, tmp_path / "b"))
    found = {int((engine.metadata or {})["reduction"]): engine for engine in bundle.manifest.engines}
    for reduction, selected in ((2, -(-tokens // 2)), (1, tokens)):
        engine = found[reduction]
        assert (engine.emitted, engine.slice_problem) == ("sliced", None)
        assert engine.parity is not None
        metadata = engine.metadata or {}
        assert (metadata["tokens per row"], metadata["tokens selected"]) == (tokens, selected)
    reference = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        states = reference(**{name: torch.from_numpy(array) for name, array in feeds.items()}).last_hidden_state
    with nestforge.load(bundle.path) as model:
        answer = model(feeds, submodel=found[1].submodel).outputs["last_hidden_state"]
        routed = model(feeds, submodel=found[2].submodel, routing=True)
    # Padding has no answer, but a class of transformers has one.
    valid = feeds["attention_mask"] > 0 if kind == "bert" else np.ones((2, tokens), bool)
    np.testing.assert_allclose(answer[valid], states.numpy()[valid], rtol=0, atol=1e-4)
    assert routed.routing is not None
    assert routed.routing["routes.0"].shape == (2, -(-tokens // 2))


def test_nothing_is_written_where_it_fails_or_the_output_exists(tmp_path: Path) -> None:
    folder = save_tiny_encoder(tmp_path / "m", num_hidden_layers=1)
    with pytest.raises(NestforgeError, match=r"^dense layers: expected numbers from 0 to 0, got 1$"):
        convert_coda(folder, tmp_path / "out", ConversionSettings(dense_layers=(1,)))
    with pytest.raises(CheckpointError, match="no such folder"):
        convert_coda(tmp_path / "none", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="exists already"):
        convert_coda(folder, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_the_model_that_is_converted_is_never_replaced(tmp_path: Path) -> None:
    folder = save_tiny_encoder(tmp_path / "m", num_hidden_layers=1)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(OutputError, match="is the model that is converted, which is not replaced"):
        convert_coda(folder, folder / ".." / "m", SETTINGS, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
