"""PyTorch with the numbers of a weight store, which are those that are made of the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from nestforge.compiler.graph.encodings import encode
from nestforge.compiler.graph.store import read_store, write_store
from nestforge.compiler.graph.stored_numbers import StoredNumbers
from nestforge.errors import ParityError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal
from nestforge.profiles.precision import INT4, INT4_SCALE, INT8, INT8_SCALE, INT8_ZERO
from support.rounding import rounded
from support.tiny_compile import save_tiniest

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
