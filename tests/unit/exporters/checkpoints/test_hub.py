"""Models fetched from a hub on this host: of one commit, without code and pickles; without a network one line."""

import hashlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.convert_coda import convert_coda
from nestforge.compiler.trial import trial
from nestforge.compiler.verify import verify_bundle
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints import config
from nestforge.exporters.checkpoints.hub import open_hub
from nestforge.parity.model import open_model
from nestforge.profiles.compile_request import CompileRequest
from support.hub_server import COMMIT, NAME, Hub, serving
from support.tiny_compile import board, save_tiniest


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    import huggingface_hub.constants as constants

    folder = save_tiniest(tmp_path / "served")
    for other in ("pytorch_model.bin", "modeling.py", "onnx/model.safetensors", "config.json.bak"):
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_bytes(b"other")
    monkeypatch.setattr(config, "_STATED_OFFLINE", "")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with serving(folder) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


def test_a_bundle_states_the_commit_that_was_fetched(hub: Hub, tmp_path: Path) -> None:
    folder = compile_bundle(f"hub:{NAME}@v1", board(budgets={"full": {}}), tmp_path / "out", levels={"ffn": [1]})
    manifest = open_bundle(folder).manifest
    assert (manifest.name, manifest.provenance.hub) == ("tiny", f"{NAME}@{COMMIT}")
    hashes = {entry.path: entry.sha256 for entry in manifest.provenance.source}
    weights = (hub.folder / "model.safetensors").read_bytes()
    assert hashes["model.safetensors"] == hashlib.sha256(weights).hexdigest()
    fetched = open_hub(f"hub:{NAME}@{COMMIT}").folder
    names = sorted(path.name for path in fetched.rglob("*"))
    assert names == sorted(
        path.name for path in hub.folder.iterdir() if path.suffix in (".json", ".safetensors", ".txt")
    )
    # What the cache has of a commit is not asked for again.
    hub.asked.clear()
    assert verify_bundle(folder, against=f"hub:{NAME}@{COMMIT}")
    assert not [one for one in hub.asked if "resolve" in one]


def test_a_trial_fetches_no_weights(hub: Hub) -> None:
    report = trial(CompileRequest(f"hub:{NAME}", board(), levels={"ffn": [1]}, buckets=["1x4"]))
    assert (report.family, report.axes) == ("bert", ("ffn", "heads"))
    assert not [one for one in hub.asked if "safetensors" in one]


def test_without_a_network_a_commit_of_the_cache_is_left(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_hub(f"hub:{NAME}")
    hub.shutdown()
    hub.server_close()
    assert open_hub(f"hub:{NAME}@{COMMIT}").has_weights
    with pytest.raises(CheckpointError, match=rf"^hub:{NAME}: cannot be fetched \(.*name a commit .*hub:{NAME}@COMMIT"):
        open_hub(f"hub:{NAME}")
    monkeypatch.setattr(config, "_STATED_OFFLINE", "1")
    assert open_hub(f"hub:{NAME}@{COMMIT}").has_weights
    with pytest.raises(CheckpointError, match=rf"^hub:{NAME}: HF_HUB_OFFLINE forbids the network; name a commit"):
        open_hub(f"hub:{NAME}")


@pytest.mark.parametrize("has_list", [True, False])
def test_a_commit_whose_weights_the_cache_lacks_is_refused_by_one_question(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], has_list: bool
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("tried again"))
    open_hub(text := f"hub:{NAME}@{COMMIT}", with_weights=False)
    if not has_list:  # which no other call than snapshot_download leaves
        shutil.rmtree(tmp_path / "cache" / f"models--{NAME.replace('/', '--')}" / "trees")
        monkeypatch.setattr("huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE", {})
    hub.shutdown()
    hub.server_close()
    assert not open_hub(text, with_weights=False).has_weights  # which needs nothing more
    expected = r"\(.*\); the cache lacks files of this commit; fetch them once with a network, or name a folder"
    with pytest.raises(CheckpointError, match=rf"^{text}: cannot be fetched {expected}"):
        open_hub(text)
    monkeypatch.setattr(config, "_STATED_OFFLINE", "1")
    with pytest.raises(CheckpointError, match=rf"^{text}: HF_HUB_OFFLINE forbids the network; the cache lacks"):
        open_hub(text)
    assert capfd.readouterr().err == ""


def test_jobs_that_take_folders_take_what_the_hub_has(hub: Hub, tmp_path: Path) -> None:
    report = convert_coda(f"hub:{NAME}", tmp_path / "out")
    assert report.parameters == convert_coda(hub.folder, tmp_path / "own").parameters
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "own" / "model.safetensors"
    ).read_bytes()
    module = open_model(f"hub:{NAME}@v1").module
    assert sum(each.numel() for each in module.parameters()) > 0
    hub_less = tmp_path / "weightless"
    hub_less.mkdir()
    (hub_less / "config.json").write_bytes((hub.folder / "config.json").read_bytes())
    for job in (lambda: convert_coda(hub_less, tmp_path / "none"), lambda: open_model(hub_less)):
        with pytest.raises(CheckpointError, match=r"model.safetensors: no such file"):
            job()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hub:", "hub:: expected hub:OWNER/NAME or hub:OWNER/NAME@REVISION"),
        ("hub:a/b/c", "hub:a/b/c: expected hub:OWNER/NAME"),
        ("hub:../../etc", "expected hub:OWNER/NAME"),
        (f"hub:{NAME}@v2", f"hub:{NAME}@v2: the hub has no such revision of {NAME}"),
        ("hub:nobody/none", "hub:nobody/none: the hub has no model nobody/none, or it is private; check the name"),
    ],
)
def test_refusals(hub: Hub, text: str, expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected) as refusal:
        open_hub(text)
    assert "\n" not in str(refusal.value)
