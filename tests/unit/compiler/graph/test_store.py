import gc
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.compiler.engines.build_engine import EngineBuilder
from nestforge.compiler.graph import store as module
from nestforge.compiler.graph.encodings import encode, parts_of, split_encoding
from nestforge.compiler.graph.store import (
    StoredTensor,
    joinable_parameters,
    read_store,
    recover_order,
    share_store,
    stored_name,
    transposed_parameters,
    unshared_parameters,
    write_store,
)
from nestforge.compiler.work.tensor_file import write_tensors
from nestforge.elastic import ElasticSpec, PrefixSlice
from nestforge.errors import CheckpointError
from nestforge.exporters.architecture import Task, TaskSpec
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal, permute_axis
from nestforge.profiles.precision import BF16, ENCODINGS, FP16, FP32, INT4, INT4_SCALE, INT8, INT8_SCALE
from nestforge.progress import heard_by
from support.gated_decoders import save_decoder
from support.tiny_compile import save_tiniest, template_of


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ffn=st.lists(st.integers(1, 32), min_size=2, max_size=2), heads=st.lists(st.integers(1, 2), min_size=2, max_size=2)
)
def test_every_view_is_the_narrowed_weight(builder: EngineBuilder, ffn: list[int], heads: list[int]) -> None:
    """Independent of ONNX: the bytes that offset and length name are exactly PyTorch's narrowed parameter."""
    submodel = builder.universal.spec.from_kinds({"ffn": ffn, "heads": heads})
    raw = (builder.stage.folder / WEIGHTS_NAME).read_bytes()
    narrowed = {name.removeprefix("model."): p for name, p in builder.universal.narrow(submodel).named_parameters()}
    assert set(builder.store) == {stored_name(name, builder.universal.spec) for name in narrowed}
    for name, parameter in narrowed.items():
        stored = builder.store[stored_name(name, builder.universal.spec)]
        expected = parameter.numpy().T if name in transposed_parameters(builder.universal.spec) else parameter.numpy()
        view = raw[stored.offset : stored.offset + stored.length(submodel)]
        assert view == np.ascontiguousarray(expected).tobytes(), name


def test_the_store_is_a_plain_safetensors_file(builder: EngineBuilder) -> None:
    tensors = safetensors.numpy.load_file(builder.stage.folder / WEIGHTS_NAME)
    assert tensors["encoder.layer.0.output.dense.weight.T"].shape == (32, 16)
    assert list(read_store([builder.stage.folder / WEIGHTS_NAME], builder.universal.spec)) == list(tensors)


def test_lengths_by_hand() -> None:
    spec = ElasticSpec((), ())
    submodel = type("Point", (), {"__getitem__": lambda _, axis: {"layers.0.heads": 3}[axis]})()
    whole = StoredTensor(100, (64, 32), 4, None, "w")
    cut = StoredTensor(100, (64, 32), 4, PrefixSlice("w", 0, "layers.0.heads", 8), "w")
    assert (whole.view_shape(submodel), whole.length(submodel)) == ((64, 32), 64 * 32 * 4)
    assert (cut.view_shape(submodel), cut.length(submodel)) == ((24, 32), 24 * 32 * 4)
    assert stored_name("w", spec) == "w"


def test_which_parameters_are_transposed_and_which_have_no_view() -> None:
    slices = (
        PrefixSlice("up", 0, "a"),
        PrefixSlice("down", 1, "a"),
        PrefixSlice("both", 0, "a"),
        PrefixSlice("both", 1, "b"),
    )
    spec = ElasticSpec((), slices)
    assert unshared_parameters(spec) == {"both"}
    assert "down" in transposed_parameters(spec)
    assert "up" not in transposed_parameters(spec)
    assert stored_name("down", spec) == "down.T"


def test_writing_twice_gives_the_same_bytes(builder: EngineBuilder, tmp_path: Path) -> None:
    names = list(builder.store)
    (again,) = module.write_store(builder.universal, names[::-1], {}, tmp_path)
    assert again.read_bytes() == (builder.stage.folder / WEIGHTS_NAME).read_bytes()


def test_steps_that_are_equal_are_each_used_once(builder: EngineBuilder, tmp_path: Path) -> None:
    """Dead neurons are all zero: their order cannot be told from bytes, and does not matter."""
    model = builder.universal
    for layer in model.module.model.encoder.layer:
        for parameter in (layer.intermediate.dense.weight, layer.intermediate.dense.bias):
            parameter.data[10:20] = 0
        layer.output.dense.weight.data[:, 10:20] = 0
    original = {name: parameter.clone() for name, parameter in model.parameters().items()}
    generator = torch.Generator().manual_seed(0)
    for axis in model.spec.axes:
        permute_axis(model, axis.name, torch.randperm(axis.size, generator=generator))
    files = module.write_store(model, list(builder.store), {}, tmp_path)
    ranked = {name: parameter.clone() for name, parameter in model.parameters().items()}
    for name, parameter in model.parameters().items():
        parameter.data.copy_(original[name])
    for axis, order in recover_order(files, model).items():
        assert sorted(order.tolist()) == list(range(len(order)))
        permute_axis(model, axis, order)
    assert all(torch.equal(parameter, ranked[name]) for name, parameter in model.parameters().items())


def test_a_store_whose_tensors_have_other_names(builder: EngineBuilder, tmp_path: Path) -> None:
    other = load_universal(open_source(save_tiniest(tmp_path / "task", task="ForMaskedLM")))
    with pytest.raises(
        CheckpointError, match=r"task: weights of layers.0.ffn have other names in .*; the bundle was made"
    ):
        recover_order([builder.stage.folder / WEIGHTS_NAME], other)


def test_one_step_of_one_tensor_is_enough_to_tell_models_apart(builder: EngineBuilder) -> None:
    builder.universal.parameters()["encoder.layer.0.attention.self.value.bias"].data[9] += 1e-6
    with pytest.raises(CheckpointError, match=r"weights of layers.0.heads are not those in"):
        recover_order([builder.stage.folder / WEIGHTS_NAME], builder.universal)


def test_an_order_is_found_beside_a_weight_in_4_bits(tmp_path: Path) -> None:
    """Its integers may be chosen on examples: other tensors say the order."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    model = load_universal(open_source(save_tiniest(tmp_path / "wide", **sizes)))
    up = "encoder.layer.1.intermediate.dense.weight"
    names = {stored_name(name, model.spec) for name in model.parameters()} - {up} | {up + INT4, up + INT4_SCALE}
    files = module.write_store(model, names, {}, tmp_path)
    model.parameters()[up].data.normal_()
    assert len(recover_order(files, model)) == len(model.spec.orders)


def test_offsets_count_from_the_start_of_the_file(tmp_path: Path) -> None:
    write_tensors({"a": np.arange(3, dtype=np.float32), "b": np.ones((2, 2), np.float32)}, tmp_path / "w")
    raw = (tmp_path / "w").read_bytes()
    header = int.from_bytes(raw[:8], "little")
    assert json.loads(raw[8 : 8 + header])["__metadata__"] == {"format": "nestforge"}
    store = read_store([tmp_path / "w"], ElasticSpec((), ()))
    assert np.frombuffer(raw, np.float32, 3, store["a"].offset).tolist() == [0, 1, 2]
    assert (store["b"].shape, store["b"].itemsize) == ((2, 2), 4)


@pytest.mark.parametrize("encoding", [FP16, BF16, INT8])
def test_a_submodel_is_a_prefix_of_the_encoded_weights_too(
    builder: EngineBuilder, tmp_path: Path, encoding: str
) -> None:
    """The encoding of a narrowed weight is the prefix of the encoded weight, where scales do not span what is cut."""
    universal, spec = builder.universal, builder.universal.spec
    names = [stored_name(name, spec) for name, p in universal.parameters().items() if p.dim() == 2]
    scales = [name + INT8_SCALE for name in names] if encoding == INT8 else []
    write_store(universal, [*(name + encoding for name in names), *scales], {}, tmp_path)
    raw, store = (tmp_path / WEIGHTS_NAME).read_bytes(), read_store([tmp_path / WEIGHTS_NAME], spec)
    submodel = spec.from_kinds({"ffn": [8, 24], "heads": [1, 2]})
    narrowed = {name.removeprefix("model."): p for name, p in universal.narrow(submodel).named_parameters()}
    for name in names:
        plain = narrowed[name.removesuffix(".T")].numpy()
        wanted = np.ascontiguousarray(plain.T if name.endswith(".T") else plain)
        for encoded in (name + encoding, *([name + INT8_SCALE] if scales else [])):
            stored = store[encoded]
            view = raw[stored.offset : stored.offset + stored.length(submodel)]
            if encoding == INT8 and name.endswith(".T"):  # its scales are those of all inputs
                scale = np.frombuffer(raw, np.float32, stored.shape[-1], store[name + INT8_SCALE].offset)
                wanted_bytes = scale if encoded != name + INT8 else np.rint(wanted / scale).astype(np.int8)
                assert view == wanted_bytes.tobytes(), encoded
            else:
                assert view == encode(wanted, encoded).tobytes(), encoded


@pytest.mark.parametrize("encoding", [FP16, BF16, INT8])
def test_orders_are_recovered_from_encoded_weights(tmp_path: Path, encoding: str) -> None:
    folder = save_tiniest(tmp_path / "model")
    permuted, original = load_universal(open_source(folder)), load_universal(open_source(folder))
    wanted = {order.name: torch.randperm(order.axis.size) for order in permuted.spec.orders}
    for axis, order in wanted.items():
        permute_axis(permuted, axis, order)
    names = [stored_name(name, permuted.spec) for name in permuted.parameters()]
    kept = [name + encoding if original.parameters()[name.removesuffix(".T")].dim() == 2 else name for name in names]
    write_store(permuted, kept, {}, tmp_path)
    found = recover_order([tmp_path / WEIGHTS_NAME], original)
    assert {name: order.tolist() for name, order in found.items()} == {n: o.tolist() for n, o in wanted.items()}


_LAYER = "encoder.layer.0.attention.self"
_JOINED = f"{_LAYER}.query.weight+{_LAYER}.key.weight+pooler.dense.weight"


@pytest.mark.parametrize("encoding", [FP32, *ENCODINGS])
def test_the_encoding_of_joined_rows_is_their_encodings_joined(encoding: str) -> None:
    rng = np.random.default_rng(0)
    parts = {name: rng.standard_normal((rows, 40)).astype(np.float32) for name, rows in (("a", 7), ("b", 2), ("c", 3))}
    tensors = {name: torch.from_numpy(array) for name, array in parts.items()}
    found = module.laid_out(tensors.__getitem__, "a+b+c" + encoding)
    whole = encode(np.concatenate(list(parts.values())), "a+b+c" + encoding)
    assert (found.dtype, found.shape) == (whole.dtype, whole.shape)
    assert found.tobytes() == whole.tobytes()


def test_what_lies_in_a_joined_tensor_is_a_view_of_it_and_stored_once(builder: EngineBuilder, tmp_path: Path) -> None:
    universal, path = builder.universal, tmp_path / WEIGHTS_NAME
    names = {_JOINED, _JOINED + INT4, _JOINED + INT4_SCALE, "pooler.dense.weight", "pooler.dense.weight" + FP16}
    write_store(universal, names | set(parts_of(_JOINED + INT4)), {}, tmp_path)
    tensors, store = safetensors.numpy.load_file(path), read_store([path], universal.spec)
    assert set(tensors) == {_JOINED, _JOINED + INT4, _JOINED + INT4_SCALE, "pooler.dense.weight" + FP16}
    assert tensors[_JOINED].shape == (48, 16)
    raw, whole, parameters = path.read_bytes(), universal.spec.universal(), universal.parameters()
    for name in (_JOINED, _JOINED + INT4, _JOINED + INT4_SCALE):
        end = store[name].offset
        for part in parts_of(name):
            stored, plain = store[part], parameters[part.split(".int4")[0]].numpy()
            assert stored.offset == end, "one behind the other"
            end += stored.length(whole)
            assert raw[stored.offset : end] == encode(plain, part).tobytes()
            assert stored.view_shape(whole) == encode(plain, part).shape
        assert end == store[name].offset + store[name].length(whole)


def test_writing_joined_tensors_again_gives_the_same_bytes(builder: EngineBuilder, tmp_path: Path) -> None:
    written = set()
    for number in range(16):
        (tmp_path / str(number)).mkdir()
        (path,) = write_store(builder.universal, [_JOINED], {}, tmp_path / str(number))
        written.add(path.read_bytes())
    assert len(written) == 1


def _encoded_names(universal: UniversalModel) -> list[str]:
    """Every matrix in every encoding that it may have, and all else in float32."""
    names = [stored_name(name, universal.spec) for name in universal.parameters()]
    matrices = [name for name in names if universal.parameters()[name.removesuffix(".T")].dim() == 2]
    return [*names, *(n + e for n in matrices for e in ENCODINGS if not n.endswith(".T") or "int4" not in e)]


def test_a_tensor_is_encoded_some_rows_at_a_time_to_the_same_bytes(
    builder: EngineBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    universal = builder.universal
    names = {*_encoded_names(universal), _JOINED + INT4, _JOINED + INT4_SCALE, _JOINED}
    whole = write_store(universal, names, {}, tmp_path)[0].rename(tmp_path / "whole")
    monkeypatch.setattr(module, "_BLOCK", 40)  # rows of 16 or 32 weights
    (rows,) = write_store(universal, names, {}, tmp_path)
    assert rows.read_bytes() == whole.read_bytes()
    stored, held = universal.stored(), safetensors.numpy.load_file(whole)
    assert all(np.array_equal(held[name], encode_whole(stored, name)) for name in held if "+" not in name)


def encode_whole(stored: Callable[[str], torch.Tensor], name: str) -> np.ndarray:
    plain, _ = split_encoding(name)
    array = stored(plain.removesuffix(".T")).numpy()
    return encode(np.ascontiguousarray(array.T if plain.endswith(".T") else array), name)


def test_a_store_is_written_without_a_second_copy_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of numpy's memory, which encodings are made in; a transposed weight is scaled as a whole."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_hidden_layers": 4}
    universal = load_universal(open_source(save_tiniest(tmp_path / "model", **sizes)))
    monkeypatch.setattr(module, "_BLOCK", 2**12)
    names = _encoded_names(universal)
    weights = sum(parameter.nbytes for parameter in universal.parameters().values())
    tracemalloc.start()
    write_store(universal, names, {}, tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    largest = max(parameter.nbytes for parameter in universal.parameters().values())
    assert peak < 4 * largest < weights / 2


def test_parameters_are_the_store_itself_once_it_is_written(tmp_path: Path) -> None:
    universal = load_universal(open_source(save_tiniest(tmp_path / "model")))
    before = {name: parameter.detach().clone() for name, parameter in universal.parameters().items()}
    apart = {_JOINED, "embeddings.LayerNorm.bias" + FP16}  # in a joined tensor, and in another form alone
    parts = {"embeddings.LayerNorm.bias", *parts_of(_JOINED)}
    names = {stored_name(name, universal.spec) for name in before if name not in parts}
    (path,) = write_store(universal, names | apart, {}, tmp_path)
    store, other = read_store([path], universal.spec), "embeddings.LayerNorm.weight"
    with path.open("r+b") as file:
        file.seek(store[other].offset)
        file.write(np.float32(0.5).tobytes())
    share_store(universal, [path])
    assert all(parameter.equal(before[name]) for name, parameter in universal.parameters().items())
    with path.open("r+b") as file:  # who looks at the file sees what is written into it
        file.seek(min(tensor.offset for tensor in store.values()))
        file.write(bytes(path.stat().st_size - file.tell()))
    own = {name for name, parameter in universal.parameters().items() if parameter.any()}
    assert own == {other, "embeddings.LayerNorm.bias"}, "what differs there, and what is not there in float32"


def test_nothing_keeps_the_checkpoint_in_memory_once_the_store_is_written(tmp_path: Path) -> None:
    """Float32 tensors of a checkpoint are views of its mapped file, and the last of them keeps all of it: a graph that
    was traced had the tied table twice, and a rule of onnxscript has that graph."""
    universal = load_universal(open_source(save_decoder(tmp_path / "model", tie_word_embeddings=True)))
    assert str(tmp_path / "model") in Path("/proc/self/maps").read_text()
    template = template_of(universal, Bucket(1, 4))
    share_store(universal, write_store(universal, template.weights[1:], template.tables, tmp_path))
    gc.collect()
    assert str(tmp_path / "model") not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("most", [1, 3000, 10**9])
def test_a_store_of_several_files_is_that_of_one(
    builder: EngineBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Integers of 4 bits lie behind their scales, perhaps in another file: a run that goes on finds both anew."""
    universal = builder.universal
    names = {*_encoded_names(universal), _JOINED + INT4, _JOINED + INT4_SCALE, _JOINED}
    whole = safetensors.numpy.load_file(write_store(universal, names, {}, tmp_path)[0])
    monkeypatch.setattr(module, "MOST_BYTES", most)
    told: list[tuple[int, int]] = []
    with heard_by(lambda *done: told.append(done)):
        files = write_store(universal, names, {}, tmp_path)
    sizes = [sum(array.nbytes for array in safetensors.numpy.load_file(path).values()) for path in files]
    assert (len(files) == 1) == (most == 10**9)
    assert told[-1] == (sum(sizes), sum(sizes))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    before = [path.read_bytes() for path in files]

    def once(path: Path, write: Callable[[Path], None]) -> None:
        if not path.exists():
            write(path)

    for path in files[1:]:
        path.unlink()
    files[0].write_bytes(before[0][:-1])  # ends too early
    assert write_store(universal, names, {}, tmp_path, once=once) == files
    assert [path.read_bytes() for path in files] == before
    store, found = read_store(files, universal.spec), module.stored_arrays(files, universal.spec)
    assert [name for name in store if name in whole] == list(whole)
    for name, array in whole.items():
        assert found[name].tobytes() == array.tobytes()
        raw = (tmp_path / store[name].file).read_bytes()
        assert raw[store[name].offset :][: array.nbytes] == array.tobytes()
    assert {store[part].file for part in parts_of(_JOINED)} == {store[_JOINED].file}


def test_what_an_axis_cuts_or_puts_in_order_is_not_joined(builder: EngineBuilder) -> None:
    universal = builder.universal
    found, ordered = joinable_parameters(universal), {cut.parameter for cut in universal.spec.slices}
    assert {"pooler.dense.weight", "embeddings.word_embeddings.weight"} <= found
    assert found == universal.parameters().keys() - ordered
    follower = PrefixSlice("pooler.dense.weight", 0, "layers.0.heads")
    spec = replace(universal.spec, order_followers=(follower,))
    assert joinable_parameters(_with_spec(universal, spec)) == found - {"pooler.dense.weight"}


def test_nothing_of_a_model_that_takes_tasks_is_joined(builder: EngineBuilder) -> None:
    """Tasks are merged into weights by their names."""

    def read(folder: Path) -> Task:
        raise NotImplementedError(folder)

    source = replace(builder.universal.source, tasks=TaskSpec("lora", frozenset(), read))
    assert joinable_parameters(replace(builder.universal, source=source)) == frozenset()


def _with_spec(universal: UniversalModel, spec: ElasticSpec) -> UniversalModel:
    source = replace(universal.source, architecture=replace(universal.source.architecture, spec=spec))
    return replace(universal, source=source)
