"""T5 on its way through the compiler: sliced, equal to PyTorch, and proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
import torch
import transformers
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import open_bundle
from nestforge.exporters.published_slice import read_slice
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from nestforge.runtime.consistency.report import check_consistency
from nestforge.tools.commands.run import best_answers
from safetensors.torch import load_file, save_file
from support.tensorrt_takes import assert_tensorrt_takes
from support.tiny_compile import board, builder_in, template_of
from support.tiny_models import corpus
from support.tiny_t5 import V1_1, save_t5

BUCKET = Bucket(2, 24)


@pytest.mark.parametrize("changes", [{}, V1_1], ids=["relu", "v1.1"])
def test_both_sides_are_sliced_and_equal_pytorch(tmp_path: Path, changes: dict[str, Any]) -> None:
    universal = load_universal(open_source(save_t5(tmp_path / "m", **changes)))
    template = template_of(universal, BUCKET)
    assert template.slice_problem is None
    builder = builder_in(tmp_path / "bundle", universal, template, board(budgets={"full": {}}))
    for widths in ([8, 16, 32], [32, 32, 32]):
        entry = builder.build(universal.spec.from_kinds({"ffn": widths}), BUCKET)
        assert (entry.emitted, entry.slice_problem) == ("sliced", None)
        assert entry.parity is not None
    assert_tensorrt_takes(tmp_path / "bundle")


def test_a_bundle_of_a_range_answers_pairs_of_texts(tmp_path: Path) -> None:
    folder = save_t5(tmp_path / "m", **V1_1)
    options: dict[str, Any] = {"include": "budgets", "buckets": [Bucket(20, 40, 1, 1)], "measure": False}
    path = nestforge.compile(
        folder, board(budgets={"full": {}}), tmp_path / "b", text=corpus(tmp_path / "texts"), **options
    )
    rng = np.random.default_rng(0)
    ids, follows = (rng.integers(3, 512, (20, 33)) for _ in range(2))
    mask = (np.arange(33) < np.array([[33], [20]] * 10)).astype(np.int64)
    model = transformers.T5ForConditionalGeneration.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = model(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            decoder_input_ids=torch.from_numpy(follows),
        ).logits
    with nestforge.load(path) as loaded:
        answer = loaded({"input_ids": ids, "attention_mask": mask, "decoder_input_ids": follows})
        np.testing.assert_allclose(answer.outputs["logits"], expected.numpy(), atol=1e-4)
        assert loaded("the file").outputs["logits"].shape[::2] == (1, 512)
    np.savez(tmp_path / "pairs.npz", input_ids=ids, attention_mask=mask, decoder_input_ids=follows)
    (found,) = check_consistency(open_bundle(path), data=tmp_path / "pairs.npz").submodels
    loss = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), torch.from_numpy(follows[:, 1:]).flatten())
    assert found.figures["loss"] == pytest.approx(loss.item(), abs=1e-4), "of what the decoder continues, all of it"


def test_no_next_token_is_named_of_a_text_that_both_sides_read(tmp_path: Path) -> None:
    path = nestforge.compile(save_t5(tmp_path / "m"), board(budgets={"full": {}}), tmp_path / "b", measure=False)
    with nestforge.load(path) as loaded:
        assert best_answers(loaded.bundle, loaded("the"), [3]) is None


def test_a_narrower_t5_is_a_slice(tmp_path: Path) -> None:
    wide = save_t5(tmp_path / "wide")
    narrow = save_t5(tmp_path / "narrow", d_ff=16)
    tensors, small = (load_file(folder / "model.safetensors") for folder in (wide, narrow))
    cut = {name: tensors[name][tuple(slice(n) for n in tensor.shape)].contiguous() for name, tensor in small.items()}
    save_file(cut, narrow / "model.safetensors", {"format": "pt"})
    assert read_slice(open_source(wide), narrow).id == "ffn16"
