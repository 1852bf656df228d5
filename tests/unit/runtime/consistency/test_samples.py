import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.bundle.manifest import Manifest
from nestforge.bundle.open_bundle import Bundle
from nestforge.bundle.roles import Interface
from nestforge.errors import InputError
from nestforge.runtime.consistency.samples import (
    ArraySamples,
    TextSamples,
    different_rows,
    keyed_texts,
    read_array_samples,
    text_at_bucket,
)
from nestforge.runtime.inputs.text import TextEncoder

TEXTS = ("a nest", "of", "a nest of models of a nest of models")
PIXELS = TensorSpec("pixels", "float32", ("batch", 2, 2))


@pytest.fixture
def encoder(bundle: Bundle) -> TextEncoder:
    text = bundle.manifest.text
    return TextEncoder(bundle.file(text.file), text, bundle.manifest.inputs)


def images(manifest: Manifest) -> Manifest:
    return replace(manifest, inputs=(PIXELS,), outputs=(TensorSpec("y", "float32", ("batch", 3)),), text=None)


def test_texts_fill_buckets_and_are_cut_to_them(bundle: Bundle, encoder: TextEncoder) -> None:
    samples = TextSamples(encoder, TEXTS)
    first, second = samples.batches(bundle.manifest, Bucket(2, 6))
    assert (first.rows, second.rows, samples.size) == (2, 1, 3)
    assert first.feeds["input_ids"].tolist() == [[1, 4, 5, 2, 0, 0], [1, 6, 2, 0, 0, 0]]
    assert first.counted.sum(axis=1).tolist() == [4, 3]
    assert second.counted.tolist() == [[True] * 6]
    assert second.feeds["input_ids"].shape == (2, 6)
    assert (samples.truncated(Bucket(2, 6)), samples.truncated(Bucket(2, 64))) == (1, 0)


def test_a_padding_token_within_a_text_counts(bundle: Bundle, encoder: TextEncoder) -> None:
    """Lengths are the tokenizer's, so that a byte-level model may write zeros."""
    (batch,) = TextSamples(encoder, ("a [PAD] nest",)).batches(bundle.manifest, Bucket(1, 9))
    assert int(batch.counted.sum()) > 4


def test_fewer_texts_than_rows_are_padded_with_empty_rows(bundle: Bundle, encoder: TextEncoder) -> None:
    feeds, encoded = text_at_bucket(encoder, bundle.manifest.inputs, ["a nest"], Bucket(3, 6))
    assert feeds["input_ids"].tolist() == [[1, 4, 5, 2, 0, 0], [0] * 6, [0] * 6]
    assert encoded.lengths == (4,)


def test_a_tokenizer_that_knows_more_than_the_model_is_refused(bundle: Bundle, encoder: TextEncoder) -> None:
    """PyTorch would fail deep in its embedding, or read beyond it on another device."""
    inputs = tuple(replace(spec, high=5) for spec in bundle.manifest.inputs)
    with pytest.raises(InputError, match=r"^input input_ids: values 1\.\.7, expected 0\.\.4"):
        text_at_bucket(encoder, inputs, ["models"], Bucket(2, 8))


def test_rows_are_padded_to_the_bucket_and_counted_by_the_mask(bundle: Bundle) -> None:
    ids, mask = np.array([[3, 4, 0], [5, 6, 7], [8, 9, 0]]), np.array([[1, 1, 0], [1, 0, 1], [1, 1, 0]])
    first, second = ArraySamples({"input_ids": ids, "attention_mask": mask}).batches(bundle.manifest, Bucket(2, 5))
    assert first.counted.tolist() == [[True, True, False, False, False], [True, False, True, False, False]]
    assert first.feeds["input_ids"].tolist() == [[3, 4, 0, 0, 0], [5, 6, 7, 0, 0]]
    assert (second.rows, second.counted.shape) == (1, (1, 5))
    assert second.feeds["input_ids"].tolist() == [[8, 9, 0, 0, 0]] * 2, "the last row stands again"


def test_without_a_mask_rows_end_at_their_last_token(bundle: Bundle) -> None:
    manifest = replace(bundle.manifest, inputs=bundle.manifest.inputs[:1], text=None)
    samples = ArraySamples({"input_ids": np.array([[3, 0, 4, 0], [0, 0, 0, 0]])})
    (batch,) = samples.batches(manifest, Bucket(2, 6))
    assert batch.counted.sum(axis=1).tolist() == [3, 0]
    unpadded = replace(manifest, inputs=(replace(manifest.inputs[0], pad=None),))
    (batch,) = samples.batches(unpadded, Bucket(2, 4))
    assert batch.counted.all(), "nothing says where a row ends"


def test_images_have_rows_alone(manifest: Manifest) -> None:
    """An input without ``pad`` cannot be filled with empty rows."""
    samples = ArraySamples({"pixels": np.arange(12, dtype=np.float32).reshape(3, 2, 2)}, np.array([0, 1, 2]))
    first, second = samples.batches(images(manifest), Bucket(2, 1))
    assert (first.rows, second.rows) == (2, 1)
    assert first.counted.tolist() == [[True], [True]]
    assert second.feeds["pixels"].tolist() == [[[8, 9], [10, 11]]] * 2
    assert second.labels.tolist() == [2]
    assert samples.truncated(Bucket(2, 1)) == 0


def test_rows_longer_than_the_bucket_are_refused(bundle: Bundle) -> None:
    rows = {"input_ids": np.ones((2, 9), np.int64), "attention_mask": np.ones((2, 9), np.int64)}
    with pytest.raises(InputError, match="rows have 9 positions, the longest bucket takes 8; cut them"):
        list(ArraySamples(rows).batches(bundle.manifest, Bucket(1, 8)))


def test_the_hash_is_of_the_content(encoder: TextEncoder) -> None:
    rows = ArraySamples({"x": np.arange(6).reshape(3, 2)}, np.array([0, 1, 2]))
    assert rows.sha256 == rows.take([0, 1, 2]).sha256
    others = (rows.take([0, 1]), rows.take([1, 0, 2]), ArraySamples(rows.feeds))
    assert len({rows.sha256, *(other.sha256 for other in others)}) == 4
    assert TextSamples(encoder, TEXTS).sha256 != TextSamples(encoder, TEXTS[:2]).sha256


def test_of_equal_rows_the_first_is_kept() -> None:
    rows = ArraySamples({"x": np.array([[1, 2], [3, 4], [1, 2]])}, np.array([0, 1, 2]))
    assert sorted(row for _, row in different_rows(rows)) == [0, 1]


def test_labels_are_read_for_classifiers_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    pixels = np.zeros((2, 2, 2), np.float32)
    classes = Interface((PIXELS,), (TensorSpec("logits", "float32", ("batch", 3)),))
    vectors = Interface((PIXELS,), (TensorSpec("embedding", "float32", ("batch", 3)),))
    np.savez(path, pixels=pixels, labels=np.array([0, 2], np.int8))
    labels = read_array_samples(path, classes).labels
    assert (labels.tolist(), labels.dtype) == ([0, 2], np.int64)
    with pytest.raises(InputError, match="has labels, and this model gives rows no class; leave them out"):
        read_array_samples(path, vectors)
    np.savez(path, pixels=pixels, labels=np.array([0, 3]))
    with pytest.raises(InputError, match=r"labels: row 1 has 3, expected 0\.\.2"):
        read_array_samples(path, classes)
    np.savez(path, pixels=pixels)
    assert read_array_samples(path, classes).labels is None


def test_an_input_without_rows_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", table=np.zeros((2, 2), np.float32))
    model = Interface((TensorSpec("table", "float32", (2, 2)),), (TensorSpec("y", "float32", (2, 2)),))
    with pytest.raises(InputError, match=r"input table: \[2, 2\] has no rows to tell samples apart by"):
        read_array_samples(tmp_path / "rows.npz", model)


def test_texts_that_fit_a_shorter_sequence(bundle: Bundle, encoder: TextEncoder) -> None:
    samples = TextSamples(encoder, TEXTS)
    lengths = encoder.encode(TEXTS, 64).lengths
    short = samples.fitting(bundle.manifest, min(lengths))
    assert short.texts == tuple(text for text, n in zip(TEXTS, lengths, strict=True) if n == min(lengths))
    assert samples.fitting(bundle.manifest, max(lengths)) == samples
    assert samples.fitting(bundle.manifest, 1) is None


def test_rows_that_fit_a_shorter_sequence_are_cut_to_it(bundle: Bundle) -> None:
    ids, mask = np.array([[3, 4, 0], [5, 6, 7], [8, 9, 0]]), np.array([[1, 1, 0], [1, 0, 1], [1, 1, 0]])
    rows = ArraySamples({"input_ids": ids, "attention_mask": mask}, np.array([0, 1, 2]))
    short = rows.fitting(bundle.manifest, 2)
    assert short.feeds["input_ids"].tolist() == [[3, 4], [8, 9]]
    assert short.feeds["attention_mask"].tolist() == [[1, 1], [1, 1]]
    assert short.labels.tolist() == [0, 2]
    assert rows.fitting(bundle.manifest, 1) is None


def test_different_lines_in_the_order_of_their_hashes(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("b\n\n  a \nb\nc\n")
    found = keyed_texts(path, InputError)
    assert sorted(text for _, text in found) == ["a", "b", "c"]
    assert [key for key, _ in found] == sorted(hashlib.sha256(text.encode()).digest() for text in "abc")
