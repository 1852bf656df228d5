"""Parts of a model that get engines of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.generation_entry import CACHED, CachedLayer
from nestforge.exporters.parts import CachedSpec, Part
from nestforge.exporters.source import ModelSource, open_source
from support.gated_decoders import save_decoder
from support.tiny_matlm import save_tiny_matlm


def test_a_part_has_the_bucket_of_the_profile_or_its_own() -> None:
    part = Part("head", (), (), lambda *_: [], lambda module: module)
    own = Part("head", (), (), lambda *_: [], lambda module: module, bucket=Bucket(64, 512, 1, 1))
    assert part.at(Bucket(1, 8)) == Bucket(1, 8)
    assert own.at(Bucket(1, 8)) == Bucket(64, 512, 1, 1)


def form(size: int = 8, positions: int = 40, problem: str | None = None) -> CachedSpec:
    layers = (CachedLayer(2, size),) * 2
    return CachedSpec(48, positions, layers, lambda module: module, lambda module: module, family_problem=problem)


def test_engines_take_rows_of_one_token_and_as_many_tokens_as_the_model_has_positions() -> None:
    assert form().bucket == Bucket(64, 40, 1, 1)
    assert form(positions=4096).bucket == Bucket(64, 512, 1, 1)


def test_the_interface_has_two_tensors_a_layer_and_names_what_the_caller_chooses() -> None:
    (part,) = form().parts(lambda *_: [])
    assert part.name == CACHED
    assert [spec.name for spec in part.inputs] == [
        *("input_ids", "position_ids", "logits_at"),
        *("past_key_0", "past_value_0", "past_key_1", "past_value_1"),
    ]
    assert part.inputs[3].dims == ("batch", 2, "capacity", 8)
    assert part.outputs[0].dims == ("batch", "answers", 48)
    assert part.outputs[0].declared(Bucket(64, 40, 1, 1)) == ("batch", "answers", 48)
    assert [spec.name for spec in part.outputs[1:3]] == ["present_key_0", "present_value_0"]


def test_costs_are_those_of_one_new_token() -> None:
    asked: list[Bucket] = []
    (part,) = form().parts(lambda _, bucket: asked.append(bucket) or [])  # type: ignore[func-returns-value]
    part.workload(None, Bucket(64, 40, 1, 1))  # type: ignore[arg-type]
    assert asked == [Bucket(1, 1)]


def test_a_head_that_the_operator_cannot_read_is_a_problem() -> None:
    assert form().problem is None
    assert form(size=12).problem == "heads of size 12; expected a multiple of 8"
    assert form(size=12, problem="of the family").problem == "of the family"


def source(folder: Path, **overrides: Any) -> ModelSource:
    return open_source(save_decoder(folder, **overrides))


def test_families_say_what_they_cannot(tmp_path: Path) -> None:
    llama = source(tmp_path / "llama", head_dim=8).architecture.cached
    assert llama is not None
    assert (llama.problem, llama.layers) == (None, (CachedLayer(2, 8),) * 2)
    gemma3n = source(tmp_path / "gemma3n", model_type="gemma3n_text", head_dim=8).architecture.cached
    assert gemma3n is not None
    assert (gemma3n.problem, len(gemma3n.layers)) == (None, 2), "the third layer reads the keys of the second"


@pytest.mark.parametrize(("options", "heads"), [({}, [4, 4, 4]), ({"nested_heads": True}, [4, 2, 1])])
def test_the_cache_of_a_submodel_has_its_own_heads(tmp_path: Path, options: dict[str, Any], heads: list[int]) -> None:
    matlm = open_source(save_tiny_matlm(tmp_path / "matlm", **options))
    cached = matlm.architecture.cached
    assert cached is not None
    assert cached.problem is None
    assert {layer.heads for layer in cached.layers} == {4}
    kept = {axis.name: heads[int(axis.name.split(".")[1])] for axis in matlm.spec.axes if axis.kind == "heads"}
    assert [layer.heads for layer in cached.at(matlm.spec.submodel(kept)).layers] == heads


def test_only_a_source_that_generates_has_the_part(tmp_path: Path) -> None:
    from dataclasses import replace

    quiet = source(tmp_path / "llama", head_dim=8)
    assert not quiet.parts
    assert list(replace(quiet, generates=True).parts) == [CACHED]


@pytest.mark.parametrize("head", ["LlamaModel", "LlamaForSequenceClassification"])
def test_a_model_without_logits_of_tokens_does_not_generate(tmp_path: Path, head: str) -> None:
    from support.tiny_models import edit_config

    folder = edit_config(save_decoder(tmp_path, head_dim=8), architectures=[head])
    (folder / "model.safetensors").unlink()
    assert open_source(folder).architecture.cached is None
