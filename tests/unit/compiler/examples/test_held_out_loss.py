from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from nestforge.compiler.examples.texts import HeldOutLoss
from nestforge.errors import CheckpointError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal
from support.tiny_compile import save_tiniest
from support.tiny_matlm import save_sure_matlm
from support.tokenizer_files import word_tokenizer

TEXTS = ("the quick brown fox", "a lazy dog jumps over the model of time", "run", "test engine budget shape to and")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> UniversalModel:
    folder = save_sure_matlm(tmp_path_factory.mktemp("lm") / "lm", 20)
    return load_universal(open_source(folder))


def test_next_tokens_are_judged_one_text_at_a_time(decoder: UniversalModel) -> None:
    """Batches, padding and sorting change nothing: the mean over the tokens of every text but its first."""
    loss = HeldOutLoss(decoder, TEXTS)
    assert loss.unit == "nats per token"
    submodel = decoder.spec.parse("ffn8x1_16x1")
    module = decoder.narrow(submodel)
    total, count = 0.0, 0
    tokenizer = word_tokenizer(32)
    for text in TEXTS:
        ids = torch.tensor([tokenizer.encode(text).ids])
        with torch.no_grad():
            (logits,) = module(ids)
        total -= float(logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None]).sum())
        count += ids.shape[1] - 1
    assert loss(submodel) == pytest.approx(total / count, rel=1e-5)
    assert loss(decoder.spec.universal()) != loss(submodel)


def test_an_encoder_is_compared_with_the_universal_model(tmp_path: Path) -> None:
    universal = load_universal(open_source(save_tiniest(tmp_path / "bert")))
    loss = HeldOutLoss(universal, TEXTS)
    assert loss.unit == "1 - cosine of last_hidden_state to the universal model's"
    assert loss(universal.spec.universal()) == pytest.approx(0, abs=1e-12)
    half, least = loss(universal.spec.parse("ffn16-heads2")), loss(universal.spec.parse("ffn8-heads1"))
    assert 0 < half < least < 2
    one = [HeldOutLoss(universal, [text])(universal.spec.parse("ffn8-heads1")) for text in TEXTS]
    assert least == pytest.approx(math.fsum(one) / len(one), rel=1e-5)


def test_a_model_that_reads_no_text(tmp_path: Path) -> None:
    folder = save_tiniest(tmp_path / "bert")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json, so this model reads no texts$"):
        HeldOutLoss(load_universal(open_source(folder)), TEXTS)
