"""A bundle that is replaced, overwritten or cut short while a model of it is open."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.errors import BundleCorruptError
from nestforge.runtime.engines.runner import runner_for
from safetensors.numpy import load_file, save_file
from support.sealing import reseal

Feeds = Callable[..., dict[str, Any]]


@pytest.fixture
def other(own_bundle: Path, tmp_path: Path) -> Path:
    """A bundle of the same names and sizes whose weights are twice as large."""
    folder = Path(shutil.copytree(own_bundle, tmp_path / "other.bundle"))
    save_file({name: 2 * weights for name, weights in load_file(folder / WEIGHTS_NAME).items()}, folder / WEIGHTS_NAME)
    reseal(folder)
    return folder


def swap(here: Path, other: Path) -> None:
    """Another folder under the same name."""
    here.rename(here.with_suffix(".old"))
    other.rename(here)


def overwrite(here: Path, other: Path) -> None:
    """The same files, other bytes."""
    for path in other.iterdir():
        (here / path.name).write_bytes(path.read_bytes())


def replace(here: Path, other: Path) -> None:
    """Other files in the same folder."""
    for path in other.iterdir():
        path.replace(here / path.name)


def remove(here: Path, other: Path) -> None:
    shutil.rmtree(here)


@pytest.mark.parametrize("change", [swap, overwrite, replace, remove])
def test_engines_that_open_later_come_from_what_was_opened_or_are_refused(
    own_bundle: Path, other: Path, feeds: Feeds, change: Callable[[Path, Path], None]
) -> None:
    with nestforge.load(own_bundle, threads=1) as model:
        first = model(feeds(1, 8), submodel="ffn16")
        change(own_bundle, other)
        with pytest.raises(BundleCorruptError, match="removed, replaced or written to since the bundle was opened"):
            model(feeds(1, 8), submodel="ffn32")
        if change is not overwrite:  # whose engine reads the file that it opened
            again = model(feeds(1, 8), submodel="ffn16")
            np.testing.assert_array_equal(again["hidden"], first["hidden"])


@pytest.mark.parametrize("residency", ["shared", "packed"])
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("length", [0, None], ids=["cut short", "written again"])
def test_a_store_that_is_written_to_is_an_error_and_neither_an_answer_nor_the_end(
    own_bundle: Path, feeds: Feeds, residency: Any, bound: bool, length: int | None
) -> None:
    bundle = nestforge.open_bundle(own_bundle)
    given = feeds(1, 8)
    with runner_for(bundle, bundle.manifest.engines[0], residency, 1) as runner:
        outputs = {"total": np.empty((1, 16), np.float32)}
        call = runner.bind(given, outputs) if bound else lambda: runner.run(given)
        call()
        store = own_bundle / WEIGHTS_NAME
        store.write_bytes(store.read_bytes()[:length])
        with pytest.raises(BundleCorruptError, match=r"weights\.safetensors: written to or cut short while engines"):
            call()


def set_back(path: Path, content: bytes) -> None:
    """Writes over ``path``, and sets its times back."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_time_of_writing_that_is_set_back_hides_nothing(own_bundle: Path, other: Path, feeds: Feeds) -> None:
    with nestforge.load(own_bundle, threads=1, residency="shared") as model:
        model(feeds(1, 8), submodel="ffn16")
        set_back(own_bundle / WEIGHTS_NAME, (other / WEIGHTS_NAME).read_bytes())
        with pytest.raises(BundleCorruptError, match=r"weights\.safetensors: written to or cut short while engines"):
            model(feeds(1, 8), submodel="ffn16")
        with pytest.raises(BundleCorruptError, match=r"weights\.safetensors: removed, replaced or written to since"):
            model(feeds(1, 8), submodel="ffn32")


@pytest.mark.parametrize("residency", ["shared", "packed"])
def test_rights_owners_and_links_may_change(own_bundle: Path, tmp_path: Path, feeds: Feeds, residency: Any) -> None:
    """As where a backup makes hard links, or a volume is mounted with another group."""
    with nestforge.load(own_bundle, threads=1, residency=residency) as model:
        before = model(feeds(1, 8), submodel="ffn16")
        for path in own_bundle.iterdir():
            path.chmod(0o440)
            os.link(path, tmp_path / f"{path.name}.kept")
        again = model(feeds(1, 8), submodel="ffn16")
        np.testing.assert_array_equal(again["hidden"], before["hidden"])
        model(feeds(1, 8), submodel="ffn32")
        model("a nest")


def test_a_link_that_is_switched_to_a_new_folder(own_bundle: Path, other: Path, tmp_path: Path, feeds: Feeds) -> None:
    """The recipe of docs/deployment.md: the open model goes on as it was, and the next one is the new one."""
    link = tmp_path / "current"
    link.symlink_to(own_bundle.name)
    with nestforge.load(link, threads=1) as model:
        before = model(feeds(1, 8), submodel="ffn16")["hidden"]
        (tmp_path / "next").symlink_to(other.name)
        os.replace(tmp_path / "next", link)
        assert not np.array_equal(model(feeds(1, 8), submodel="ffn32")["hidden"], before)
        with nestforge.load(own_bundle, threads=1) as old, nestforge.load(link, threads=1) as new:
            for submodel in ("ffn16", "ffn32"):
                now = model(feeds(1, 8), submodel=submodel)["hidden"]
                np.testing.assert_array_equal(now, old(feeds(1, 8), submodel=submodel)["hidden"])
                assert not np.allclose(now, new(feeds(1, 8), submodel=submodel)["hidden"])
        assert model.bundle.path == own_bundle


def test_a_text_needs_the_tokenizer_that_was_opened(own_bundle: Path) -> None:
    with nestforge.load(own_bundle, threads=1) as model:
        tokenizer = own_bundle / "tokenizer.json"
        tokenizer.write_text(tokenizer.read_text())
        with pytest.raises(BundleCorruptError, match=r"tokenizer\.json: removed, replaced or written to"):
            model("a nest")
