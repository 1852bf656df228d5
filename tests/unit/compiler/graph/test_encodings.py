"""Encodings of weights, and numbers as they are stored."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nestforge.compiler.graph.encodings import (
    PER_OUTPUT,
    beyond_rounding,
    encode,
    split_encoding,
    stored_stack,
    table_name,
)
from nestforge.compiler.graph.store import read_store, write_store
from nestforge.compiler.graph.stored_numbers import StoredNumbers
from nestforge.errors import ParityError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal
from nestforge.profiles.precision import (
    BLOCK_INPUTS,
    ENCODINGS,
    FOUR_BITS,
    INT4,
    INT4_SCALE,
    INT8,
    INT8_SCALE,
    INT8_ZERO,
    Encoding,
    encoded_bytes,
    encoded_shape,
)
from support.derived_engines import rounded
from support.tiny_compile import save_tiniest


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def int4_values(packed: np.ndarray) -> np.ndarray:
    """``[..., out, inputs]``, in -8..7."""
    halves = np.stack([packed & 15, packed >> 4], axis=-1).astype(np.int8) - 8
    return halves.reshape(*packed.shape[:-2], -1)


def decoded_int4(array: np.ndarray) -> np.ndarray:
    scale = np.repeat(encode(array, "w.int4-scale"), 32, axis=-1)
    return (int4_values(encode(array, "w.int4")) * scale)[..., : array.shape[-1]]


@pytest.mark.parametrize(
    ("name", "plain", "encoding"),
    [
        ("a.weight", "a.weight", ""),
        ("a.weight.fp16", "a.weight", ".fp16"),
        ("a.weight.T.int8", "a.weight.T", ".int8"),
        ("a.weight.T.int8-scale", "a.weight.T", ".int8-scale"),
        ("a.weight.int8-zero", "a.weight", ".int8-zero"),
        ("experts[3].int4", "experts[3]", ".int4"),
        ("experts[3].int4-scale", "experts[3]", ".int4-scale"),
        ("a.weight.int4-g128", "a.weight", ".int4-g128"),
        ("a.weight.int4-g128-scale", "a.weight", ".int4-g128-scale"),
    ],
)
def test_a_suffix_says_the_encoding(name: str, plain: str, encoding: str) -> None:
    assert split_encoding(name) == (plain, encoding)


def test_a_row_lies_in_the_encoded_stack() -> None:
    assert stored_stack("experts[3].int4-scale") == ("experts.int4-scale", 3)
    assert stored_stack("experts.int8") == ("experts.int8", None)


@pytest.mark.parametrize("encoding", ["", *ENCODINGS])
@given(outputs=st.integers(1, 9), inputs=st.integers(1, 70), stack=st.integers(0, 2))
@settings(max_examples=15, deadline=None)
def test_extents_and_bytes_are_those_of_the_formula(encoding: Encoding, outputs: int, inputs: int, stack: int) -> None:
    shape = (stack, outputs, inputs) if stack else (outputs, inputs)
    encoded = encode(weights(*shape), f"w{encoding}")
    assert (encoded.shape, encoded.nbytes) == (encoded_shape(shape, encoding), encoded_bytes(shape, encoding))
    if not stack and encoding not in BLOCK_INPUTS:
        turned = encode(weights(*shape[::-1]), f"w.T{encoding}")
        assert turned.nbytes == encoded_bytes(shape, encoding)


@pytest.mark.parametrize("encoding", ["", *ENCODINGS])
@given(outputs=st.integers(1, 9), part=st.floats(0.1, 1), inputs=st.integers(1, 70))
@settings(max_examples=15, deadline=None)
def test_a_prefix_of_the_outputs_is_a_prefix_of_the_encoding(
    encoding: str, outputs: int, part: float, inputs: int
) -> None:
    array = weights(outputs, inputs)
    first = max(1, int(outputs * part))
    whole, alone = encode(array, f"w{encoding}"), encode(np.ascontiguousarray(array[:first]), f"w{encoding}")
    assert alone.dtype == whole.dtype
    np.testing.assert_array_equal(whole[:first], alone)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_stack_is_encoded_matrix_by_matrix(encoding: str) -> None:
    stack = weights(3, 5, 40)
    whole = encode(stack, f"w{encoding}")
    for row, matrix in enumerate(stack):
        np.testing.assert_array_equal(whole[row], encode(matrix, f"w{encoding}"))


def test_int8_has_a_scale_and_a_zero_point_for_each_output() -> None:
    array = np.array([[1, -2, 63], [0, 0, 0], [0.5, 6.3, -3.12]], np.float32)
    expected: dict[str, Any] = {
        ".int8": [[1, -2, 63], [0, 0, 0], [5, 63, -31]],
        ".int8-scale": np.array([1, 1, 0.1], np.float32),
        ".int8-zero": [0, 0, 0],
    }
    for encoding, values in expected.items():
        np.testing.assert_array_equal(encode(array, f"w{encoding}"), values)
        turned = np.transpose(values) if encoding not in PER_OUTPUT else values
        np.testing.assert_array_equal(encode(np.ascontiguousarray(array.T), f"w.T{encoding}"), turned)
    assert [encode(array, f"w{encoding}").dtype for encoding in expected] == [np.int8, np.float32, np.int8]


@given(st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_two_products_with_int8_weights_fit_in_16_bits(seed: int) -> None:
    """For activations in uint8, which processors without VNNI need."""
    largest = int(np.abs(encode(weights(4, 50, seed=seed), "w.int8").astype(int)).max())
    assert largest == 63
    assert 2 * 255 * largest <= np.iinfo(np.int16).max


def test_half_types_are_what_they_say() -> None:
    array = weights(4, 4)
    assert encode(array, "w.fp16").dtype == np.float16
    assert encode(array, "w.bf16").dtype == ml_dtypes.bfloat16
    assert encode(array, "w") is array
    np.testing.assert_array_equal(rounded(array, "w.fp16"), array.astype(np.float16))
    assert rounded(array, "w.fp16").dtype == np.float32


def test_int4_is_32_inputs_a_block_two_in_a_byte() -> None:
    row = np.zeros((1, 40), np.float32)
    row[0, :5] = [-8, 7, 3, -1, 0]  # a scale of 1 leaves nothing over
    row[0, 32:34] = [2, -16]
    packed, scale = encode(row, "w.int4"), encode(row, "w.int4-scale")
    assert (packed.shape, packed.dtype) == ((1, 2, 16), np.uint8)
    np.testing.assert_array_equal(scale, np.array([[1, 2]], np.float32))
    assert packed[0, 0].tolist() == [0xF0, 0x7B, *[0x88] * 14]
    assert packed[0, 1].tolist() == [0x09, *[0x88] * 15]


def test_int4_of_zeros_is_zero() -> None:
    zeros = np.zeros((2, 33), np.float32)
    np.testing.assert_array_equal(encode(zeros, "w.int4-scale"), np.ones((2, 2), np.float32))
    np.testing.assert_array_equal(decoded_int4(zeros), zeros)


@given(st.integers(0, 1000), st.integers(8, 100))
@settings(max_examples=25, deadline=None)
def test_int4_loses_no_more_than_the_plain_scale(seed: int, inputs: int) -> None:
    array = weights(3, inputs, seed=seed)
    blocks = np.pad(array, [(0, 0), (0, -inputs % 32)]).reshape(3, -1, 32)
    plain = np.abs(blocks).max(axis=-1, keepdims=True) / 7
    rounded = np.rint(blocks / plain) * plain
    error = np.square(decoded_int4(array) - array).sum()
    assert 0 < error <= np.square(rounded - blocks).sum() * (1 + 1e-5)


def test_a_transposed_matrix_has_no_int4() -> None:
    with pytest.raises(AssertionError, match=r"w\.T\.int4"):
        encode(weights(32, 32), "w.T.int4")


def test_equal_tables_have_one_name() -> None:
    array = weights(8)
    assert table_name(array) == table_name(array.copy())
    assert len({table_name(array), table_name(array[:4]), table_name(array.reshape(2, 4))}) == 3


_ROUNDED = ["w.int8", "w.T.int8", "w.int4", "w.int4-g128"]


@given(name=st.sampled_from(_ROUNDED), seed=st.integers(0, 999), outputs=st.integers(1, 9), inputs=st.integers(1, 70))
@settings(max_examples=60)
def test_what_an_encoding_makes_of_weights_is_a_rounding_of_them(
    name: str, seed: int, outputs: int, inputs: int
) -> None:
    array = weights(outputs, inputs, seed=seed) * 10.0 ** (seed % 9 - 4)
    array[seed % outputs] = 0
    assert not beyond_rounding(rounded(array, name), array, name).any()
    assert not beyond_rounding(0 * array, array, "w.fp16").any(), "which is no rounding to integers"


@pytest.mark.parametrize("name", _ROUNDED)
@pytest.mark.parametrize(
    "fault",
    [np.negative, np.zeros_like, lambda w: 2 * w, lambda w: w / 2, lambda w: np.roll(w, 1, 0), lambda w: w[:, ::-1]],
    ids=["negated", "zeros", "twice", "half", "rows of others", "reversed"],
)
def test_numbers_of_other_weights_are_no_rounding_of_them(name: str, fault: Callable[[np.ndarray], np.ndarray]) -> None:
    array = weights(64, 64)
    assert beyond_rounding(fault(rounded(array, name)), array, name).all()
    one = rounded(array, name)
    line = (slice(None), 5) if ".T" in name else 5
    one[line] = fault(rounded(array, name))[line]
    assert np.flatnonzero(beyond_rounding(one, array, name).all(axis=-1)).tolist() == [5]


@pytest.mark.parametrize("encoding", FOUR_BITS)
@pytest.mark.parametrize(
    "fault", [np.zeros_like, lambda block: 2 * block, np.negative], ids=["zeros", "twice", "negated"]
)
def test_one_wrong_block_among_many_of_an_output_is_seen(
    fault: Callable[[np.ndarray], np.ndarray], encoding: Encoding
) -> None:
    """Of 128 blocks, where it is less than rounding may leave of all of them."""
    size = BLOCK_INPUTS[encoding]
    array = weights(4, 128 * size)
    array[3, 2 * size : 3 * size] = 0
    array[3, 2 * size + 6] = 1  # the least that a block of zeros is wrong by, in steps of its scale
    numbers = rounded(array, f"w{encoding}")
    for row, block in ((1, 77), (3, 2)):
        place = row, slice(size * block, size * block + size)
        numbers[place] = fault(numbers[place])
    assert np.argwhere(beyond_rounding(numbers, array, f"w{encoding}")).tolist() == [[1, 77], [3, 2]]


FIRST, SECOND = "encoder.layer.0.intermediate.dense.weight", "encoder.layer.0.output.dense.weight"
POOLER, BIAS = "pooler.dense.weight", "pooler.dense.bias"
NAMES = [FIRST + INT4, FIRST + INT4_SCALE, *(SECOND + ".T" + form for form in (INT8, INT8_SCALE, INT8_ZERO)), BIAS]


@pytest.fixture
def universal(tmp_path: Path) -> UniversalModel:
    return load_universal(open_source(save_tiniest(tmp_path / "model", hidden_size=32, num_attention_heads=2)))


@pytest.fixture
def stored(universal: UniversalModel, tmp_path: Path) -> StoredNumbers:
    return StoredNumbers(universal, write_store(universal, NAMES, {}, tmp_path), tmp_path)


def test_weights_have_the_numbers_that_are_stored(universal: UniversalModel, stored: StoredNumbers) -> None:
    found, plain = stored.in_model(NAMES).universal.parameters(), universal.parameters()
    assert found[FIRST].numpy().tobytes() == rounded(plain[FIRST].numpy(), FIRST + INT4).tobytes()
    turned = rounded(np.ascontiguousarray(plain[SECOND].numpy().T), SECOND + ".T" + INT8)
    assert np.array_equal(found[SECOND].numpy(), turned.T)
    assert {name for name in plain if not found[name].equal(plain[name])} == {FIRST, SECOND}


def test_each_tensor_is_rounded_and_written_once(stored: StoredNumbers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of fewer layers, or at other shapes, read some of the tensors of others."""
    made = stored.in_model(NAMES).universal.parameters()
    files = sorted(stored.folder.iterdir())
    monkeypatch.setattr(StoredNumbers, "_numbers", lambda *_: pytest.fail("made again"))
    fewer = stored.in_model(NAMES[:2]).universal.parameters()
    assert fewer[FIRST].data_ptr() == made[FIRST].data_ptr()
    assert not fewer[SECOND].equal(made[SECOND]), "which is read in another encoding, if at all"
    assert sorted(stored.folder.iterdir()) == files


def test_of_two_encodings_of_a_weight_pytorch_has_the_one_of_products(
    universal: UniversalModel, tmp_path: Path
) -> None:
    """A tied table that an engine has in 8 bits beside another that multiplies by it in 4."""
    names = [POOLER + form for form in (INT8, INT8_SCALE, INT4, INT4_SCALE)]
    files = write_store(universal, names, {}, tmp_path)
    found = StoredNumbers(universal, files, tmp_path).in_model(names).universal.parameters()[POOLER]
    assert np.array_equal(found.numpy(), rounded(universal.parameters()[POOLER].numpy(), POOLER + INT4))


@pytest.mark.parametrize("name", NAMES)
def test_a_byte_of_the_store_that_is_not_made_of_the_model_is_found(stored: StoredNumbers, name: str) -> None:
    """The last one of a tensor: of a table it may be of a token that no case has."""
    tensor = read_store(stored.files, stored.model.spec)[name]
    with stored.files[0].open("r+b") as file:
        file.seek(tensor.offset + int(np.prod(tensor.shape)) * tensor.itemsize - 1)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(ParityError, match=rf"^weight {name}: the bundle has other numbers than are made of the model"):
        stored.in_model(NAMES)


@pytest.mark.parametrize("name", [FIRST, SECOND, BIAS])
def test_a_model_whose_weights_differ_a_little_is_another(
    universal: UniversalModel, stored: StoredNumbers, name: str
) -> None:
    weight = universal.parameters()[name].data
    weight += 1e-3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ParityError, match=rf"^weight {name}\S*: the bundle has other numbers than are made of the mod"):
        stored.in_model(NAMES)


def test_chosen_integers_are_no_further_from_a_weight_than_rounding_can_leave_them(
    universal: UniversalModel, tmp_path: Path
) -> None:
    weight = universal.parameters()[FIRST].numpy()
    chosen = {FIRST + form: encode(weight, FIRST + form) for form in (INT4, INT4_SCALE)}
    chosen[FIRST + INT4][5, 0, 3] ^= 1  # an example's
    files = write_store(universal, NAMES, {}, tmp_path, chosen)
    StoredNumbers(universal, files, tmp_path, chosen).in_model(NAMES)
    with pytest.raises(ParityError, match="other numbers than are made of the model's"):
        StoredNumbers(universal, files, tmp_path).in_model(NAMES)
    chosen[FIRST + INT4] = np.roll(chosen[FIRST + INT4], 1, axis=0)
    (tmp_path / "other").mkdir()
    files = write_store(universal, NAMES, {}, tmp_path / "other", chosen)
    with pytest.raises(ParityError, match=rf"weight {FIRST}.int4: its numbers are further from the model's than"):
        StoredNumbers(universal, files, tmp_path, chosen).in_model(NAMES)
