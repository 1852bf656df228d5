"""Exit chains over a range, and LayerSkip: an ordinary decoder that answers after fewer layers, by its one norm and
head."""

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.errors import PlanError, SelectionError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from nestforge.runtime.exits.policy import ExitPolicy, closed
from nestforge.runtime.inputs.arrays import random_feeds
from nestforge.runtime.model import ElasticModel
from support.cost_eff_models import save_tiny
from support.gated_decoders import save_decoder
from support.tiny_compile import board

FULL = {"budgets": {"full": {}}}
RANGE = Bucket(3, 6, 1, 1)
EXITS = 3
OPEN = ExitPolicy((9.0,) * (EXITS - 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("exits") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[ElasticModel]:
    out = folder.parent / "bundle"
    nestforge.compile(folder, profile=board(**FULL), output=out, buckets=[RANGE], levels={"depth": (1.0,)})
    with nestforge.load(out) as opened:
        yield opened


@pytest.fixture(scope="module")
def every_exit(folder: Path) -> torch.nn.Module:
    """PyTorch's state, logits and entropy at every exit in one pass; no state at the last."""
    universal = load_universal(open_source(folder))
    exits = universal.source.exits
    return exits.every_exit(universal.module)


def answers(every_exit: torch.nn.Module, feeds: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Logits ``[exits, B, C]`` and entropies ``[exits, B]``."""
    with torch.no_grad():
        found = [tensor.numpy() for tensor in every_exit(*map(torch.from_numpy, feeds.values()))]
    logits, entropy = (np.stack([array for array in found if array.ndim == dims]) for dims in (2, 1))
    return logits, entropy


def rows_of(model: ElasticModel, lengths: list[int], seed: int = 0) -> dict[str, np.ndarray]:
    """Random rows that end where ``lengths`` say."""
    feeds = random_feeds(model.bundle.manifest.inputs, Bucket(len(lengths), max(lengths)), seed)
    feeds["attention_mask"] = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    return feeds


@pytest.mark.parametrize("size", list(product((1, 2, 3), range(1, 7))), ids=lambda size: "x".join(map(str, size)))
def test_every_size_is_answered_as_pytorch_does(
    model: ElasticModel, every_exit: torch.nn.Module, size: tuple[int, int]
) -> None:
    feeds = random_feeds(model.bundle.manifest.inputs, Bucket(*size), seed=size[0] * size[1])
    feeds["attention_mask"][:] = 1
    logits, entropy = answers(every_exit, feeds)
    for policy, index in ((closed(EXITS), EXITS - 1), (OPEN, 0)):
        answer = model(feeds, exits=policy)
        assert (answer.bucket, answer.padding) == (RANGE, None)
        assert answer.exits.index.tolist() == [index] * size[0]
        np.testing.assert_allclose(answer["logits"], logits[index], atol=5e-6)
        np.testing.assert_allclose(answer["entropy"], entropy[index], atol=5e-6)
    whole = model(feeds, exits="off")
    np.testing.assert_allclose(whole["logits"], logits[-1], atol=5e-6)


@settings(deadline=None, max_examples=25)
@given(lengths=st.lists(st.integers(1, 6), min_size=2, max_size=3), seed=st.integers(0, 99))
def test_rows_leave_where_pytorch_lets_them_whatever_batch_they_are_in(
    model: ElasticModel, every_exit: torch.nn.Module, lengths: list[int], seed: int
) -> None:
    feeds = rows_of(model, lengths, seed)
    logits, entropy = answers(every_exit, feeds)
    # Halfway between two rows, so that they part.
    limits = tuple(float(np.sort(row)[:2].mean()) for row in entropy[:-1])
    if np.abs(entropy[:-1] - np.array(limits)[:, None]).min() < 1e-4:
        return
    policy = ExitPolicy(limits)
    together = model(feeds, exits=policy)
    leaves = np.array([*(row <= limit for row, limit in zip(entropy, limits, strict=False)), [True] * len(lengths)])
    index = leaves.argmax(axis=0)
    assert together.exits.index.tolist() == index.tolist()
    np.testing.assert_allclose(together["logits"], logits[index, np.arange(len(lengths))], atol=5e-6)
    for row, length in enumerate(lengths):
        alone = model(
            {name: np.ascontiguousarray(array[row : row + 1, :length]) for name, array in feeds.items()}, exits=policy
        )
        assert alone.exits.index[0] == index[row]
        np.testing.assert_allclose(alone["logits"][0], together["logits"][row], atol=5e-6)


def test_what_a_row_costs_is_a_share_of_the_whole_engine_at_its_own_length(model: ElasticModel) -> None:
    """The whole engine computes the last exit alone, and the chain all of them; both by the same rule."""
    shares = [model(rows_of(model, [length]), exits=closed(EXITS)).exits for length in (1, 3, 6)]
    for one in shares:
        assert one.share[0] == pytest.approx(1.0, abs=0.05)
    assert 6 * shares[0].flops[0] == pytest.approx(shares[-1].flops[0], rel=1e-3)


def test_segments_are_proven_all_over_the_range_and_so_is_their_chain(model: ElasticModel, folder: Path) -> None:
    manifest = model.bundle.manifest
    for engine in manifest.engines:
        assert (engine.emitted, engine.bucket) == ("sliced", RANGE)
        places = {case.partition(" at ")[2] for case in engine.parity.cases}
        assert {"1x1", "1x6", "3x1", "3x6"} <= places
    suites = {proof.suite: proof for proof in manifest.proofs if proof.subject.endswith(RANGE.label)}
    assert {"extremes", "composition"} <= suites.keys()
    assert all(proof.checked and proof.worst <= proof.limit for proof in suites.values())
    report = nestforge.verify(model.bundle.path, against=folder)
    assert report
    assert {verdict.engine for verdict in report.engines} == {engine.id for engine in manifest.engines}


def compiled(folder: Path, bucket: str, precision: str, pool: str, **config: int) -> Path:
    """Two exits, behind one layer and behind two."""
    sidecar = {"exits.layers": [1, 2], "exits.pool": pool, "gate": None}
    save_tiny(folder / "model", {"num_hidden_layers": 2, **config}, sidecar)
    profile = board(**FULL, buckets=[bucket], precision=[precision])
    return nestforge.compile(folder / "model", profile=profile, output=folder / "bundle", include="budgets")


def require_chain_of_whole(opened: ElasticModel, size: Bucket, trims: bool, atol: float) -> None:
    """The last exit of the chain answers as the whole engine, with nothing padded."""
    manifest = opened.bundle.manifest
    assert manifest.exits.trims == trims
    feeds = random_feeds(manifest.inputs, size)
    feeds["attention_mask"][:] = np.arange(size.sequence) < 3
    chained, whole = opened(feeds, exits=closed(2)), opened(feeds, exits="off")
    assert whole.padding is None
    np.testing.assert_allclose(chained["logits"], whole["logits"], atol=atol)


def test_padding_may_count_and_a_range_may_begin_behind_one(tmp_path: Path) -> None:
    config = {"num_attention_heads": 2, "intermediate_size": 16, "type_vocab_size": 1}
    with nestforge.load(compiled(tmp_path, "2x3..6", "fp16", "mean_with_padding", **config)) as opened:
        require_chain_of_whole(opened, Bucket(2, 5), trims=False, atol=5e-3)


def test_rows_of_integers_leave_where_they_leave_alone(tmp_path: Path) -> None:
    out = compiled(tmp_path, "1..8x1..6", "int8-dynamic", "cls", num_attention_heads=4, intermediate_size=32)
    found = []
    with nestforge.load(out) as opened:
        require_chain_of_whole(opened, Bucket(2, 5), trims=True, atol=0.2)
        for seed in range(6):
            lengths = [6, *np.random.default_rng(seed).integers(1, 7, 7).tolist()]
            feeds = rows_of(opened, lengths, seed)
            together = opened(feeds, exits=0.5)
            found += together.exits.index.tolist()
            for row, length in enumerate(lengths):
                one = {name: np.ascontiguousarray(array[row : row + 1, :length]) for name, array in feeds.items()}
                alone = opened(one, exits=0.5)
                assert alone.exits.index[0] == together.exits.index[row]
                np.testing.assert_allclose(alone["logits"][0], together["logits"][row], atol=1e-5)
    assert set(found) == {0, 1}


LAYERS, IDS = 2, torch.tensor([[5, 9, 41, 7, 12, 3, 30, 31, 8, 4]])
PROMPT: list[int] = IDS[0].tolist()


@pytest.fixture(scope="module")
def skip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = {"num_hidden_layers": LAYERS, "head_dim": 8, "eos_token_id": None}
    return save_decoder(tmp_path_factory.mktemp("layerskip") / "m", "llama", **own)


@pytest.fixture(scope="module")
def skips(skip_folder: Path) -> Iterator[ElasticModel]:
    out = skip_folder.with_name("b")
    nestforge.compile(skip_folder, "host-cpu", out, exits=[1], buckets=["1x16"], generate=True, measure=False)
    with nestforge.load(out) as loaded:
        yield loaded


@pytest.fixture
def theirs(skip_folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(skip_folder).eval().requires_grad_(False)


def text(theirs: Any, **how: Any) -> list[int]:
    found = theirs.generate(IDS, max_new_tokens=20, do_sample=False, pad_token_id=0, **how)
    return list(found[0, IDS.shape[1] :].tolist())


def test_an_exit_scores_and_generates_as_the_layers_before_it(skips: ElasticModel, theirs: Any) -> None:
    layers = theirs.model.layers
    for depth in (1, LAYERS):
        theirs.model.layers = layers[:depth]
        answer = skips({"input_ids": IDS.numpy()}, submodel=f"depth{depth}")
        np.testing.assert_allclose(answer["logits"], theirs(IDS).logits.numpy(), atol=1e-4)
        found = skips.generate([PROMPT, PROMPT[:4]], max_tokens=20, submodel=f"depth{depth}")
        assert list(found.rows[0].tokens) == text(theirs, use_cache=False)


def test_an_exit_drafts_for_all_layers_on_one_cache(skips: ElasticModel, theirs: Any) -> None:
    found = skips.generate([PROMPT], max_tokens=20, submodel=f"depth{LAYERS}", draft="depth1", drafted=3).rows[0]
    assert list(found.tokens) == text(theirs) == text(theirs, assistant_early_exit=1)
    (drafts,) = found.drafts
    assert drafts.draft.startswith("depth1")
    assert drafts.drafted > 10
    with pytest.raises(
        SelectionError, match=r"draft depth2-ffn32: expected a submodel that .* is smaller than depth1-f"
    ):
        skips.generate([PROMPT], submodel="depth1", draft="depth2")


def test_fewer_layers_continue_a_cache_of_more_and_not_the_other_way(skips: ElasticModel) -> None:
    with skips.session(capacity=40) as session:
        first = skips.generate([PROMPT], max_tokens=5, submodel="depth1", session=session).rows[0]
        longer = [*PROMPT, *first.tokens]
        whole = skips.generate([longer], max_tokens=5, session=session).rows[0]
        assert whole.reused_tokens == 0, "the layers behind the exit have no keys of them"
        assert whole.tokens == skips.generate([longer], max_tokens=5).rows[0].tokens
        fast = skips.generate([[*longer, *whole.tokens]], max_tokens=3, tokens_per_second=1e9, session=session).rows[0]
        assert fast.reused_tokens == len(longer) + len(whole.tokens) - 1
        assert [run.submodel for run in fast.runs] == ["depth2-ffn32", "depth1-ffn32"]


def test_the_bundle_states_which_layers_have_a_cache_and_is_verified(skip_folder: Path, skips: ElasticModel) -> None:
    generation = skips.bundle.manifest.generation
    by_submodel = {engine.submodel: generation.of(engine) for engine in generation.engines}
    assert by_submodel["depth1-ffn32"].heads == (2, 0)
    inputs, outputs = by_submodel["depth1-ffn32"].interface
    assert [spec.name for spec in inputs][3:] == ["past_key_0", "past_value_0"]
    assert [spec.name for spec in outputs] == ["logits", "present_key_0", "present_value_0"]
    assert by_submodel["depth2-ffn32"].heads == (2, 2)
    assert nestforge.verify(skips.bundle.path, against=skip_folder)


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma3_text"])
def test_models_whose_cache_is_not_one_of_every_layer_generate_without_exits(model_type: str, tmp_path: Path) -> None:
    skip_folder = save_decoder(tmp_path / "m", model_type, head_dim=8)
    assert open_source(skip_folder, (1,)).spec.kinds[0] == "depth", "they score by exits"
    with pytest.raises(
        PlanError, match="generate: m cannot: with exits: some layers have a window, or no keys of their own"
    ):
        nestforge.plan(skip_folder, "host-cpu", exits=[1], generate=True)
