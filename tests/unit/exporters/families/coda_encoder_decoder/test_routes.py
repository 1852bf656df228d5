from __future__ import annotations

import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.errors import ParityError
from nestforge.exporters.families.coda.encoder_decoder import Answering, RecordedPass, SourceEncoder
from nestforge.exporters.families.coda.encoder_decoder_config import elastic_spec
from nestforge.exporters.families.coda.encoder_decoder_family import PairRoutes
from support.tiny_coda_t5 import encoder_config, pair_config, tiny_pair

CONFIG = pair_config(encoder_config(reduction=3))
ROUTES, MODEL = PairRoutes(CONFIG), tiny_pair(CONFIG)
IDS = torch.randint(0, 40, (1, 7), generator=torch.Generator().manual_seed(1))


def test_of_a_bucket_and_of_a_prompt_of_any_length() -> None:
    spec = elastic_spec(CONFIG)
    reduced = spec.parse("ffn32-coda.reduction3")
    assert [entry.shape for entry in ROUTES.entries(reduced, Bucket(2, 7))] == [(2, 3)]
    assert [entry.shape for entry in ROUTES.of_prompts(reduced)] == [(1, 8)], "of 24 tokens, the longest"
    assert ROUTES.of_prompts(spec.universal()) == () == ROUTES.entries(spec.universal(), Bucket(2, 7))
    assert ROUTES.metadata(reduced, Bucket(2, 7))["tokens selected"] == 3
    assert ROUTES.orders("routes.0") == {}


@pytest.mark.parametrize("kind", ["whole", "prompt", "recorded"])
def test_every_pass_takes_given_tokens_and_judges_them(kind: str) -> None:
    module, inputs = {
        "whole": (Answering(MODEL), (IDS, torch.ones_like(IDS), IDS)),
        "prompt": (SourceEncoder(MODEL), (IDS,)),
        "recorded": (RecordedPass(MODEL), (IDS, IDS)),
    }[kind]
    own = MODEL.encoder.routed(IDS, None)[1][0].own
    beyond = own if kind == "whole" else torch.cat([own, torch.full((1, 5), -1)], 1)
    right = ROUTES.replay(module, inputs, {"routes.0": beyond})
    assert right.routes["routes.0"].score_gap == 0
    for found, expected in zip(right.outputs, module(*inputs), strict=True):
        torch.testing.assert_close(found, expected)
    other = torch.tensor([[token for token in range(7) if token not in own[0]][:3]])
    wrong = ROUTES.replay(module, inputs, {"routes.0": other})
    assert wrong.routes["routes.0"].score_gap > 0
    assert not torch.allclose(wrong.outputs[0], right.outputs[0])


def test_tokens_behind_those_of_the_prompt_are_refused() -> None:
    own = MODEL.encoder.routed(IDS, None)[1][0].own
    given = torch.cat([own, torch.tensor([[-1, 5]])], 1)
    with pytest.raises(ParityError, match=r"routes\.0: expected -1 behind 3 tokens"):
        ROUTES.replay(SourceEncoder(MODEL), (IDS,), {"routes.0": given})
