"""LayerSkip: an ordinary decoder that answers after fewer layers, by its one norm and head; its exits draft for all
layers on one cache. Against transformers with the same layers cut off, and with its own early exit as a draft."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
import torch
from nestforge.errors import PlanError, SelectionError
from nestforge.exporters.source import open_source
from nestforge.runtime.model import ElasticModel
from support.gated_decoders import save_decoder

LAYERS, IDS = 2, torch.tensor([[5, 9, 41, 7, 12, 3, 30, 31, 8, 4]])
PROMPT: list[int] = IDS[0].tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = {"num_hidden_layers": LAYERS, "head_dim": 8, "eos_token_id": None}
    return save_decoder(tmp_path_factory.mktemp("layerskip") / "m", "llama", **own)


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[ElasticModel]:
    out = folder.with_name("b")
    nestforge.compile(folder, "host-cpu", out, exits=[1], buckets=["1x16"], generate=True, measure=False)
    with nestforge.load(out) as loaded:
        yield loaded


@pytest.fixture
def theirs(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)


def text(theirs: Any, **how: Any) -> list[int]:
    found = theirs.generate(IDS, max_new_tokens=20, do_sample=False, pad_token_id=0, **how)
    return list(found[0, IDS.shape[1] :].tolist())


def test_an_exit_scores_and_generates_as_the_layers_before_it(model: ElasticModel, theirs: Any) -> None:
    layers = theirs.model.layers
    for depth in (1, LAYERS):
        theirs.model.layers = layers[:depth]
        answer = model({"input_ids": IDS.numpy()}, submodel=f"depth{depth}")
        np.testing.assert_allclose(answer["logits"], theirs(IDS).logits.numpy(), atol=1e-4)
        found = model.generate([PROMPT, PROMPT[:4]], max_tokens=20, submodel=f"depth{depth}")
        assert list(found.rows[0].tokens) == text(theirs, use_cache=False)


def test_an_exit_drafts_for_all_layers_on_one_cache(model: ElasticModel, theirs: Any) -> None:
    found = model.generate([PROMPT], max_tokens=20, submodel=f"depth{LAYERS}", draft="depth1", drafted=3).rows[0]
    assert list(found.tokens) == text(theirs) == text(theirs, assistant_early_exit=1)
    (drafts,) = found.drafts
    assert drafts.draft.startswith("depth1")
    assert drafts.drafted > 10
    with pytest.raises(
        SelectionError, match=r"draft depth2-ffn32: expected a submodel that .* is smaller than depth1-f"
    ):
        model.generate([PROMPT], submodel="depth1", draft="depth2")


def test_fewer_layers_continue_a_cache_of_more_and_not_the_other_way(model: ElasticModel) -> None:
    with model.session(capacity=40) as session:
        first = model.generate([PROMPT], max_tokens=5, submodel="depth1", session=session).rows[0]
        longer = [*PROMPT, *first.tokens]
        whole = model.generate([longer], max_tokens=5, session=session).rows[0]
        assert whole.reused_tokens == 0, "the layers behind the exit have no keys of them"
        assert whole.tokens == model.generate([longer], max_tokens=5).rows[0].tokens
        fast = model.generate([[*longer, *whole.tokens]], max_tokens=3, tokens_per_second=1e9, session=session).rows[0]
        assert fast.reused_tokens == len(longer) + len(whole.tokens) - 1
        assert [run.submodel for run in fast.runs] == ["depth2-ffn32", "depth1-ffn32"]


def test_the_bundle_states_which_layers_have_a_cache_and_is_verified(folder: Path, model: ElasticModel) -> None:
    generation = model.bundle.manifest.generation
    assert generation is not None
    by_submodel = {engine.submodel: generation.of(engine) for engine in generation.engines}
    assert by_submodel["depth1-ffn32"].heads == (2, 0)
    inputs, outputs = by_submodel["depth1-ffn32"].interface
    assert [spec.name for spec in inputs][3:] == ["past_key_0", "past_value_0"]
    assert [spec.name for spec in outputs] == ["logits", "present_key_0", "present_value_0"]
    assert by_submodel["depth2-ffn32"].heads == (2, 2)
    assert nestforge.verify(model.bundle.path, against=folder)


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma3_text"])
def test_models_whose_cache_is_not_one_of_every_layer_generate_without_exits(model_type: str, tmp_path: Path) -> None:
    folder = save_decoder(tmp_path / "m", model_type, head_dim=8)
    assert open_source(folder, (1,)).spec.kinds[0] == "depth", "they score by exits"
    with pytest.raises(
        PlanError, match="generate: m cannot: with exits: some layers have a window, or no keys of their own"
    ):
        nestforge.plan(folder, "host-cpu", exits=[1], generate=True)
