"""Axes with choices through a whole compile: knobs without weights, stacked experts, and a sequence of its own."""

from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.engines.templates import TemplateKey
from nestforge.compiler.graph.store import recover_order
from nestforge.errors import SelectionError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal, permute_axis
from nestforge.runtime.consistency.measure import consistency
from nestforge.runtime.inputs.text import TextEncoder
from nestforge.runtime.summary import submodel_table
from support.tiny_compile import board
from support.tiny_mixer import save_tiny_mixer
from support.tokenizer_files import WORDS

WHOLE = "moe.capacity_factor100-moe.group_size4096-moe.experts4-sequence16"
HALF = WHOLE.replace("factor100", "factor50")
SMALL_GROUPS = WHOLE.replace("size4096", "size16")
FEW_EXPERTS = WHOLE.replace("experts4", "experts2")
SHORT = WHOLE.replace("sequence16", "sequence8")
# Every other one has more than 8 tokens.
_DRAWN = np.random.default_rng(0).integers(0, len(WORDS), (260, 11))
TEXTS = [" ".join(WORDS[word] for word in words[: 5 if row % 2 else 11]) for row, words in enumerate(_DRAWN)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("choices")


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    two = {"num_hidden_layers": 2, "attention_layers": (1,), "moe_layers": (0,)}
    model = save_tiny_mixer(folder / "m", mixing="toeplitz", head="classifier", num_labels=3, **two)
    (folder / "texts.txt").write_text("\n".join(TEXTS))
    path = compile_bundle(
        model,
        board(buckets=["1x16"], budgets={"full": {}}),
        folder / "m.bundle",
        text=folder / "texts.txt",
        levels={"moe.capacity_factor": (0.5, 1)},
        submodels=["moe.group_size16", "moe.experts2", "sequence8"],
    )
    return open_bundle(path, check="full")


@pytest.fixture(scope="module")
def universal(bundle: Bundle) -> UniversalModel:
    model = load_universal(open_source(bundle.path.with_suffix("")))
    for name, order in recover_order([bundle.path / WEIGHTS_NAME], model).items():
        permute_axis(model, name, order)
    return model


def test_each_choice_is_an_engine_at_its_own_bucket(bundle: Bundle) -> None:
    assert {engine.submodel: engine.bucket for engine in bundle.manifest.engines} == {
        FEW_EXPERTS: Bucket(1, 16),
        HALF: Bucket(1, 16),
        SMALL_GROUPS: Bucket(1, 16),
        SHORT: Bucket(1, 8),
        WHOLE: Bucket(1, 16),
    }


def test_of_equally_many_parameters_the_smaller_choices_stand_first(bundle: Bundle) -> None:
    assert [entry.id for entry in bundle.manifest.submodels] == [FEW_EXPERTS, HALF, SMALL_GROUPS, SHORT, WHOLE]


def test_a_choice_that_changes_nothing_here_is_no_failed_slice(bundle: Bundle) -> None:
    """One group of 16 tokens either way; another capacity does differ, and another sequence has no such figure."""
    found = {e.submodel: e.parity.difference_to_universal for e in bundle.manifest.engines if e.parity}
    assert found[SMALL_GROUPS] is not None
    assert found[SMALL_GROUPS] < 1e-5
    assert found[HALF] is not None
    assert found[HALF] > 1e-3
    assert found[SHORT] is None


def test_stacked_experts_are_proven_and_knobs_without_weights_need_no_proof(bundle: Bundle) -> None:
    (proof,) = [proof for proof in bundle.manifest.proofs if proof.suite == "slice"]
    assert (proof.subject, proof.worst) == (FEW_EXPERTS, 0.0)


def test_ranking_on_texts_fills_them_up_to_the_sequence_that_mixing_is_bound_to(bundle: Bundle) -> None:
    assert bundle.manifest.ranking.method == "taylor"
    assert bundle.manifest.ranking.order_sha256 is not None


def test_a_request_that_does_not_fit_a_shorter_submodel_is_refused(bundle: Bundle) -> None:
    rows = {name: np.ones((1, 9), np.int64) for name in ("input_ids", "token_type_ids")}
    with nestforge.load(bundle.path) as model:
        assert model({name: array[:, :8] for name, array in rows.items()}, submodel=SHORT).bucket == Bucket(1, 8)
        with pytest.raises(
            SelectionError, match=rf"^submodel {SHORT} takes at most 8 tokens, the input has 9; there is"
        ):
            model(rows, submodel=SHORT)
        with pytest.raises(SelectionError, match=r"takes at most 8 tokens, the input has 13"):
            model(TEXTS[0], submodel=SHORT)
        assert model(TEXTS[0], submodel=SHORT, truncate=True).truncated == (0,)
        assert model(rows).submodel == WHOLE


def test_a_shorter_submodel_is_judged_on_what_fits_it_each_model_at_its_own_sequence(
    bundle: Bundle, universal: UniversalModel, folder: Path
) -> None:
    """Independent of engines and of the measuring code: one text at a time through the narrowed modules."""
    report = consistency(bundle, text=folder / "texts.txt")
    samples = {row.submodel: row.samples for row in report.submodels}
    text = bundle.manifest.text
    encoder = TextEncoder(bundle.file(text.file), text, bundle.manifest.inputs)
    fitting = [line for line in TEXTS if encoder.encode([line], 64).lengths[0] <= 8]
    assert 0 < len(fitting) < len(TEXTS)
    assert samples == {**dict.fromkeys((FEW_EXPERTS, HALF, SMALL_GROUPS, WHOLE), len(TEXTS)), SHORT: len(fitting)}

    def choices(submodel: str, sequence: int) -> list[int]:
        module, found = universal.narrow(universal.spec.parse(submodel)), []
        for line in fitting:
            feeds = encoder.encode([line], 64).feeds
            padded = [np.pad(feeds[spec.name], ((0, 0), (0, sequence - feeds[spec.name].shape[1]))) for spec in inputs]
            found.append(int(module(*map(torch.from_numpy, padded))[0].argmax()))
        return found

    inputs = bundle.manifest.inputs
    agreement = np.mean([a == b for a, b in zip(choices(SHORT, 8), choices(WHOLE, 16), strict=True)])
    (row,) = [row for row in report.submodels if row.submodel == SHORT]
    assert row.figures["class_agreement"] == pytest.approx(agreement)
    quality = bundle.manifest.submodel(SHORT).quality
    held_out = bundle.manifest.submodel(WHOLE).quality
    assert quality.samples < held_out.samples
    assert quality.data_sha256 != held_out.data_sha256


def test_the_table_of_submodels_has_the_latency_of_each_at_its_own_shape(bundle: Bundle) -> None:
    table = submodel_table(bundle.manifest, bundle.build)
    predicted = dict(zip((one.id for one in bundle.manifest.submodels), (row[3] for row in table.rows), strict=True))
    assert "-" not in predicted.values()
    assert float(predicted[SHORT]) < float(predicted[WHOLE])


def test_buckets_that_a_submodel_has_as_one_are_one_template(universal: UniversalModel) -> None:
    from nestforge.compiler.engines.templates import Templates

    no_stage: Any = None  # nothing is traced
    templates = Templates(universal, no_stage, board())
    short = universal.spec.parse(SHORT)
    keys = templates.keys([short, universal.spec.universal()], [Bucket(1, 16), Bucket(1, 12)])
    assert keys.count(TemplateKey(Bucket(1, 8), short.structure)) == 1
    assert {key.bucket.sequence for key in keys} == {8, 16}
