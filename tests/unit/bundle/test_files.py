"""Files of a bundle; names of the files of its weight store, and the hash of all of them."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.bundle.files import (
    SEAL,
    hash_of_all,
    identity_at,
    is_of_weights,
    regular_file,
    sealed_json,
    stream_sha256,
    to_json,
    unsealed,
    weight_names,
    weight_problems,
    weights_in,
)
from nestforge.bundle.manifest import BUILD_NAME
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import BundleCorruptError, BundleFormatError
from support.sealing import edited


def test_a_file_is_open_with_the_identity_of_its_path(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"nest")
    with regular_file(path) as (file, identity):
        assert file.read() == b"nest"
    assert identity == identity_at(path)
    path.write_bytes(b"forge!")
    assert identity != identity_at(path)
    assert identity_at(tmp_path / "none") is None


def test_whatever_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "folder", "pipe"):
        with pytest.raises(BundleFormatError, match=f"{name}: expected a regular file"), regular_file(tmp_path / name):
            pass
    with (
        pytest.raises(BundleCorruptError, match="none: missing; fetch the bundle again"),
        regular_file(tmp_path / "none"),
    ):
        pass


@pytest.mark.parametrize("size", [0, 1, 2**18, 2**18 + 1, 3 * 2**18 + 5])
def test_a_hash_is_of_what_is_left_of_the_file(tmp_path: Path, size: int) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    path = tmp_path / "f"
    path.write_bytes(b"head" + content[:size])
    with path.open("rb") as file:
        file.read(4)
        assert stream_sha256(file) == hashlib.sha256(content[:size]).hexdigest()


UNMEASURED = {"batch": 1, "sequence": 8, "predicted_ms": 1.0, "noise": {"runs": 3, "spread": 0.1}}
DATA = {"schema_version": 2, "thresholds": [0.25, 0.5], "name": "ü"}
Edit = Callable[[dict[str, Any]], object]


def read(raw: bytes) -> dict[str, Any]:
    return unsealed(raw, json.loads(raw), "here", "write it again")


def test_the_seal_is_that_of_all_bytes_before_it() -> None:
    raw = sealed_json(DATA)
    assert raw[-68:-4].decode() == hashlib.sha256(raw[:-68]).hexdigest() == json.loads(raw)[SEAL]
    assert (raw[-78:-68], raw[-4:]) == (b' "seal": "', b'"\n}\n')
    assert list(json.loads(raw)) == ["name", "schema_version", "thresholds", "seal"]
    assert read(raw) == DATA


@given(at=st.integers(0, len(sealed_json(DATA)) - 1), byte=st.integers(0, 255))
def test_no_byte_of_a_sealed_file_can_change(at: int, byte: int) -> None:
    raw = bytearray(sealed_json(DATA))
    if raw[at] == byte:
        return
    raw[at] = byte
    with pytest.raises((ValueError, BundleCorruptError)):
        read(bytes(raw))


@pytest.mark.parametrize(
    "raw",
    [to_json(DATA), to_json({**DATA, SEAL: "0" * 64}), sealed_json(DATA) + b"\n", sealed_json(DATA)[:-1]],
    ids=["none", "in the middle", "a byte more", "a byte less"],
)
def test_what_has_no_seal_at_its_end_is_refused(raw: bytes) -> None:
    with pytest.raises(BundleCorruptError, match=r"here: has no seal at its end, or was changed .*; write it again"):
        read(raw)


def test_a_build_record_without_a_seal_is_refused(own_bundle: Path) -> None:
    assert open_bundle(own_bundle).build.latencies[0].largest.measured_p50_ms == 0.4
    record = json.loads((own_bundle / BUILD_NAME).read_bytes())
    del record[SEAL]
    (own_bundle / BUILD_NAME).write_bytes(to_json(record))
    with pytest.raises(BundleCorruptError, match=r"build\.json: has no seal at its end.*; fetch the bundle again"):
        open_bundle(own_bundle)


@pytest.mark.parametrize(
    "change",
    [(b'"measured_p50_ms": 0.4', b'"measured_p50_ms": 0.1'), (b'"predicted_ms": 0.5', b'"predicted_ms": 0.4')],
)
def test_a_changed_build_record_is_refused(own_bundle: Path, change: tuple[bytes, bytes]) -> None:
    path = own_bundle / BUILD_NAME
    assert change[0] in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(*change))
    with pytest.raises(BundleCorruptError, match=r"build\.json: its seal is not that of its content"):
        open_bundle(own_bundle)


def point_of(build: dict[str, Any]) -> dict[str, Any]:
    """The first time of the first engine."""
    return build["latencies"][0]["points"][0]


BUILDS: list[tuple[Edit, str]] = [
    (lambda d: point_of(d).update(predicted_ms=-5), r"points\[0\]: predicted_ms: expected at least 0, got -5"),
    (lambda d: point_of(d).update(measured_p50_ms=-0.1), "measured_p50_ms: expected at least 0, got -0.1"),
    (lambda d: point_of(d).update(measured_p95_ms=0.3), "measured_p95_ms 0.3 below or without measured_p50_ms"),
    (lambda d: d["latencies"][0].update(points=[]), "points; expected every batch at every sequence once"),
    (lambda d: d["latencies"][0].update(residency="swapped"), "residency: got 'swapped'"),
    (lambda d: d["latencies"][0].update(engine="ffn8@b1-s8"), "engine 'ffn8@b1-s8' is not in the manifest"),
    (lambda d: d["latencies"].append(d["latencies"][0]), "latency of 'ffn16@b1-s8 as packed' stands twice"),
    (lambda d: point_of(d).update(noise={"runs": 3, "spread": -1}), "noise: spread: expected at least 0, got -1"),
    (
        lambda d: (point_of(d).clear(), point_of(d).update(UNMEASURED)),
        "latencies of engine ffn16@b1-s8: noise without measured_p50_ms",
    ),
    (lambda d: d.update(seconds={"build": -1}), "seconds.build: expected at least 0, got -1"),
]


@pytest.mark.parametrize(("edit", "message"), BUILDS)
def test_figures_out_of_bounds_are_refused(own_bundle: Path, edit: Edit, message: str) -> None:
    path = own_bundle / BUILD_NAME
    path.write_bytes(edited(path.read_bytes(), edit))
    with pytest.raises(BundleFormatError, match=message):
        open_bundle(own_bundle)


def test_one_file_has_the_plain_name_and_several_are_numbered() -> None:
    assert weight_names(1) == ("weights.safetensors",)
    assert weight_names(2) == ("weights-00001-of-00002.safetensors", "weights-00002-of-00002.safetensors")
    assert list(weight_names(120)) == sorted(weight_names(120))
    assert all(map(is_of_weights, weight_names(1) + weight_names(12)))


@pytest.mark.parametrize(
    "name",
    ["weights-1-of-2.safetensors", "ranking.safetensors", "weights.safetensors.writing", "a/weights.safetensors"],
)
def test_what_is_no_file_of_a_store(name: str) -> None:
    assert not is_of_weights(name)


@pytest.mark.parametrize(
    "names",
    [
        weight_names(3)[:2],
        weight_names(2) + weight_names(1),
        weight_names(2) + weight_names(3),
        ("weights-00001-of-00001.safetensors",),
    ],
)
def test_files_that_are_not_all_of_one_store(names: tuple[str, ...]) -> None:
    (problem,) = weight_problems(sorted(names))
    assert problem.startswith("files of the weight store: weights")
    assert problem.endswith("expected weights.safetensors, or each of -of-N once")


def test_all_files_of_a_store_or_none() -> None:
    assert [*weight_problems(()), *weight_problems(weight_names(1)), *weight_problems(weight_names(3))] == []


def test_the_hash_of_one_file_is_its_own() -> None:
    assert (hash_of_all([]), hash_of_all(["ab" * 32])) == (None, "ab" * 32)
    assert hash_of_all(["00" * 32, "11" * 32]) == hashlib.sha256(b"0" * 64 + b"1" * 64).hexdigest()


def test_files_are_found_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in (*weight_names(11)[::-1], "ranking.safetensors", "weights-00001-of-00011.safetensors.writing"):
        (tmp_path / name).touch()
    assert tuple(path.name for path in weights_in(tmp_path)) == weight_names(11)
