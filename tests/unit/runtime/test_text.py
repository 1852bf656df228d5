from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from nestforge.errors import BundleCorruptError, InputError
from nestforge.runtime.manifest import Manifest, TensorSpec
from nestforge.runtime.text import TextEncoder


def make(bundle: Path, manifest: Manifest, inputs: Sequence[TensorSpec] | None = None) -> TextEncoder:
    assert manifest.text
    return TextEncoder(bundle / "tokenizer.json", manifest.text, manifest.inputs if inputs is None else inputs)


def test_texts_become_rows_as_long_as_the_longest(tiny_bundle: Path, manifest: Manifest) -> None:
    encoded = make(tiny_bundle, manifest).encode(["a nest of models", "nest"], 8)
    assert encoded.feeds["input_ids"].tolist() == [[1, 4, 5, 6, 7, 2], [1, 5, 2, 0, 0, 0]]
    assert encoded.feeds["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0]]
    assert {array.dtype for array in encoded.feeds.values()} == {np.dtype("int64")}
    assert encoded.truncated == ()


def test_dtype_and_pad_are_the_manifests(tiny_bundle: Path, manifest: Manifest) -> None:
    ids = replace(manifest.inputs[0], dtype="int32", pad=3)
    encoded = make(tiny_bundle, manifest, [ids]).encode(["nest", "a nest"], 8)
    assert encoded.feeds["input_ids"].dtype == np.int32
    assert encoded.feeds["input_ids"].tolist() == [[1, 5, 2, 3], [1, 4, 5, 2]]


def test_too_long_is_refused_or_truncated_with_its_last_token_kept(tiny_bundle: Path, manifest: Manifest) -> None:
    encoder = make(tiny_bundle, manifest)
    with pytest.raises(
        InputError, match="text 1: 6 tokens, the largest bucket takes 4; shorten it, pass truncate=True"
    ):
        encoder.encode(["nest", "a nest of models"], 4)
    encoded = encoder.encode(["nest", "a nest of models"], 4, truncate=True)
    assert encoded.feeds["input_ids"].tolist() == [[1, 5, 2, 0], [1, 4, 5, 2]]
    assert encoded.truncated == (1,)
    assert encoder.encode(["a nest of models"], 8).feeds["input_ids"].shape == (1, 6)


def test_the_truncating_copy_is_made_once_per_length(
    tiny_bundle: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = make(tiny_bundle, manifest)
    lengths = [encoder.encode(["a nest of models"], n, True).feeds["input_ids"].shape[1] for n in (4, 3)]
    monkeypatch.delattr("tokenizers.Tokenizer")
    lengths += [encoder.encode(["a nest of models"], n, True).feeds["input_ids"].shape[1] for n in (4, 3)]
    assert lengths == [4, 3, 4, 3]


@pytest.mark.parametrize("texts", [[], [1], ["a", None]])
def test_refuses_what_is_no_text(tiny_bundle: Path, manifest: Manifest, texts: Sequence[str]) -> None:
    with pytest.raises(InputError, match="expected a text or a non-empty list of texts"):
        make(tiny_bundle, manifest).encode(texts, 8)


def test_an_input_without_pad_takes_texts_of_one_length(tiny_bundle: Path, manifest: Manifest) -> None:
    encoder = make(tiny_bundle, manifest, [replace(manifest.inputs[0], pad=None)])
    assert encoder.encode(["a", "of"], 8).feeds["input_ids"].shape == (2, 3)
    with pytest.raises(InputError, match="input input_ids: texts of different lengths need padding"):
        encoder.encode(["a", "a nest"], 8)


def test_an_input_that_no_text_feeds_is_refused(tiny_bundle: Path, manifest: Manifest) -> None:
    with pytest.raises(InputError, match="input pixels: does not come from text"):
        make(tiny_bundle, manifest, [TensorSpec("pixels", "float32", ("batch", 3))])


def test_a_damaged_tokenizer_is_named(own_bundle: Path, manifest: Manifest) -> None:
    (own_bundle / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleCorruptError, match=r"tokenizer.json: not a tokenizer file \("):
        make(own_bundle, manifest)


def test_truncation_in_one_thread_does_not_reach_another(tiny_bundle: Path, manifest: Manifest) -> None:
    encoder = make(tiny_bundle, manifest)

    def tokens(truncate: bool) -> int:
        longest = 3 if truncate else 8
        return encoder.encode(["a nest of models"], longest, truncate).feeds["input_ids"].shape[1]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokens, [True, False] * 50)) == [3, 6] * 50
