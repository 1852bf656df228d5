"""Gemma 3n as it is published: the text model of a multimodal folder, and the slices of Google's table, against the
same slices cut out of the files by hand."""

import json
from pathlib import Path

import nestforge
import numpy as np
import pytest
import torch
from nestforge.bundle.entries.generation_entry import CACHED
from nestforge.errors import CheckpointError, PlanError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from nestforge.runtime.summary import submodel_table
from support.gemma3n_folders import WIDTH, cut_by_hand, save_published

HEADER = "name,# Layers,# Effective Params (B),MMLU PT accuracy,FFN Hidden Dims,Layers Skipped\n"
E2B, E2B_WIDTHS, SKIPPED = "Config for official E2B Model", (16, 32, 8, 16, 32), (3, 4)
# The fewest layers of which one can be left out; an export of each takes seconds.
SMALLEST = {
    "num_hidden_layers": 3,
    "layer_types": ["full_attention"] * 3,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0],
    "num_kv_shared_layers": 2,
}
IDS = torch.tensor([[5, 9, 41, 7, 12, 3, 30, 31, 8, 4, 11, 40]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_published(tmp_path_factory.mktemp("gemma") / "m")


def table(path: Path, *rows: str) -> Path:
    path.write_text(HEADER + "".join(f"{row}\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("widths", "skipped"),
    [((WIDTH,) * 7, ()), ((16, 32, 8, 16, 32, 8, 32), ()), (E2B_WIDTHS, SKIPPED), ((16, 32, 8, 24, 32), (4, 5))],
)
def test_the_text_model_and_its_slices_are_those_cut_by_hand(
    folder: Path, widths: tuple[int, ...], skipped: tuple[int, ...]
) -> None:
    universal = load_universal(open_source(folder, left_out=(skipped,) if skipped else ()))
    spec = universal.spec
    kept = [layer for layer in range(7) if layer not in skipped]
    values = {f"layers.{layer}.ffn": width for layer, width in zip(kept, widths, strict=True)}
    submodel = spec.submodel(values | ({"depth": len(kept)} if skipped else {}))
    by_hand = cut_by_hand(folder, widths, skipped)
    torch.testing.assert_close(universal.narrow(submodel)(IDS)[0], by_hand(IDS).logits, atol=1e-5, rtol=1e-5)
    tables = (48 - 8) * 8 * len(skipped) + 16 * 8 * len(skipped)  # rows and columns of layers that are left out
    assert universal.source.parameters(submodel) == sum(each.numel() for each in by_hand.parameters()) + tables


def test_a_table_names_submodels_with_their_scores(tmp_path: Path) -> None:
    folder = save_published(tmp_path / "m", **SMALLEST)
    rows = table(
        tmp_path / "configs.csv",
        f'{E2B},2,1.91,50.90%,"[8 * 2, 1_6]","[1]"',
        f'Config for official E4B Model,3,3.98,0.62,"{[WIDTH] * 3}",[]',
    )
    out = tmp_path / "b"
    nestforge.compile(folder, "host-cpu", out, slicing_table=rows, buckets=["1x16"], measure=False)
    by_hand = cut_by_hand(folder, (16, 16), (1,))
    with nestforge.load(out) as model:
        entries = {label: entry for entry in model.bundle.manifest.submodels for label in entry.labels}
        assert entries[E2B].states == {"# Effective Params (B)": 1.91, "MMLU PT accuracy": 0.509}
        assert entries["Config for official E4B Model"].id == "depth3-ffn32"
        answer = model({"input_ids": IDS.numpy()}, submodel=E2B)
        np.testing.assert_allclose(answer["logits"], by_hand(IDS).logits.numpy(), atol=1e-4)
        assert "MMLU PT accuracy" in submodel_table(model.bundle.manifest, model.bundle.build).columns


def test_the_cache_of_a_slice_is_that_of_the_whole_model(folder: Path) -> None:
    universal = load_universal(open_source(folder, left_out=(SKIPPED,), generates=True))
    spec, cached = universal.spec, universal.source.cached
    values = {f"layers.{layer}.ffn": width for layer, width in zip((0, 1, 2, 5, 6), E2B_WIDTHS, strict=True)}
    submodel = spec.submodel({**values, "depth": 5})
    assert cached.at(submodel).layers == cached.layers
    assert universal.source.parts[CACHED].structure(submodel) == (("depth", 5),)
    import transformers

    cache = transformers.DynamicCache()
    expected = cut_by_hand(folder, E2B_WIDTHS, SKIPPED)(IDS, past_key_values=cache, use_cache=True)
    windows = [layer.window for layer in cached.layers for _ in "kv"]
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    kept = [t if window is None else t[:, :, -window:] for t, window in zip(tensors, windows, strict=True)]
    found = cached.recorded(universal.narrow(submodel))(IDS)
    torch.testing.assert_close(found, (expected.logits, *kept), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (f'a,6,1,1,"{[8] * 6}",[2]', r"layer 2 cannot be left out, expected some of 3 to 6; the table is of another"),
        (f'a,6,1,1,"{[8] * 6}",[20]', r"layer 20 cannot be left out, expected some of 3 to 6"),
        (f'a,6,1,1,"{[8] * 6}",[3]\nb,6,1,1,"{[8] * 6}",[4]', r"two sets of 1 layers to leave out; take one of them"),
        (f'a,6,1,1,"{[8] * 6}",[3]\nb,5,1,1,"{[8] * 5}","[4, 5]"', r"layers left out must be left out of smaller subm"),
        (f'100%,7,1,1,"{[8] * 7}",[]', r"line 2: name: '100%' is the name of another submodel"),
        (f'a,7,1,1,"{[8] * 7}",[]\nb,7,1,2,"{[8] * 7}",[]', r"line 3: is the submodel of .*line 2, with other figures"),
    ],
)
def test_a_table_of_another_model(row: str, message: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=message):
        nestforge.plan(folder, "host-cpu", slicing_table=table(tmp_path / "t.csv", row), measure=False)


def test_models_without_such_layers_refuse_to_leave_any_out(tmp_path: Path) -> None:
    folder = save_published(tmp_path / "m", num_kv_shared_layers=0)
    with pytest.raises(PlanError, match="layer 3 cannot be left out, expected none"):
        open_source(folder, left_out=((3,),))


def test_what_of_the_folder_is_left_out_is_noted(folder: Path) -> None:
    assert (
        "the text model of the folder alone: images and audio are left out" in nestforge.plan(folder, "host-cpu").notes
    )


def test_a_multimodal_configuration_without_its_text(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": None}))
    with pytest.raises(CheckpointError, match="text_config: expected the configuration of the text model"):
        open_source(tmp_path)
