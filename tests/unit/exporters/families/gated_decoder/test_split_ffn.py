"""Gate and up apart: the same function as the packed FFN, on its weights."""

from __future__ import annotations

import torch
from nestforge.exporters.families.gated_decoder.split_ffn import SplitFfn
from support.gated_decoders import make_decoder


def test_it_is_the_packed_one_on_the_same_weights() -> None:
    packed = make_decoder("phi3").model.layers[0].mlp
    split, x = SplitFfn(packed), torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(split(x), packed(x))
    assert split.up_proj.weight.data_ptr() == packed.gate_up_proj.weight[32:].data_ptr()
    assert [tuple(parameter.shape) for parameter in split.parameters()] == [(32, 16), (32, 16), (16, 32)]
