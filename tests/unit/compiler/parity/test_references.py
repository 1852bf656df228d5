"""PyTorch's answers are computed once for all engines of a submodel."""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.compiler.engines.build_engine import EngineBuilder
from nestforge.compiler.parity import references as module
from nestforge.compiler.parity.cases import Case, parity_cases
from nestforge.compiler.parity.judge import Replayed
from nestforge.compiler.parity.reference import replayed
from nestforge.compiler.parity.references import References, every_exit, smallest, split
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from support.cost_eff_models import save_tiny
from support.tiny_compile import BUCKET


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The submodels that were passed through PyTorch, by the parameters of their first layer."""
    passed: list[str] = []
    replayed: Callable[..., Replayed] = module.replayed

    def counted(reference: module.Reference, *arguments: object, **options: object) -> Replayed:
        passed.append(str(next(iter(reference.module.model.encoder.parameters())).shape[0]))
        return replayed(reference, *arguments, **options)

    monkeypatch.setattr(module, "replayed", counted)
    return passed


def fresh(builder: EngineBuilder) -> References:
    return References(builder.universal, builder.cases)


def test_a_submodel_is_passed_once(builder: EngineBuilder, passes: list[str]) -> None:
    references, spec = fresh(builder), builder.universal.spec
    small, other = spec.parse("ffn8-heads1"), spec.parse("ffn16-heads2")
    first = references.replayed(small, BUCKET)
    references.replayed(other, BUCKET)
    again = references.replayed(small, BUCKET)
    assert passes == ["8", "16"]
    for one, two in zip(first.outputs, again.outputs, strict=True):
        assert all(np.array_equal(one[name], two[name]) for name in one)
    assert again.roundings == first.roundings


def test_a_compiled_engine_its_proof_and_its_check_share_one_pass(builder: EngineBuilder, passes: list[str]) -> None:
    builder = replace(builder, references=fresh(builder))
    builder.build(builder.universal.spec.parse("ffn8-heads1"), BUCKET)
    assert passes == ["8", "16"], "its own, and the universal model's, from which it must differ"


def test_fewer_cases_are_judged_by_what_was_passed(builder: EngineBuilder, passes: list[str]) -> None:
    references, spec = fresh(builder), builder.universal.spec
    small, other = spec.parse("ffn8-heads1"), spec.parse("ffn16-heads2")
    every = references.replayed(small, BUCKET)
    fewer = references.on(lambda cases: [1, len(cases) - 1])
    names = [case.name for case in references.cases[BUCKET]]
    assert [case.name for case in fewer.cases[BUCKET]] == [names[1], names[-1]]
    found = fewer.replayed(small, BUCKET)
    assert passes == ["8"]
    assert found.outputs[0] is every.outputs[1]
    assert found.outputs[1] is every.outputs[-1]
    more, all_of_them = found.after_passes({names[-1]}, 3), every.after_passes({names[-1]}, 3)
    for name, own in more.roundings[1].items():
        assert np.array_equal(own.max_abs, all_of_them.roundings[-1][name].max_abs)
    assert more.roundings[0] is found.roundings[0]
    assert len(fewer.replayed(other, BUCKET).outputs) == 2
    assert passes == ["8", "16"], "what was not passed yet is passed on these alone"


def test_of_a_large_model_some_cases_are_passed_in_float32_until_float64_is_asked_for(builder: EngineBuilder) -> None:
    whole = builder.universal.spec.universal()
    looks = References(builder.universal, builder.cases, looks=True).replayed(whole, BUCKET)
    every = fresh(builder).replayed(whole, BUCKET)
    names = [case.name for case in builder.cases[BUCKET]]
    assert looks.in_float32 == set(names[1:]), "all are as small"
    for number, name in enumerate(names):
        for output, array in looks.outputs[number].items():
            assert array.dtype == (np.float32 if name in looks.in_float32 else np.float64)
            own = np.abs(array - every.outputs[number][output]).max()
            assert own == (every.roundings[number][output].largest if name in looks.in_float32 else 0)
    for _ in range(2):  # the second time of what is known
        exact = looks.exact({names[3]})
        assert exact.in_float32 == set(names[1:]) - {names[3]}
        for output, array in exact.outputs[3].items():
            assert np.array_equal(array, every.outputs[3][output])
            assert np.array_equal(exact.roundings[3][output].max_abs, every.roundings[3][output].max_abs)
    assert looks.in_float32 == set(names[1:])
    assert looks.at([3]).exact is not None


def test_narrower_widths_of_a_large_model_are_asked_the_short_cases(builder: EngineBuilder, passes: list[str]) -> None:
    universal, spec, bucket = builder.universal, builder.universal.spec, Bucket(1, 40, 1, 1)
    cases = {bucket: parity_cases(universal.source.signature, bucket, universal.source.encoder)}
    references, small = References(universal, cases, looks=True), spec.parse("ffn8-heads1")
    assert references.asked(spec.universal(), bucket) == cases[bucket]
    asked = references.asked(small, bucket)
    assert [case.tokens for case in cases[bucket] if case not in asked] == [t for t in sizes(cases[bucket]) if t > 8]
    assert len(references.replayed(small, bucket).outputs) == len(asked) < len(cases[bucket])
    fewer = references.on(smallest)
    assert sizes(fewer.asked(small, bucket)) == [4]
    assert {array.dtype for array in fewer.replayed(small, bucket).outputs[0].values()} == {np.dtype(np.float64)}
    assert passes == ["8"], "that case was passed in float64"


def sizes(cases: Sequence[Case]) -> list[int]:
    return [case.tokens for case in cases]


def test_a_pass_that_is_kept_holds_no_module(builder: EngineBuilder) -> None:
    references = fresh(builder)
    kept = references.replayed(builder.universal.spec.parse("ffn8-heads1"), BUCKET)
    module = weakref.ref(references.of(builder.universal.spec.parse("ffn8-heads1")).module)
    references.of(builder.universal.spec.parse("ffn16-heads2"))
    gc.collect()
    assert module() is None
    wider, number = kept.after_passes({"whole"}, 1), [case.name for case in references.cases[BUCKET]].index("whole")
    assert wider.roundings[number] is not kept.roundings[number], "it is made again for a further pass"


def test_what_takes_too_much_memory_is_passed_again_but_for_the_universal_model(
    builder: EngineBuilder, passes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES_CACHED", 0)
    references, spec = fresh(builder), builder.universal.spec
    for _ in range(2):
        references.replayed(spec.parse("ffn8-heads1"), BUCKET)
        whole = references.universal_outputs(BUCKET)
    assert passes == ["8", "16", "8"]
    assert {array.dtype for arrays in whole for array in arrays.values()} == {np.dtype(np.float32)}


def test_the_numbers_of_every_precision_share_the_memory_of_passes(
    builder: EngineBuilder, passes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latest are kept, whosever they are."""
    references, spec = fresh(builder), builder.universal.spec
    rounded = references.narrowed_by(builder.universal, builder.universal.narrow)
    small, other = spec.parse("ffn8-heads1"), spec.parse("ffn16-heads2")
    (first, *_) = (references.replayed(small, BUCKET), rounded.replayed(other, BUCKET))
    size = sum(array.nbytes for arrays in first.outputs for array in arrays.values())
    monkeypatch.setattr(module, "_MOST_BYTES_CACHED", 2 * size)
    references.replayed(small, BUCKET)  # later than the other now
    rounded.replayed(small, BUCKET)
    assert passes == ["8", "16", "8"], "numbers of its own"
    references.replayed(small, BUCKET)
    rounded.replayed(small, BUCKET)
    assert passes == ["8", "16", "8"]
    rounded.replayed(other, BUCKET)
    assert passes == ["8", "16", "8", "16"]


def test_rounding_can_be_measured_again_of_what_was_kept(builder: EngineBuilder) -> None:
    references, submodel = fresh(builder), builder.universal.spec.parse("ffn8-heads1")
    references.replayed(submodel, BUCKET)
    kept = references.replayed(submodel, BUCKET)
    assert kept.again is not None
    *others, last = (case.name for case in references.cases[BUCKET])
    wider = kept.after_passes({last}, 99)
    for case, before, after in zip([*others, last], kept.roundings, wider.roundings, strict=True):
        grew = [np.any(np.asarray(after[name].max_abs) > before[name].max_abs) for name in before]
        assert all((np.asarray(after[name].max_abs) >= before[name].max_abs).all() for name in before)
        assert any(grew) == (case == last)


def test_the_segments_of_every_depth_share_one_pass(tmp_path: Path, passes: list[str]) -> None:
    universal = load_universal(open_source(save_tiny(tmp_path / "m")))
    references = References(universal, {BUCKET: parity_cases(universal.source.signature, BUCKET, None)})
    deepest = references.by_segment(universal.spec.universal(), BUCKET)
    shorter = references.by_segment(universal.spec.parse("depth3"), BUCKET)
    assert (len(deepest), len(shorter), len(passes)) == (3, 2, 1)
    narrowed = references.of(universal.spec.parse("depth3"))
    exits = universal.source.exits
    assert exits is not None
    own_pass = replayed(every_exit(exits, narrowed, 3), references.cases[BUCKET])
    for one, own in zip(shorter, split(exits, own_pass, 3), strict=True):
        for found, expected in zip(one.outputs, own.outputs, strict=True):
            assert found.keys() == expected.keys() == {"next_state", "logits", "entropy"}
            assert all(np.array_equal(found[name], expected[name]) for name in found)
    more = shorter[0].again
    assert more({"whole"}).roundings[0].keys() == {"next_state", "logits", "entropy"}
