"""How far apart heads may weigh two keys: a bound that no token exceeds, and the exact figure of plain embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.checkpoint import Checkpoint, open_checkpoint
from nestforge.exporters.families.mhe.forms import key_spread, places_of
from safetensors.torch import load_file, save_file
from support.tiny_mhe import (
    decoder_config,
    encoder_config,
    pair_config,
    save_tiny_mhe,
    save_tiny_pair,
    tiny_mhe,
)

ADD: dict[str, Any] = {"attention": "mhe_add", "num_hidden_layers": 2}
DRAW = torch.Generator().manual_seed(0)
IDS = torch.randint(0, 40, (64, 24), generator=DRAW)


def spreads(model: Any, given: tuple[torch.Tensor, ...]) -> list[float]:
    """What each sublayer's heads add to the keys of a pass, the largest less the smallest."""
    found: list[float] = []

    def watch(attention: Any, made: Any) -> None:
        key = made @ attention.key.weight.T * attention.config.scale
        by_key = key @ attention.embedding["query"].T
        found.append(float((by_key.flatten(0, 1).amax(0) - by_key.flatten(0, 1).amin(0)).max()))

    for place in places_of(model.config):
        attention = model.get_submodule(place.at)
        kept = attention.kept
        attention.kept = lambda hidden, turn=None, own=attention, kept=kept: watch(own, hidden) or kept(hidden, turn)
    model(*given)
    return found


@pytest.mark.parametrize("kind", ["encoder", "decoder", "pair"])
def test_no_token_exceeds_the_bound(tmp_path: Path, kind: str) -> None:
    config: Any = {"encoder": encoder_config, "decoder": decoder_config, "pair": pair_config}[kind](**ADD)
    folder = save_tiny_pair(tmp_path / "m", **ADD) if kind == "pair" else None
    checkpoint = open_checkpoint(folder or save_tiny_mhe(tmp_path / "m", kind == "decoder", **ADD))
    model = tiny_mhe(config)
    if kind == "pair":
        model.embeddings.position.weight *= 5
    ones = torch.ones_like(IDS)
    given = {"encoder": (IDS, ones), "decoder": (IDS,), "pair": (IDS, ones, IDS)}[kind]
    found, bound = spreads(model, given), key_spread(checkpoint, config)
    assert len(found) == len(places_of(config))
    assert max(found) <= bound < 4 * max(found), "and the bound is no wild one"


def test_of_embeddings_it_is_what_the_tables_hold(tmp_path: Path) -> None:
    """Where every sublayer but those that read embeddings adds nothing."""
    config = pair_config(**ADD)
    folder = save_tiny_pair(tmp_path / "m", **ADD)
    weights = load_file(folder / "model.safetensors")
    for place in places_of(config):
        if place.at != "encoder.layers.0.attention":
            weights[f"{place.at}.embedding.query"].zero_()
    save_file(weights, folder / "model.safetensors")
    at = "encoder.layers.0.attention"
    u = weights[f"{at}.embedding.query"] @ weights[f"{at}.key.weight"] * config.scale
    words, places = (weights[f"embeddings.{name}.weight"].double() @ u.double().T for name in ("word", "position"))
    every = (words[:, None] + places[None]).flatten(0, 1)
    expected = (every.amax(0) - every.amin(0)).max().item()
    assert key_spread(open_checkpoint(folder), config) == pytest.approx(expected, rel=1e-6)


def test_weights_in_bfloat16_are_read(tmp_path: Path) -> None:
    config, folder = encoder_config(**ADD), save_tiny_mhe(tmp_path / "m", **ADD)
    whole = key_spread(open_checkpoint(folder), config)
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, folder / "model.safetensors")
    np.testing.assert_allclose(key_spread(open_checkpoint(folder), config), whole, rtol=0.02)


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    config, folder = encoder_config(**ADD), save_tiny_mhe(tmp_path / "m", **ADD)
    weights = load_file(folder / "model.safetensors")
    name = f"{places_of(config)[0].at}.embedding.query"
    weights[name][0, 0] = torch.inf
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"^{folder}: tensor {name} holds NaN or infinite values$"):
        key_spread(open_checkpoint(folder), config)


def test_other_kinds_and_models_without_weights_have_none(tmp_path: Path) -> None:
    folder = save_tiny_mhe(tmp_path / "m")
    assert key_spread(open_checkpoint(folder), encoder_config()) == 0
    assert key_spread(open_checkpoint(folder), encoder_config(**ADD, position="rotary")) == 0, "which share no keys"
    untrained = Checkpoint(tmp_path, {}, {}, missing="not trained")
    assert key_spread(untrained, encoder_config(**ADD)) == 0
