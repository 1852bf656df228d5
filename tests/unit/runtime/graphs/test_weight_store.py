"""The weight store, and weights with a task merged into them, against numpy in float64."""

import os
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from nestforge.bundle.entries.task_entry import BASE, MergedTask
from nestforge.bundle.files import WEIGHTS_NAME, FileIdentity
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import BundleCorruptError
from nestforge.runtime.engines.residency import RESIDENCIES, Residency
from nestforge.runtime.engines.runner import runner_for
from nestforge.runtime.graphs.initializers import Initializer
from nestforge.runtime.graphs.task_tensors import merged_weights
from nestforge.runtime.graphs.weight_store import MappedStore, mapped_store, store_initializers, tensor_spans
from onnx import ModelProto
from support.sealing import reseal


def test_engines_of_one_process_share_a_store(own_bundle: Path) -> None:
    first = mapped_store(own_bundle / WEIGHTS_NAME, None)
    assert mapped_store(own_bundle / WEIGHTS_NAME, None) is first


def test_a_store_that_is_being_closed_is_not_taken_over(own_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another thread, at the moment in which the last engine lets go of it."""
    close, next_one, armed = os.close, list[MappedStore](), False

    def closing(descriptor: int) -> None:
        nonlocal armed
        if armed:
            armed = False
            next_one.append(mapped_store(own_bundle / WEIGHTS_NAME, None))
        close(descriptor)

    monkeypatch.setattr(os, "close", closing)
    store = mapped_store(own_bundle / WEIGHTS_NAME, None)
    armed = True
    del store
    next_one[0].require_unchanged()


@pytest.mark.parametrize("more", [0, 1])
def test_a_header_larger_than_stores_have_is_refused_before_it_is_read(tmp_path: Path, more: int) -> None:
    store, length = tmp_path / WEIGHTS_NAME, 4 * 2**20 + more
    store.write_bytes(length.to_bytes(8, "little") + b"{}".ljust(length))
    identity = FileIdentity.of(store.stat())
    if more:
        with pytest.raises(BundleCorruptError, match=f"a header of {length} bytes, more than the {2**22} allowed$"):
            tensor_spans(store, identity)
    else:
        assert tensor_spans(store, identity) == ()


ENGINE = "ffn16.b1-s8.onnx"


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def edit_graph(folder: Path, edit: Callable[[ModelProto], object]) -> Bundle:
    """The bundle opened after ``edit`` changed its first engine, under new hashes."""
    model = onnx.load(folder / ENGINE, load_external_data=False)
    edit(model)
    (folder / ENGINE).write_bytes(model.SerializeToString())
    reseal(folder)
    return open_bundle(folder, "full")


def place(model: ModelProto, key: str, value: str) -> None:
    """``value`` for ``key`` of the place of ``up.weight``."""
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "up.weight")
    next(entry for entry in tensor.external_data if entry.key == key).value = value


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("link", [os.link, shutil.copyfile], ids=["hard link", "another file"])
def test_weights_in_a_file_that_no_manifest_lists_are_refused(
    own_bundle: Path, link: Callable[[Path, Path], object], residency: Residency
) -> None:
    link(own_bundle / WEIGHTS_NAME, own_bundle / "other.bin")
    bundle = edit_graph(own_bundle, lambda model: place(model, "location", "other.bin"))
    with pytest.raises(BundleCorruptError, match=rf"{ENGINE}: initializer 'up\.weight': lies in 'other\.bin', exp"):
        runner_for(bundle, bundle.manifest.engines[0], residency, 1).__enter__()


@pytest.mark.parametrize("offset", [0, 8, 10**6])
def test_weights_that_are_no_tensor_of_the_store_are_refused(own_bundle: Path, offset: int) -> None:
    """Such as the store's header, or what would lie behind its end."""
    bundle = edit_graph(own_bundle, lambda model: place(model, "offset", str(offset)))
    with pytest.raises(BundleCorruptError, match=rf"'up\.weight': bytes {offset} to {offset + 1024} are no tensor of"):
        runner_for(bundle, bundle.manifest.engines[0], "shared", 1).__enter__()


def test_a_graph_larger_than_its_engine_can_be_is_refused_before_it_is_read(own_bundle: Path) -> None:
    """16 MiB for nodes and names, beside the initializers of its own that the manifest counts."""
    with (own_bundle / ENGINE).open("r+b") as file:
        file.truncate(16 * 2**20 + 1)  # and nothing but zeros, which are no ONNX file
    reseal(own_bundle)
    bundle = open_bundle(own_bundle)
    engine = next(engine for engine in bundle.manifest.engines if engine.file == ENGINE)
    with pytest.raises(BundleCorruptError, match=rf"{ENGINE}: 16777217 bytes, more than the 16777216 of such an eng"):
        store_initializers(bundle, replace(engine, private_bytes=0))
    with pytest.raises(BundleCorruptError, match="no ONNX file"):
        store_initializers(bundle, replace(engine, private_bytes=1))


def test_a_flipped_byte_of_a_graph_is_found_where_its_engine_is_opened(own_bundle: Path) -> None:
    raw = bytearray((own_bundle / ENGINE).read_bytes())
    raw[-1] ^= 1
    (own_bundle / ENGINE).write_bytes(raw)
    bundle = open_bundle(own_bundle)
    with pytest.raises(BundleCorruptError, match=rf"{ENGINE}: sha256 \w+, expected \w+; fetch the bundle again"):
        store_initializers(bundle, bundle.manifest.engines[0])


def test_the_cache_of_mapped_engines_is_not_filled_from_damaged_weights(own_bundle: Path, tiny_bundle: Path) -> None:
    """It is kept by the hashes that the manifest states, and would answer for the whole bundle too."""
    raw = bytearray((own_bundle / WEIGHTS_NAME).read_bytes())
    raw[-1] ^= 1
    (own_bundle / WEIGHTS_NAME).write_bytes(raw)
    for folder in (own_bundle, tiny_bundle):
        bundle = open_bundle(folder)
        runner = runner_for(bundle, bundle.manifest.engines[0], "mapped", 1)
        if folder == own_bundle:
            with pytest.raises(BundleCorruptError, match=rf"{WEIGHTS_NAME}: sha256 \w+, expected"):
                runner.__enter__()
        else:
            with runner:
                pass


def test_a_graph_takes_memory_for_itself_alone(bundle: Bundle) -> None:
    """Many threads open engines at once: what the largest graph may be is no memory that each takes."""
    tracemalloc.start()
    try:
        store_initializers(bundle, bundle.manifest.engines[0])
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


GOLDEN = Path(__file__).parents[3] / "golden" / "bundle-merged"
RNG = np.random.default_rng(0)
A, B = RNG.standard_normal((2, 6), np.float32), RNG.standard_normal((5, 2), np.float32)
W = (RNG.standard_normal((5, 6)) * 1e-3).astype(np.float32)
EXACT = (W + B.astype(float) @ A.astype(float)).astype(np.float32)


def merged(tmp_path: Path, array: np.ndarray, name: str, rows: int, **arrays: np.ndarray) -> dict[str, np.ndarray]:
    """The first ``rows`` of ``array``, which a store holds behind 12 bytes."""
    store = tmp_path / WEIGHTS_NAME
    store.write_bytes(bytes(12) + array.tobytes())
    task = MergedTask("a", "lora", {name.replace("_T", ".T").replace("__", "."): one for name, one in arrays.items()})
    bundle = replace(open_bundle(GOLDEN).with_merged(task), path=tmp_path, opened={})
    shape = (rows, *array.shape[1:])
    return merged_weights(bundle, [Initializer(name, "float32", shape, 12, 4 * int(np.prod(shape)), WEIGHTS_NAME)])


@pytest.mark.parametrize("rows", [5, 3])
def test_rows_of_outputs(tmp_path: Path, rows: int) -> None:
    pair = {"l__lora_A__weight": A, "l__lora_B__weight": B}
    (found,) = merged(tmp_path, W, "l.weight", rows, **pair).values()
    np.testing.assert_array_equal(found, EXACT[:rows])


@pytest.mark.parametrize("rows", [6, 4])
def test_rows_of_inputs_where_a_weight_lies_transposed(tmp_path: Path, rows: int) -> None:
    pair = {"l__lora_A__weight_T": np.ascontiguousarray(A.T), "l__lora_B__weight": B}
    (found,) = merged(tmp_path, np.ascontiguousarray(W.T), "l.weight.T", rows, **pair).values()
    np.testing.assert_array_equal(found, EXACT.T[:rows])


def test_a_parameter_that_was_trained_whole_takes_the_place_of_the_base_s(tmp_path: Path) -> None:
    (found,) = merged(tmp_path, W, "head.weight", 2, head__weight=-W).values()
    np.testing.assert_array_equal(found, -W[:2])


def test_weights_without_a_pair_stay_the_store_s(tmp_path: Path) -> None:
    assert merged(tmp_path, W, "m.weight", 5, l__lora_A__weight=A, l__lora_B__weight=B) == {}
    assert merged(tmp_path, W[0], "l.bias", 5, l__lora_A__weight=A, l__lora_B__weight=B) == {}
    one = Initializer("encoder.layer.0.attention.self.query.weight", "float32", (16, 16), 0, 1024, WEIGHTS_NAME)
    assert merged_weights(open_bundle(GOLDEN).with_merged(BASE), [one]) == {}
    assert merged_weights(open_bundle(GOLDEN), [one]) == {}


def test_engines_of_other_shapes_than_the_task_s_are_damaged(tmp_path: Path) -> None:
    """Which a bundle from anywhere may hold."""
    pair = {"l__lora_A__weight": A, "l__lora_B__weight": B}
    for array, said in ((W[:, :4], r"l\.weight: float32 \[5, 4\], the task has float32 \[5, 6\]"), (W[0], r"\[6\]")):
        with pytest.raises(BundleCorruptError, match=said):
            merged(tmp_path, np.ascontiguousarray(array), "l.weight", len(array), **pair)
    with pytest.raises(BundleCorruptError, match=r"head\.weight: float32 \[5, 6\], the task has float32 \[2\]"):
        merged(tmp_path, W, "head.weight", 5, head__weight=np.zeros(2, np.float32))
    with pytest.raises(BundleCorruptError, match=r"the pair beside l is of \[1, 6\] and \[5, 2\]"):
        merged(tmp_path, W, "l.weight", 5, l__lora_A__weight=A[:1], l__lora_B__weight=B)
