from __future__ import annotations

from pathlib import Path

import torch
from nestforge.bucket import Bucket
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


def test_it_is_the_packed_one_on_the_same_weights() -> None:
    packed = make_decoder("phi3").model.layers[0].mlp
    split, x = SplitFfn(packed), torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(split(x), packed(x))
    assert split.up_proj.weight.data_ptr() == packed.gate_up_proj.weight[32:].data_ptr()
    assert [tuple(parameter.shape) for parameter in split.parameters()] == [(32, 16), (32, 16), (16, 32)]
