from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from nestforge.errors import CheckpointError
from nestforge.exporters.families.sparse_mixer.config import MixingKind
from nestforge.exporters.families.sparse_mixer.model import load_model
from support.tiny_mixer import mixer_config, save_tiny_mixer, tiny_mixer

IDS = torch.randint(0, 24, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mixing", get_args(MixingKind))
def test_what_was_saved_is_what_is_loaded(tmp_path: Path, mixing: MixingKind) -> None:
    folder = save_tiny_mixer(tmp_path / "model", mixing=mixing, head="pretraining", num_labels=3)
    loaded = load_model(folder)
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    assert {name: held.device.type for name, held in loaded.named_buffers()} == {
        name: "cpu" for name, _ in tiny_mixer(loaded.config).named_buffers()
    }
    expected = tiny_mixer(mixer_config(mixing=mixing, head="pretraining", num_labels=3))
    types = torch.zeros_like(IDS)
    for output, reference in zip(loaded(IDS, types), expected(IDS, types), strict=True):
        assert torch.equal(output, reference)
    assert (folder / "tokenizer.json").is_file()


def test_a_config_that_the_weights_do_not_fit_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_mixer(tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_experts": 8}))
    with pytest.raises(
        CheckpointError,
        match=r"layers\.1\.moe\.router\.weight has shape \[4, 16\]; expected \[8, 16\] as config\.json says$",
    ):
        load_model(folder)
