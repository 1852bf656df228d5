"""Buckets of the distances of tokens, looked up, beside those that classes of transformers compute."""

from __future__ import annotations

import pytest
import torch
import transformers
from nestforge.errors import ExportError
from nestforge.exporters.hugging_face.distances import biased_parts, look_up_distances


@pytest.mark.parametrize("model_type", ["t5", "umt5"])  # a function of the class, and one of the layer
@pytest.mark.parametrize(("buckets", "farthest"), [(8, 20), (32, 128), (32, 17)])
def test_buckets_are_those_of_transformers_on_both_sides(model_type: str, buckets: int, farthest: int) -> None:
    sizes = {"relative_attention_num_buckets": buckets, "relative_attention_max_distance": farthest}
    model, own = made(model_type, **sizes), made(model_type, **sizes)
    places = torch.arange(-700, 701)
    look_up_distances(model)
    for part, computing in zip(biased_parts(model), biased_parts(own), strict=True):
        expected = computing.compute_bias(1, 1401, past_seen_tokens=700)  # of distances from -700 to 700
        buckets_of = part._relative_position_bucket(places)
        found = computing.relative_attention_bias(buckets_of).T[None, :, None]
        assert torch.equal(found, expected)
    assert len(biased_parts(model)) == (2 if model_type == "t5" else 4)


def test_a_table_of_too_many_distances_is_refused() -> None:
    with pytest.raises(ExportError, match="relative_attention_max_distance: expected at most 65536, got 65537"):
        look_up_distances(made("t5", relative_attention_max_distance=65537))


def made(model_type: str, **sizes: int) -> transformers.PreTrainedModel:
    name = {"t5": "T5ForConditionalGeneration", "umt5": "UMT5ForConditionalGeneration"}[model_type]
    small = {"d_model": 8, "d_kv": 8, "d_ff": 8, "num_heads": 2, "num_layers": 2, "vocab_size": 8, **sizes}
    model: transformers.PreTrainedModel = getattr(transformers, name)(
        transformers.AutoConfig.for_model(model_type, **small)
    )
    return model.eval().requires_grad_(False)
