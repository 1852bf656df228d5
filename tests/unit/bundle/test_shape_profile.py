from dataclasses import replace

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import Decode, Encoder
from nestforge.bundle.entries.generation_entry import CachedLayer, EncoderEntry, GenerationEntry
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.bundle.manifest import Manifest, Provenance
from nestforge.bundle.shape_profile import ShapeProfile, shape_profile, shape_profiles
from nestforge.errors import BundleFormatError

IDS = TensorSpec("ids", "int64", ("batch", "sequence"))
KIND = TensorSpec("kind", "int64", ("batch",))
STATE = TensorSpec("state", "float32", (3, "sequence", 16))


def tuned_for(manifest: Manifest, bucket: str, asked: object = None) -> str:
    profile = {} if asked is None else {"budget_at": asked}
    found = shape_profile(replace(manifest, provenance=Provenance({}, (), profile)), Bucket.parse(bucket))
    assert str(found.bucket) == bucket
    return str(found.tuned)


def test_kernels_are_picked_where_budgets_are_judged(manifest: Manifest) -> None:
    assert tuned_for(manifest, "1..8x1..512") == "1x512"
    assert tuned_for(manifest, "2..8x512") == "2x512"
    assert tuned_for(manifest, "1..8x1..512", "4x64") == "4x64"
    # The nearest shape of each of two ranges.
    assert [tuned_for(manifest, bucket, "1x100") for bucket in ("1x1..128", "1x129..512")] == ["1x100", "1x129"]
    assert tuned_for(manifest, "2x8", "1x4") == "2x8"


def test_a_shape_that_is_none_is_refused(manifest: Manifest) -> None:
    with pytest.raises(
        BundleFormatError, match=r"^manifest.json: provenance: profile: budget_at: bucket '5': expected"
    ):
        tuned_for(manifest, "1..8x1..512", 5)


def test_what_is_open_is_written_as_tensorrts_tools_read_it() -> None:
    profile = ShapeProfile(Bucket(4, 16, min_sequence=2), Bucket(4, 8))
    assert profile.shapes(STATE) == ((3, 2, 16), (3, 8, 16), (3, 16, 16))
    assert profile.written([IDS, KIND, STATE]) == (
        *("ids:4x2,state:3x2x16", "ids:4x8,state:3x8x16", "ids:4x16,state:3x16x16"),
    )
    assert ShapeProfile(Bucket(4, 16), Bucket(4, 16)).written([IDS, KIND, STATE]) == ()


def test_an_engine_that_keeps_a_cache_has_profiles_of_steps_and_of_chunks(manifest: Manifest) -> None:
    engine = replace(manifest.engines[0], kind=Decode(capacity=2048), bucket=Bucket(64, 512, 1, 1))
    at, cache = (
        TensorSpec("logits_at", "int64", ("answers",)),
        TensorSpec("past_key_0", "float32", ("batch", 2, 2048, 8)),
    )
    steps, chunks = shape_profiles(manifest, engine)
    assert [profile.shapes(IDS) for profile in (steps, chunks)] == [
        ((1, 1), (1, 1), (64, 9)),
        ((1, 1), (1, 512), (1, 512)),
    ]
    assert [profile.shapes(at) for profile in (steps, chunks)] == [((1,), (1,), (9,)), ((1,), (1,), (512,))]
    assert steps.written([IDS, at, cache]) == (
        "ids:1x1,logits_at:1,past_key_0:1x2x2048x8",
        "ids:1x1,logits_at:1,past_key_0:1x2x2048x8",
        "ids:64x9,logits_at:9,past_key_0:64x2x2048x8",
    )
    assert chunks.written([cache]) == ("past_key_0:1x2x2048x8",) * 3

    def takers(rows: int, tokens: int, wanted: int) -> list[bool]:
        return [profile.takes({"batch": rows, "sequence": tokens, "answers": wanted}) for profile in (steps, chunks)]

    assert takers(64, 1, 1) == [True, False]
    assert takers(1, 9, 9) == [True, True]
    assert takers(1, 10, 10) == takers(1, 512, 1) == [False, True]
    assert takers(2, 10, 1) == takers(1, 513, 1) == takers(65, 1, 1) == [False, False]
    assert len(shape_profiles(manifest, replace(engine, bucket=Bucket(64, 9, 1, 1)))) == 1, "all of it are steps"
    assert shape_profiles(manifest, manifest.engines[0]) == (shape_profile(manifest, manifest.engines[0].bucket),)


@pytest.mark.parametrize(("positions", "usual"), [(4096, 512), (100, 100)])
def test_behind_an_encoder_prompts_are_of_any_length_and_kernels_those_of_a_usual_one(
    manifest: Manifest, positions: int, usual: int
) -> None:
    read = replace(manifest.engines[0], kind=Encoder(), bucket=Bucket(1, positions, None, 1))
    engine = replace(manifest.engines[0], kind=Decode(capacity=2048), bucket=Bucket(64, 512, 1, 1))
    entry = GenerationEntry(48, (CachedLayer(2, 8),), 2048, (), (engine,), encoder=EncoderEntry(0, positions, (read,)))
    (prompts,) = shape_profiles(replace(manifest, generation=entry), read)
    assert prompts.shapes(IDS) == ((1, 1), (1, usual), (1, positions))
    profiles = shape_profiles(replace(manifest, generation=entry), engine)
    keys = TensorSpec("source_key_0", "float32", ("batch", 2, 8, "source"))
    assert [profile.shapes(keys) for profile in profiles] == [
        ((1, 2, 8, 1), (1, 2, 8, usual), (rows, 2, 8, positions)) for rows in (64, 1)
    ]
    for profile in profiles:
        assert profile.takes({"batch": 1, "sequence": 1, "answers": 1, "source": positions})
        assert not profile.takes({"batch": 1, "sequence": 1, "answers": 1, "source": positions + 1})
    of_others = shape_profiles(replace(manifest, generation=replace(entry, encoder=None)), engine)
    assert {str(profile.key) for profile in profiles}.isdisjoint(str(profile.key) for profile in of_others)
