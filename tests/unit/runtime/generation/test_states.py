"""Rows with recurrent states: classes whose layers keep them, alone or beside keys and values, as users run them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
import torch
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.engines.cached_gate import judge_cached
from nestforge.compiler.parity.cached_cases import cached_batches, run_batches
from nestforge.compiler.parity.judge import Verdict
from nestforge.compiler.parity.references import References
from nestforge.errors import InputError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from nestforge.runtime.calibrate.drafts import calibrate_drafts
from nestforge.runtime.engines.runner import runner_for
from nestforge.runtime.generation.cache_memory import CacheMemory
from nestforge.runtime.generation.options import GenerationRequest
from nestforge.runtime.generation.states import RowStates
from nestforge.runtime.load import load
from support.tiny_compile import board
from support.tiny_models import edit_config

SHARED: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 96, "max_position_embeddings": 64}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
# A state of convolutions beside keys and values, and that and a recurrent one without.
CLASSES: dict[str, tuple[str, dict[str, Any], int]] = {
    "lfm2": (
        "Lfm2ForCausalLM",
        {**SHARED, **HEADS, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        1,
    ),
    "falcon_mamba": (
        "FalconMambaForCausalLM",
        {**SHARED, "num_hidden_layers": 1, "state_size": 4, "expand": 2},
        2,
    ),
}
PROMPTS = [[5], [9, 31, 64, 17, 80, 12, 44], [*range(20, 40)]]
TOKENS = 12


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a random model of a type, whose texts have no end, and behind ``/bundle`` what it compiles to."""

    @cache
    def of(model_type: str) -> Path:
        import transformers

        name, sizes, _ = CLASSES[model_type]
        folder = tmp_path_factory.mktemp(model_type) / "model"
        config = transformers.AutoConfig.for_model(model_type, **sizes, eos_token_id=None)
        torch.manual_seed(0)
        model = getattr(transformers, name)(config)
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
        model.save_pretrained(folder)
        edit_config(folder, eos_token_id=None)
        profile = board(buckets=["1x2"], budgets={"full": {}})
        levels = dict.fromkeys(open_source(folder).spec.kinds, (1.0,)) or None
        compile_bundle(model=folder, output=folder.parent / "bundle", profile=profile, generate=True, levels=levels)
        return folder

    return of


@pytest.fixture(scope="module")
def greedy(saved: Callable[[str], Path]) -> Callable[[str, Sequence[int]], tuple[int, ...]]:
    """What transformers writes behind a prompt."""
    import transformers

    @cache
    def loaded(model_type: str) -> Any:
        cls = getattr(transformers, CLASSES[model_type][0])
        module = cls.from_pretrained(saved(model_type), dtype=torch.float32).eval()
        module.generation_config = transformers.GenerationConfig(pad_token_id=0)
        return module

    def write(model_type: str, prompt: Sequence[int]) -> tuple[int, ...]:
        ids = torch.tensor([list(prompt)])
        given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": TOKENS, "do_sample": False}
        return tuple(loaded(model_type).generate(ids, **given)[0, len(prompt) :].tolist())

    return write


@pytest.mark.parametrize("model_type", CLASSES)
def test_text_is_that_of_transformers_alone_and_in_rows(
    model_type: str, saved: Callable[[str], Path], greedy: Callable[[str, Sequence[int]], tuple[int, ...]]
) -> None:
    expected = [greedy(model_type, prompt) for prompt in PROMPTS]
    assert len({token for text in expected for token in text}) > 3
    with load(saved(model_type).parent / "bundle", threads=1) as model:
        entry = model.bundle.manifest.generation
        assert len(entry.states) == CLASSES[model_type][2]
        assert [engine.bucket.sequence for engine in entry.engines] == [1]
        assert [row.tokens for row in model.generate(PROMPTS, max_tokens=TOKENS).rows] == expected
        for prompt, text in zip(PROMPTS, expected, strict=True):
            assert model.generate(prompt, max_tokens=TOKENS).rows[0].tokens == text


def test_a_session_goes_on_from_all_that_was_read_and_else_anew(
    saved: Callable[[str], Path], greedy: Callable[[str, Sequence[int]], tuple[int, ...]]
) -> None:
    with load(saved("lfm2").parent / "bundle", threads=1) as model, model.session(rows=2) as session:
        first = model.generate(PROMPTS[1], session=session, max_tokens=TOKENS).rows[0].tokens
        turn = [*PROMPTS[1], *first, 40, 41]
        row = model.generate(turn, session=session, max_tokens=TOKENS).rows[0]
        assert (row.reused_tokens, row.tokens) == (len(turn) - 3, greedy("lfm2", turn))
        edited = [*turn[:5], 77, 78]
        row = model.generate(edited, session=session, max_tokens=TOKENS).rows[0]
        assert (row.reused_tokens, row.tokens) == (0, greedy("lfm2", edited))
        # Another row goes on from what the first has read.
        longer = [*edited, *row.tokens[:-1], 3]
        rows = model.generate([PROMPTS[0], longer], session=session, max_tokens=TOKENS).rows
        assert [row.tokens for row in rows] == [greedy("lfm2", PROMPTS[0]), greedy("lfm2", longer)]


def test_a_prompt_is_read_in_short_parts_beside_rows_that_step(
    saved: Callable[[str], Path], greedy: Callable[[str, Sequence[int]], tuple[int, ...]]
) -> None:
    prompt = [*range(3, 43)]
    with load(saved("lfm2").parent / "bundle", threads=1) as model:
        batch = model.generate.batch(GenerationRequest(), 3, 64)
        (engine,) = batch.engines
        asked = [GenerationRequest(each, max_tokens=TOKENS) for each in (PROMPTS[0], prompt)]
        first, long = (row for request in asked for row in model.generate.rows(request, 64))
        pieces = [batch.join(first, engine, "")]
        while batch.join(long, engine, "") is None:
            pieces += [found for _, found in batch.step(engine, "")]
        assert len(pieces) == 3
        while batch.rows:
            batch.step(engine, "")
        for row, of in ((first, PROMPTS[0]), (long, prompt)):
            assert row.result().tokens == greedy("lfm2", of)
        batch.close()


def test_an_interrupted_run_is_not_gone_on_from(
    saved: Callable[[str], Path],
    greedy: Callable[[str, Sequence[int]], tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with load(saved("lfm2").parent / "bundle", threads=1) as model, model.session() as session:
        generation = model.generate.stream(PROMPTS[1], session=session, max_tokens=TOKENS)
        written = [next(generation).token for _ in range(3)]
        kept = np.copyto

        def interrupted(*given: Any) -> None:
            kept(*given)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("nestforge.runtime.generation.states.np.copyto", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(generation)
        row = model.generate([*PROMPTS[1], *written, 8], session=session, max_tokens=TOKENS).rows[0]
        assert (row.reused_tokens, row.tokens) == (0, greedy("lfm2", [*PROMPTS[1], *written, 8]))


def test_drafts_are_refused(saved: Callable[[str], Path]) -> None:
    path = saved("lfm2").parent / "bundle"
    with load(path, threads=1) as model:
        for draft in ("n-gram", "auto"):
            with pytest.raises(InputError, match="draft: this model keeps recurrent states"):
                model.generate(PROMPTS[1], draft=draft)
    with pytest.raises(InputError, match="no drafts to calibrate: this model keeps recurrent states"):
        calibrate_drafts(open_bundle(path))


@pytest.fixture(scope="module")
def references(saved: Callable[[str], Path]) -> References:
    return References(load_universal(replace(open_source(saved("falcon_mamba")), generates=True)), {})


def judged(bundle: Bundle, references: References, stretched: str | None = None) -> Verdict:
    """The gate on the engine of ``bundle``, of whose answers one is ``stretched`` by a thousandth."""
    form, entry = references.universal.source.cached, bundle.manifest.generation
    batches = cached_batches(form.entry, long=False)
    with runner_for(bundle, entry.engines[0], "packed", threads=1) as runner:
        found = [dict(arrays) for arrays in run_batches(runner, entry.engines[0], entry, batches)]
    if stretched is not None:
        found[2][stretched] *= 1.001
    return judge_cached(references, form, entry.engines[0], batches, found)


def test_the_gate_holds_states_by_value(
    saved: Callable[[str], Path], references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(saved("falcon_mamba").parent / "bundle")
    assert judged(bundle, references).broken is None
    for state in ("state_0", "state_1"):
        assert "token by token" in judged(bundle, references, state).broken_cases
    # States that a text before left there.
    monkeypatch.setattr(RowStates, "_begin", lambda *_: None)
    assert "in pieces" in judged(bundle, references).broken_cases


def test_verify_steps_through_texts(saved: Callable[[str], Path]) -> None:
    folder = saved("lfm2")
    assert nestforge.verify(folder.parent / "bundle", against=folder)


def test_a_window_beside_states_has_room_to_slide_through(saved: Callable[[str], Path]) -> None:
    entry = open_bundle(saved("lfm2").parent / "bundle").manifest.generation
    assert (entry.longest_run, entry.windowed_run) == (1, 512)
    windowed = replace(entry, layers=tuple(replace(layer, window=16) for layer in entry.layers), positions=4096)
    cache = CacheMemory(windowed, rows=1, capacity=4096, prompt_tokens=0).empty()
    assert [tensor.shape[2] for tensor in cache.tensors] == [528] * len(cache.tensors)
    assert windowed.cache_bytes(1, 4096) == cache.bytes


def test_rows_are_moved_whole() -> None:
    states = RowStates.of([(2,), (1, 3)], rows=3)
    assert states.bytes == 2 * 3 * (2 + 3) * 4
    states.tensors[0][:] = [[1, 1], [2, 2], [3, 3]]
    states.tokens[:] = [1, 2, 3]
    states.swap_rows(0, 2)
    states.copy_row(0, 1)
    np.testing.assert_array_equal(states.tensors[0], [[3, 3], [3, 3], [1, 1]])
    np.testing.assert_array_equal(states.tokens, [3, 3, 1])
    part = states.part(1, 3)

    def call() -> None:
        part.after[0][...] = part.tensors[0] + 10

    part.stepping(call, np.array([[3], [0]]))()
    np.testing.assert_array_equal(states.tensors[0], [[3, 3], [13, 13], [10, 10]])
    np.testing.assert_array_equal(states.tokens, [3, 4, 1])
    assert RowStates.of([], rows=3) is None
