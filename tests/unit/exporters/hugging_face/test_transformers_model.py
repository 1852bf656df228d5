from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.errors import CheckpointError
from nestforge.exporters.hugging_face.transformers_model import SplitFfn
from nestforge.exporters.source import open_source
from nestforge.exporters.trace import trace
from nestforge.exporters.universal import load_universal
from support.gated_decoders import make_decoder, save_decoder
from transformers import masking_utils


def test_an_export_of_any_length_looks_for_no_second_sequence_in_a_row(tmp_path: Path) -> None:
    """transformers' search ends in running sums of whole numbers, which TensorRT does not take."""
    universal = load_universal(open_source(save_decoder(tmp_path / "m")))
    search = masking_utils.find_packed_sequence_indices
    traced = trace(universal.module, universal.source.signature, Bucket(1, 8, min_sequence=1), 20)
    assert {node.op_type for node in traced.model.graph} & {"CumSum", "GatherND"} == set()
    assert masking_utils.find_packed_sequence_indices is search


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_views_of_their_file_or_widened_one_by_one(tmp_path: Path, dtype: torch.dtype) -> None:
    """Files of 16 bits are not mapped: their pages would stay beside what was made of them."""
    model = make_decoder("llama").to(dtype)
    model.save_pretrained(tmp_path / "m", max_shard_size="4KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    loaded = load_universal(open_source(tmp_path / "m")).parameters()
    wanted = dict(model.named_parameters())
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[name], parameter.float()) for name, parameter in wanted.items())
    assert (str(tmp_path / "m") in Path("/proc/self/maps").read_text()) == (dtype is torch.float32)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused(tmp_path: Path, wrong: float) -> None:
    model = make_decoder("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 2] = wrong
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN or infinite values"):
        load_universal(open_source(tmp_path / "m"))


def test_it_is_the_packed_one_on_the_same_weights() -> None:
    packed = make_decoder("phi3").model.layers[0].mlp
    split, x = SplitFfn(packed), torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(split(x), packed(x))
    assert split.up_proj.weight.data_ptr() == packed.gate_up_proj.weight[32:].data_ptr()
    assert [tuple(parameter.shape) for parameter in split.parameters()] == [(32, 16), (32, 16), (16, 32)]
