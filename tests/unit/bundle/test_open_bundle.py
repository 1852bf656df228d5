import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nestforge.bundle import open_bundle as bundle_module
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.bundle.manifest import BUILD_NAME, MANIFEST_NAME
from nestforge.bundle.open_bundle import Check, open_bundle
from nestforge.errors import BundleCorruptError, BundleError, BundleFormatError

CHECKS: list[Check] = ["fast", "full"]
FILES = ["weights.safetensors", "ffn16.b1-s8.onnx", "tokenizer.json"]


def flip(path: Path, at: int = -1) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("check", CHECKS)
def test_opens_what_is_whole(tiny_bundle: Path, check: Check) -> None:
    bundle = open_bundle(tiny_bundle, check)
    assert [engine.id for engine in bundle.manifest.engines] == [
        "ffn16@b1-s8",
        "ffn16@b2-s16",
        "ffn32@b1-s8",
        "ffn32@b2-s16",
    ]
    assert bundle.file(WEIGHTS_NAME) == tiny_bundle / WEIGHTS_NAME
    assert repr(bundle) == f"Bundle({str(tiny_bundle)!r}: tiny, 2 submodels, 4 engines)"


def test_path_becomes_absolute(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_bundle.parent)
    assert open_bundle(tiny_bundle.name).path == tiny_bundle


@pytest.mark.parametrize("name", FILES)
def test_full_finds_a_flipped_byte_that_fast_cannot(own_bundle: Path, name: str) -> None:
    flip(own_bundle / name)
    open_bundle(own_bundle, "fast")
    with pytest.raises(BundleCorruptError, match=f"{name}: sha256 .{{64}}, expected .{{64}}; fetch the bundle again"):
        open_bundle(own_bundle, "full")


def test_a_flipped_byte_in_the_manifest_is_found_at_once(own_bundle: Path) -> None:
    path = own_bundle / MANIFEST_NAME
    path.write_bytes(path.read_bytes().replace(b'"the largest within 1 ms"', b'"the largest within 9 ms"'))
    with pytest.raises(BundleCorruptError, match=r"manifest.json: sha256 .{64}, build.json expects .{64}"):
        open_bundle(own_bundle)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", [*FILES, MANIFEST_NAME, BUILD_NAME])
def test_refuses_a_missing_file(own_bundle: Path, name: str, check: Check) -> None:
    (own_bundle / name).unlink()
    with pytest.raises(BundleCorruptError, match=f"{name}: missing"):
        open_bundle(own_bundle, check)


@pytest.mark.parametrize("name", FILES)
def test_refuses_another_size(own_bundle: Path, name: str) -> None:
    size = (own_bundle / name).stat().st_size
    os.truncate(own_bundle / name, size - 1)
    with pytest.raises(BundleCorruptError, match=f"{name}: {size - 1} bytes, expected {size}"):
        open_bundle(own_bundle)


@pytest.mark.parametrize("name", [*FILES, MANIFEST_NAME, BUILD_NAME])
def test_refuses_a_symlink_even_to_the_same_bytes(own_bundle: Path, name: str, tmp_path: Path) -> None:
    (own_bundle / name).rename(tmp_path / name)
    (own_bundle / name).symlink_to(tmp_path / name)
    with pytest.raises(BundleFormatError, match=f"{name}: expected a regular file"):
        open_bundle(own_bundle)


def test_an_absurd_manifest_is_refused_before_it_is_read(own_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(own_bundle / MANIFEST_NAME, 2**40)  # sparse: reading it would take a terabyte of memory
    monkeypatch.setattr(bundle_module, "read_manifest", lambda *_: pytest.fail("the manifest was read"))
    with pytest.raises(BundleFormatError, match="1099511627776 bytes, more than the 16777216 allowed"):
        open_bundle(own_bundle)


def test_refuses_an_unknown_schema_and_an_escape(
    own_bundle: Path, edit_manifest: Callable[[Path, Callable[[dict[str, Any]], object]], None]
) -> None:
    edit_manifest(own_bundle, lambda data: data["files"][0].update(path="../outside"))
    with pytest.raises(BundleFormatError, match=r"'\.\./outside' may leave the bundle"):
        open_bundle(own_bundle)
    edit_manifest(own_bundle, lambda data: data.update(schema_version=99))
    with pytest.raises(BundleFormatError, match="schema_version '99', expected 1; use the nestforge release"):
        open_bundle(own_bundle)


def test_refuses_what_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(BundleFormatError, match="not a folder; expected one that `nestforge compile` wrote"):
        open_bundle(tmp_path / "none")
    with pytest.raises(BundleError, match=r"manifest.json: missing"):
        open_bundle(tmp_path)
