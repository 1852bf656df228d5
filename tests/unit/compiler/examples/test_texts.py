"""Texts of a file or an array, and the loss of held-out ones."""

import math
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nestforge.compiler.examples.corpus import read_corpus
from nestforge.compiler.examples.texts import (
    LONGEST,
    HeldOutLoss,
    TextBatches,
    _epoch,
    embeddings,
    mean_cosines,
    training_texts,
)
from nestforge.compiler.work.clock import Clock
from nestforge.errors import CheckpointError, InputError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal
from nestforge.progress import silent
from support.tiny_compile import save_tiniest
from support.tiny_matlm import save_sure_matlm
from support.tiny_models import corpus, save_tiny_encoder
from support.tokenizer_files import word_tokenizer

from ..conftest import Ordinary


def test_no_held_out_text_is_trained_on_and_no_other_is_left_out(ordinary: Ordinary) -> None:
    texts = training_texts(ordinary.text)
    lines = set(ordinary.text.read_text().splitlines())
    assert set(texts) == lines - set(ordinary.corpus.held_out)  # of so short a file, everything held out is used
    assert set(ordinary.corpus.calibration) < set(texts)
    assert len(texts) == len(set(texts))
    assert list(map(len, texts)) == sorted(map(len, texts))


def test_a_held_out_text_said_twice_is_not_trained_on_either(ordinary: Ordinary, tmp_path: Path) -> None:
    held_out = ordinary.corpus.held_out[0]
    doubled = tmp_path / "doubled.txt"
    doubled.write_text(f"{ordinary.text.read_text()}\n  {held_out}\n\n")
    assert held_out not in training_texts(doubled)


def test_texts_held_out_beyond_those_that_are_used_are_not_trained_on(tmp_path: Path) -> None:
    path = corpus(tmp_path / "long.txt", texts=2000)
    lines = set(path.read_text().splitlines())
    used = read_corpus(path).held_out
    left = lines - set(training_texts(path))
    assert set(used) < left
    assert len(used) == 100 < len(left)


@given(st.integers(1, 400), st.integers(1, 20), st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_has_every_row_once(texts: int, size: int, seed: int, epoch: int) -> None:
    batches = _epoch(texts, size, seed, epoch)
    assert len(batches) == -(-texts // size)
    assert sorted(row for batch in batches for row in batch) == list(range(texts))
    assert max(map(len, batches)) <= size


def test_a_step_has_the_same_batch_whatever_was_asked_before(ordinary: Ordinary) -> None:
    texts = TextBatches.of(ordinary.source, training_texts(ordinary.text))
    inputs = [texts.at(step, 16, 0).inputs[0] for step in range(25)]
    assert torch.equal(texts.at(23, 16, 0).inputs[0], inputs[23])
    assert torch.equal(texts.at(3, 16, 0).inputs[0], inputs[3])
    assert not torch.equal(texts.at(3, 16, 1).inputs[0], inputs[3])


def test_a_batch_says_which_tokens_are_real(ordinary: Ordinary) -> None:
    texts = TextBatches.of(ordinary.source, ["the quick brown fox", "the dog"])
    (batch,) = texts.once(16)
    ids, mask, types = batch.inputs
    assert ids.tolist() == [[2, 4, 12, 3, 0, 0], [2, 4, 6, 7, 8, 3]]  # the shorter one is first; [CLS] is 2, [SEP] 3
    assert batch.weights.tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]
    assert torch.equal(mask.float(), batch.weights)
    assert not types.any()


def test_long_texts_are_cut_to_what_the_model_and_the_training_take(ordinary: Ordinary) -> None:
    (batch,) = TextBatches.of(ordinary.source, ["fox " * 500]).once(1)
    assert ordinary.source.signature.max_sequence == 40 < LONGEST
    assert batch.inputs[0].shape == (1, 40)


def test_an_input_that_does_not_come_from_text_is_refused(ordinary: Ordinary) -> None:
    source = ordinary.source
    entry = source.signature.text
    assert entry is not None
    signature = replace(source.signature, text=replace(entry, type_ids=None))
    source = replace(source, architecture=replace(source.architecture, signature=signature))
    with pytest.raises(InputError, match="input token_type_ids: does not come from text"):
        TextBatches.of(source, ["the fox"])


def test_texts_are_tokenised_as_the_tokenizer_settings_say(ordinary: Ordinary, tmp_path: Path) -> None:
    folder = copytree(ordinary.model, tmp_path / "m")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": false}')
    ids = [
        next(TextBatches.of(source, ["the FOX"]).once(1)).inputs[0] for source in (ordinary.source, open_source(folder))
    ]
    assert [batch.tolist() for batch in ids] == [[[2, 4, 8, 3]], [[2, 4, 1, 3]]]


def test_a_level_that_changed_agrees_less_and_the_whole_entirely(ordinary: Ordinary) -> None:
    universal = ordinary.universal
    texts = TextBatches.of(universal.source, ordinary.corpus.held_out)
    reference = embeddings(universal.source, universal.module, texts)
    assert reference.shape == (len(ordinary.corpus.held_out), 32)
    submodels = [universal.spec.parse("ffn8-heads4"), universal.spec.universal()]
    half, whole = mean_cosines(universal, submodels, texts, reference, Clock(silent))
    assert whole == pytest.approx(1, abs=1e-6)
    assert half < 0.99


def test_without_an_embedding_tokens_are_averaged_where_they_are_real(tmp_path: Path) -> None:
    universal = load_universal(open_source(save_tiny_encoder(tmp_path / "plain")))
    together = TextBatches.of(universal.source, ["the fox", "the quick brown fox jumps"])
    found = embeddings(universal.source, universal.module, together)
    for row, text in enumerate(together.texts):
        alone = TextBatches.of(universal.source, [text])
        (batch,) = alone.once(1)
        with torch.no_grad():
            expected = universal.module(*batch.inputs)[0][0].double().mean(0)
        assert torch.allclose(found[row], expected, atol=1e-6)


def test_a_classifier_is_compared_by_its_logits(tmp_path: Path) -> None:
    folder = save_tiny_encoder(tmp_path / "classifier", task="ForSequenceClassification", num_labels=3)
    universal = load_universal(open_source(folder))
    found = embeddings(universal.source, universal.module, TextBatches.of(universal.source, ["the fox", "a dog"]))
    assert found.shape == (2, 3)


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
