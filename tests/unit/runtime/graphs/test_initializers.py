"""Against the onnx package, which reads the same bytes with the real protobuf."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import BundleCorruptError
from nestforge.runtime.graphs.initializers import Initializer, external_initializers
from onnx import TensorProto, helper

SIZES = {
    TensorProto.FLOAT: ("float32", 4),
    TensorProto.FLOAT16: ("float16", 2),
    TensorProto.BFLOAT16: ("bfloat16", 2),
    TensorProto.INT8: ("int8", 1),
    TensorProto.UINT8: ("uint8", 1),
    TensorProto.BOOL: ("bool", 1),
    TensorProto.INT32: ("int32", 4),
    TensorProto.INT64: ("int64", 8),
}


def external(name: str, kind: int, dims: tuple[int, ...], offset: object, **changes: object) -> TensorProto:
    tensor = TensorProto(name=name, data_type=kind, dims=dims, data_location=TensorProto.EXTERNAL)
    size = SIZES[kind][1] if kind in SIZES else 1
    data = {"location": "weights.safetensors", "offset": offset, "length": size * int(np.prod(dims, dtype=np.int64))}
    for key, value in {**data, **changes}.items():
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))
    return tensor


def model(*tensors: TensorProto) -> bytes:
    inside = onnx.numpy_helper.from_array(np.arange(6.0), "inside")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [], [], [inside, *tensors], doc_string="d")
    return bytes(helper.make_model(graph, ir_version=10).SerializeToString())


def by_onnx(data: bytes) -> tuple[Initializer, ...]:
    found = []
    for tensor in onnx.load_from_string(data).graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            place = int(entries["offset"]), int(entries["length"]), entries["location"]
            found.append(Initializer(tensor.name, SIZES[tensor.data_type][0], tuple(tensor.dims), *place))
    return tuple(found)


TENSORS = st.builds(
    external,
    st.text(max_size=20).filter(lambda name: name.isprintable()),
    st.sampled_from(list(SIZES)),
    st.lists(st.integers(0, 300), max_size=4).map(tuple),
    st.integers(0, 2**40),
)


@given(st.lists(TENSORS, max_size=5))
def test_every_graph_reads_as_onnx_reads_it(tensors: list[TensorProto]) -> None:
    data = model(*tensors)
    found = external_initializers(data, "engine.onnx")
    assert found == by_onnx(data)
    assert len(found) == len(tensors)


def test_every_engine_of_a_bundle_reads_as_onnx_reads_it(tiny_bundle: Path) -> None:
    for engine in open_bundle(tiny_bundle).manifest.engines:
        data = (tiny_bundle / engine.file).read_bytes()
        assert external_initializers(data, engine.file) == by_onnx(data)
        assert len(by_onnx(data)) == 5


GOOD = model(external("w", TensorProto.FLOAT, (3, 300), 77), external("b", TensorProto.INT8, (3,), 0))


@given(st.data())
def test_damaged_bytes_are_refused_or_read_as_onnx_reads_them(data: st.DataObject) -> None:
    damaged = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(GOOD) - 1))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    try:
        found = external_initializers(bytes(damaged), "engine.onnx")
    except BundleCorruptError:
        return
    try:
        known = by_onnx(bytes(damaged))
    except (DecodeError, KeyError, ValueError):  # what onnx refuses may be read here: ONNX Runtime refuses it then
        return
    assert found == known


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_in_one_line_or_have_no_initializers(data: bytes) -> None:
    said = "engine.onnx: no initializers"
    try:
        assert external_initializers(data, "engine.onnx") == ()
    except BundleCorruptError as refusal:
        said = str(refusal)
    assert said.startswith("engine.onnx: ")
    assert "\n" not in said


def test_packed_dims_are_read_too() -> None:
    """Writers may pack repeated numbers: three dims, 2, 3 and 300, as one field."""
    tensor = external("w", TensorProto.FLOAT, (), 0, length=4 * 2 * 3 * 300)
    raw = tensor.SerializeToString() + bytes([1 << 3 | 2, 4, 2, 3, 0xAC, 0x02])
    assert [one.shape for one in external_initializers(_field(7, _field(5, raw)), "engine.onnx")] == [(2, 3, 300)]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (external("w", TensorProto.FLOAT, (2,), 0, location="../other"), "lies in '../other', expected weights"),
        (
            external("w", TensorProto.FLOAT, (2,), 0, location=None),
            r"external data has 'offset', 'length'; expected location",
        ),
        (external("w", TensorProto.FLOAT, (2,), 0, length=7), r"7 bytes, expected those of float32 \[2\]"),
        (external("w", TensorProto.FLOAT, (-1, -2), 0, length=8), r"expected those of float32 \[-1, -2\]"),
        (external("w", TensorProto.FLOAT, (2,), "-1"), "offset is '-1', expected a whole number"),
        (external("w", TensorProto.FLOAT, (2,), 0, length=None), "external data has 'location', 'offset'; expected"),
        (external("w", TensorProto.FLOAT, (2,), 0, checksum="0"), "'checksum'; expected location, offset, length"),
        (external("w", TensorProto.STRING, (2,), 0), "type 8 is none that a weight store holds"),
    ],
)
def test_what_does_not_fit_the_store_is_named(tensor: TensorProto, message: str) -> None:
    with pytest.raises(BundleCorruptError, match=rf"^engine.onnx: initializer 'w': .*{message}.*compile it again$"):
        external_initializers(model(tensor), "engine.onnx")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x3a\x05\x00", "a field is longer than the file"),
        (b"\x80", "it ends within a number"),
        (b"\xff" * 11, "a number of more than ten bytes"),
        (b"\x3b", "a field of kind 3"),
        (b"\x3c", "a field of kind 4"),
        (b"\x00\x00", "a field of number 0"),
        (b"\xba\x80\x80\x80\x10\x00", "a field of number 536870919"),
    ],
)
def test_what_is_no_onnx_file_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(BundleCorruptError, match=f"no ONNX file: {message}"):
        external_initializers(data, "engine.onnx")


def constant(tensor: TensorProto) -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["c"], value=tensor)


def branch(tensor: TensorProto) -> onnx.NodeProto:
    inner = helper.make_graph([helper.make_node("Relu", ["w"], ["y"])], "inner", [], [], [tensor])
    return helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)


@pytest.mark.parametrize("node", [constant, branch])
@pytest.mark.parametrize("location", ["weights.safetensors", "other.bin"])
def test_a_tensor_outside_the_file_is_an_initializer_of_the_graph(
    node: Callable[[TensorProto], onnx.NodeProto], location: str
) -> None:
    """Runtimes follow those of constants and of the graphs of branches too."""
    tensor = external("w", TensorProto.FLOAT, (2,), 0, location=location)
    graph = helper.make_graph([node(tensor)], "g", [], [])
    inside = helper.make_graph([node(onnx.numpy_helper.from_array(np.arange(2.0), "w"))], "allocation", [], [])
    function = helper.make_function("d", "f", [], ["c"], [node(tensor)], [helper.make_opsetid("", 20)])
    assert external_initializers(helper.make_model(inside).SerializeToString(), "engine.onnx") == ()
    for data in (helper.make_model(graph), helper.make_model(inside, functions=[function])):
        with pytest.raises(BundleCorruptError, match=r"^engine\.onnx: a tensor that is no initializer of the graph"):
            external_initializers(data.SerializeToString(), "engine.onnx")


@pytest.mark.parametrize("location", [2, 0x1_0000_0001])
def test_a_place_that_only_some_readers_know_is_refused(location: int) -> None:
    """Protobuf keeps the low 32 bits of an enumeration, and steps over values that it does not know."""
    varint = bytes([location]) if location < 128 else bytes([0x81, 0x80, 0x80, 0x80, 0x10])
    raw = external("w", TensorProto.FLOAT, (2,), 0).SerializeToString() + bytes([14 << 3]) + varint
    with pytest.raises(BundleCorruptError, match="data location"):
        external_initializers(_field(7, _field(5, raw)), "engine.onnx")


GROUP = bytes([0xC3, 0x3E, 0xC4, 0x3E])  # field 1000, begun and ended: readers step over it
KEY, VALUE = b"\x0a\x08location", b"\x12\x05other"


@pytest.mark.parametrize(
    ("entry", "behind"),
    [
        (KEY + VALUE, GROUP),
        (GROUP + KEY + VALUE, b""),
        (b"\x8a\x00\x08location" + VALUE, b""),
        (b"\x0a\x88\x80\x00location" + VALUE, b""),
        (b"\x8a\x80\x80\x80\x10\x08location" + VALUE, b""),
    ],
    ids=["group behind", "group inside", "padded tag", "padded length", "tag of 33 bits"],
)
def test_no_way_of_writing_hides_a_tensor_outside_the_file(entry: bytes, behind: bytes) -> None:
    """ONNX Runtime reads each of these constants from the other file."""
    tensor = TensorProto(name="c", data_type=1, dims=[4], data_location=TensorProto.EXTERNAL).SerializeToString()
    attribute = _field(1, b"value") + _field(5, tensor + _field(13, entry)) + b"\xa0\x01\x04"
    node = _field(2, b"c") + _field(4, b"Constant") + _field(5, attribute) + behind
    with pytest.raises(BundleCorruptError, match=r"^engine\.onnx: a tensor that is no initializer of the graph"):
        external_initializers(_field(7, _field(1, node)), "engine.onnx")


def test_a_place_behind_a_tag_of_33_bits_is_refused() -> None:
    """ONNX Runtime drops the bits above 32, and sees data location 1 (field 14)."""
    tensor = TensorProto(name="w", data_type=1, dims=[1]).SerializeToString() + _field(13, KEY + VALUE)
    with pytest.raises(BundleCorruptError, match="no ONNX file: a field of number 536870926"):
        external_initializers(_field(7, _field(5, tensor + b"\xf0\x80\x80\x80\x10\x01")), "engine.onnx")


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param(lambda many: b"\x0a\x00" * many, id="nodes"),
        pytest.param(lambda many: _field(5, b"\x42\x00" * many), id="names"),
        pytest.param(lambda many: _field(5, _field(1, b"\x01" * many)), id="dims"),
        pytest.param(lambda many: _field(5, _field(13, b"\x0a\x00" * many)), id="keys"),
        pytest.param(lambda many: _field(1, b"location" * many), id="texts"),
    ],
)
def test_more_fields_than_engines_have_are_refused(
    graph: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nestforge.runtime.graphs.initializers._MAX_FIELDS", 100)
    assert external_initializers(_field(7, graph(97)), "engine.onnx") == ()
    with pytest.raises(BundleCorruptError, match="more than 100 fields, which no engine has"):
        external_initializers(_field(7, graph(100)), "engine.onnx")


def test_dimensions_beyond_those_of_arrays_are_refused_before_they_are_multiplied() -> None:
    with pytest.raises(BundleCorruptError, match="initializer 'w': 65 dimensions, more than 64"):
        external_initializers(model(external("w", TensorProto.FLOAT, (1,) * 65, 0)), "engine.onnx")


def test_what_names_a_file_is_found_at_any_depth() -> None:
    raw = KEY
    for _ in range(200):
        raw = _field(1, raw)
    with pytest.raises(BundleCorruptError, match="a tensor that is no initializer of the graph"):
        external_initializers(_field(7, raw), "engine.onnx")


def _field(number: int, body: bytes) -> bytes:
    size, out = len(body), bytearray([number << 3 | 2])
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    return bytes([*out, size]) + body
