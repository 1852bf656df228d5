"""The jobs that the kill driver stops: everything in the tree that writes what a user keeps, and the caches."""

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import numpy as np

from .forks import command

GOLDEN = Path(__file__).parents[2] / "golden" / "bundle-texts"
_TEXTS = "hello world\nthe quick fox\n"
# Different in every run.
_OF_A_RUN = ("build.json", "report.md")


@dataclass(frozen=True)
class Job:
    """``prepare`` makes what the job needs in a folder, ``run`` does it there, ``content`` is what it has made."""

    name: str
    prepare: Callable[[Path], None]
    run: Callable[[Path], None]
    content: Callable[[Path], Mapping[str, object]]
    modules: tuple[str, ...] = ()

    def imports(self) -> None:
        """Imports what the job does, in the process that is forked for it."""
        for module in ("nestforge.tools.cli", *self.modules):
            import_module(module)


def _nothing(_: Path) -> None:
    """A job that needs nothing."""


def _bytes_below(name: str) -> Callable[[Path], Mapping[str, object]]:
    def content(folder: Path) -> Mapping[str, object]:
        place = folder / name
        files = [place] if place.is_file() else [path for path in sorted(place.rglob("*")) if path.is_file()]
        return {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
            if path.name not in _OF_A_RUN
        }

    return content


def _bundle_in(name: str) -> Callable[[Path], Mapping[str, object]]:
    def content(folder: Path) -> Mapping[str, object]:
        from nestforge.bundle.open_bundle import open_bundle

        if (folder / name).exists():
            open_bundle(folder / name, check="full")  # its build record too, whose bytes are those of a run
        return _bytes_below(name)(folder)

    return content


def _arrays_in(name: str) -> Callable[[Path], Mapping[str, object]]:
    def content(folder: Path) -> Mapping[str, object]:
        if not (folder / name).exists():
            return {}
        with np.load(folder / name) as arrays:
            return {key: arrays[key].tobytes() for key in arrays}

    return content


def _stage(folder: Path) -> None:
    """A compile's end, and its beginning, with next to nothing between."""
    from nestforge.compiler.work.staging import staged, write_synced

    with staged(folder / "made" / "out", "stage") as stage:
        if stage.is_published:
            return
        stage.once(stage.folder / "weights", lambda path: write_synced(path, b"weights"))
        stage.memo("receipt", dict[str, int], lambda: {"a": 1})
        (stage.folder / "part").mkdir(exist_ok=True)
        write_synced(stage.folder / "part" / "manifest.json", b"{}")


def _prepare_calibration(folder: Path) -> None:
    from support.exit_bundles import timed_once, write_arrays, write_exits_bundle

    bundle, rows = write_exits_bundle(folder / "exits.bundle"), write_arrays(folder / "rows.npz", 90)
    with timed_once():
        command("calibrate", bundle, "--data", rows, "--budget", "mean_flops<=3500")


def _calibrate(folder: Path) -> None:
    """The second policy of a bundle is kept beside the first."""
    from nestforge.bundle.open_bundle import open_bundle
    from nestforge.runtime.exits.policy import Calibration, save_policy

    bundle = open_bundle(folder / "exits.bundle")
    kept = Calibration.read(bundle)
    save_policy(bundle, replace(kept.policies[0], name="second"), default=True)


def _prepare_golden(folder: Path) -> None:
    shutil.copytree(GOLDEN, folder / "golden.bundle")
    (folder / "texts.txt").write_text(_TEXTS)


def _prepare_measuring(folder: Path) -> None:
    _prepare_golden(folder)
    _save_measurement(folder, "first")


def _save_measurement(folder: Path, cpu: str = "second") -> None:
    """The figures of a second host are kept beside those of the first."""
    from nestforge.bundle.device_files.device_file import MeasuredHost
    from nestforge.bundle.device_files.measurements import HostMeasurement, Measurements
    from nestforge.bundle.open_bundle import open_bundle

    host = MeasuredHost(cpu, "x86_64", 2)
    Measurements.save(open_bundle(folder / "golden.bundle"), HostMeasurement(host, 2, "2026-11-22T10:00:00+00:00", ()))


def _index(folder: Path) -> None:
    command("index", folder / "golden.bundle", "--text", folder / "texts.txt", "--output", folder / "made.index")


def _run(folder: Path) -> None:
    command("run", folder / "golden.bundle", "--text", "hello", "--output", folder / "answer.npz")


def _mapped(folder: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    command("run", folder / "golden.bundle", "--text", "hello", "--residency", "mapped")


def _mapped_content(folder: Path) -> Mapping[str, object]:
    """The entry, once it is there; its bytes are hashed by whoever uses it."""
    entries = sorted((folder / "cache").glob("nestforge/mapped/[!.]*"))
    return {entry.name: sorted(path.name for path in entry.iterdir()) for entry in entries}


def _profile(folder: Path) -> None:
    """With rates as they were measured once, since no two measurements are alike."""
    from nestforge.profiles import measure_rates
    from nestforge.profiles.device_profile import Rates

    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    measure_rates.measure_host_rates = lambda _cores: Rates(10.0, 5.0, 5.0, 5.0, 1.0)
    command("profile", "--force", "--output", folder / "host.yaml")


def _key(folder: Path) -> None:
    """The key by which a host knows its own plans: made once, the same from then on."""
    from nestforge.bundle.files import plan_key

    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    assert len(plan_key()) == 32


def _key_content(folder: Path) -> Mapping[str, object]:
    key = folder / "cache" / "nestforge" / "tensorrt" / "plan-key"
    return {"bytes": key.stat().st_size} if key.exists() else {}


def _prepare_model(folder: Path) -> None:
    from nestforge.profiles.load_profile import dump_profile
    from support.tiny_compile import board, save_tiniest
    from support.tiny_models import add_pooling, corpus

    add_pooling(save_tiniest(folder / "model"))
    corpus(folder / "texts.txt")
    (folder / "board.yaml").write_text(dump_profile(board(buckets=["1x8"])))


def _compile(folder: Path, *options: str) -> None:
    profile = ("--profile", folder / "board.yaml", "--text", folder / "texts.txt", *options)
    command("compile", folder / "model", *profile, "--output", folder / "out.bundle")


def _prepare_publishing(folder: Path) -> None:
    """A compile that was stopped when its last engine had been built."""
    from nestforge.compiler.compile import compile_bundle

    _prepare_model(folder)

    class Stopped(BaseException):
        pass

    def stop(stage: str, _done: int, _total: int) -> None:
        if stage == "prove":
            raise Stopped

    try:
        compile_bundle(
            folder / "model",
            folder / "board.yaml",
            folder / "out.bundle",
            text=folder / "texts.txt",
            command=("nestforge", "compile"),
            progress=stop,
        )
    except Stopped:
        return
    raise AssertionError("was not stopped")


def _nest(folder: Path) -> None:
    command(
        *("nest", folder / "model", "--text", folder / "texts.txt"),
        *("--levels", "ffn=0.5,1", "--steps", 3, "--output", folder / "nested"),
    )


_COMPILER = (
    "nestforge.compiler.compile",
    "nestforge.exporters.families.bert",
    "torch.onnx._internal.exporter._core",
    "transformers.models.bert.modeling_bert",
    "support.tiny_compile",
)
# Quick ones first, each of some milliseconds; the last four take seconds each.
JOBS = (
    Job("stage", _nothing, _stage, _bytes_below("made/out"), ("nestforge.compiler.work.staging",)),
    Job("calibrate", _prepare_calibration, _calibrate, _bytes_below("exits.bundle/calibration.json")),
    Job(
        "measure",
        _prepare_measuring,
        _save_measurement,
        _bytes_below("golden.bundle/measurements.json"),
        ("nestforge.bundle.device_files.device_file",),
    ),
    Job("index", _prepare_golden, _index, _arrays_in("made.index"), ("nestforge.runtime.retrieval",)),
    Job("run", _prepare_golden, _run, _arrays_in("answer.npz"), ("nestforge.runtime.model",)),
    Job("mapped", _prepare_golden, _mapped, _mapped_content, ("nestforge.runtime.model",)),
    Job("profile", _nothing, _profile, _bytes_below("host.yaml"), ("nestforge.profiles.probe_host",)),
    Job("key", _nothing, _key, _key_content, ("nestforge.bundle.files",)),
    Job("publish", _prepare_publishing, _compile, _bundle_in("out.bundle"), _COMPILER),
    Job("compile", _prepare_model, _compile, _bundle_in("out.bundle"), _COMPILER),
    Job(
        "precision",
        _prepare_model,
        lambda folder: _compile(folder, "--precision", "fp32,int8"),
        _bundle_in("out.bundle"),
        _COMPILER,
    ),
    Job("nest", _prepare_model, _nest, _bytes_below("nested"), ("nestforge.compiler.nest", *_COMPILER)),
)
