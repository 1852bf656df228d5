"""Subjects of damage: the files of each, the ways in which they are damaged, and their use afterwards."""

import hashlib
import io
import json
from abc import ABC, abstractmethod
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from random import Random
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from nestforge.bundle.files import SEAL, sealed_json
from nestforge.bundle.manifest import BUILD_NAME, MANIFEST_NAME, REPORT_NAME
from nestforge.bundle.open_bundle import open_bundle
from nestforge.runtime.exits.policy import save_policy
from support.exit_bundles import policy

from .changes import ChangeOf, damaged_bytes, damaged_framed_json, damaged_json, damaged_lines
from .npz_changes import damaged_npz
from .protobuf_changes import damaged_protobuf

BY_SUFFIX: dict[str, ChangeOf] = {
    ".json": damaged_json,
    ".onnx": damaged_protobuf,
    ".safetensors": damaged_framed_json,
    ".npz": damaged_npz,
    ".index": damaged_npz,
    ".jsonl": damaged_lines,
}
Files = dict[str, bytes]
_PROMPT = [1, 2, 3]


class Subject(ABC):
    """``files`` are whole; ``use`` answers from a folder that holds them, or raises."""

    name: str
    files: Files
    # Ways of using it, each with answers of its own.
    ways: tuple[str, ...] = ("",)
    # Whether files that answer differently must be refused by ``check_fully``.
    sealed = False

    def change(self, rng: Random) -> tuple[Files, str]:
        """The files that damage changes, and what was done."""
        name = rng.choice(sorted(self.files))
        changed, how = BY_SUFFIX.get(Path(name).suffix, damaged_bytes)(self.files[name], rng)
        return {name: changed}, f"{name}: {how}"

    @abstractmethod
    def use(self, folder: Path, way: str) -> object:
        """The answer of the files in one of the ``ways``, to be compared by ``==``."""

    def check_fully(self, folder: Path) -> None:  # noqa: B027  (optional, not abstract)
        """Raises where the files are not those that were written."""


class BundleSubject(Subject):
    """A bundle: opened, inspected on the terminal, and asked of every submodel and task, and for a text."""

    sealed = True
    ways = ("shared", "packed", "auto", "mapped")
    text = "the quick brown fox jumps over the lazy dog"

    def __init__(self, name: str, files: Files) -> None:
        self.name = name
        self.files = files

    def use(self, folder: Path, way: str) -> object:
        import nestforge

        with nestforge.load(folder, threads=1, residency=way) as model:
            answers = []
            for entry in model.bundle.manifest.submodels[:8]:
                answer = model(self.text, submodel=entry.id)
                answers.append((entry.id, [(name, _digest(array)) for name, array in sorted(answer.outputs.items())]))
            for task in model.tasks.entries:
                answer = model(self.text, task=task)
                answers.append((task, [(name, _digest(array)) for name, array in sorted(answer.outputs.items())]))
            if model.bundle.manifest.generation is not None and way != "mapped":
                answers.append(("generated", list(model.generate(_PROMPT, max_tokens=4, stop=[]).rows[0].tokens)))
            fast = model.choose(1, 8, latency_ms=1e6).engine.id
        run_command("inspect", str(folder))
        return answers, fast

    def check_fully(self, folder: Path) -> None:
        from nestforge.runtime.load import verify_bytes

        verify_bytes(folder)


class ForgedBundle(BundleSubject):
    """A bundle whose author lies: files are listed as they are after the damage, so nothing stops at a hash."""

    sealed = False

    def change(self, rng: Random) -> tuple[Files, str]:
        names = [MANIFEST_NAME, *(name for name in self.files if name != BUILD_NAME)]
        name = rng.choice(names)
        changed, how = BY_SUFFIX.get(Path(name).suffix, damaged_bytes)(self.files[name], rng)
        manifest = changed
        if name != MANIFEST_NAME:
            data = json.loads(self.files[MANIFEST_NAME])
            for entry in data["files"]:
                if entry["path"] == name:
                    entry.update(bytes=len(changed), sha256=hashlib.sha256(changed).hexdigest())
            manifest = json.dumps(data).encode()
        build = json.loads(self.files[BUILD_NAME])
        build["manifest_sha256"] = hashlib.sha256(manifest).hexdigest()
        is_sealed = build.pop(SEAL, None) is not None
        record = sealed_json(build) if is_sealed else json.dumps(build).encode()
        return {name: changed, MANIFEST_NAME: manifest, BUILD_NAME: record}, f"forged {name}: {how}"


def bundle_files(folder: Path) -> Files:
    """The files of a bundle; nothing reads its report."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != REPORT_NAME}


def calibrated_files(folder: Path) -> Files:
    """The bundle with exits in ``folder``, calibrated."""
    bundle = open_bundle(folder)
    whole = max(bundle.manifest.submodels, key=lambda entry: entry.parameters)
    exits = len(bundle.manifest.exits.segments)
    found = replace(policy(), submodel=whole.id, engines=(bundle.manifest.engines[0].id,))
    found = replace(found, thresholds=(0.9,) * (exits - 1), histogram=(1,) * exits)
    with TemporaryDirectory() as copy:
        own = Path(copytree(folder, Path(copy, "own.bundle")))
        save_policy(open_bundle(own), found, default=True)
        return bundle_files(own)


class CheckpointSubject(Subject):
    """A model's folder, as ``inspect`` and the planner read it: headers alone."""

    name = "checkpoint"

    def __init__(self, folder: Path) -> None:
        self.files = {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors")}

    def use(self, folder: Path, way: str) -> object:
        run_command("inspect", str(folder), "--profile", "laptop-x86", "--bucket", "1x16")
        return None


class ProfileSubject(Subject):
    """A device profile in YAML."""

    name = "profile"

    def __init__(self) -> None:
        from nestforge.profiles.load_profile import dump_profile, load_profile

        self.files = {f"{name}.yaml": dump_profile(load_profile(name)).encode() for name in ("laptop-x86", "l4")}

    def change(self, rng: Random) -> tuple[Files, str]:
        import yaml

        name = rng.choice(sorted(self.files))
        raw = self.files[name]
        if rng.random() < 0.5:  # JSON is YAML
            raw, how = damaged_json(json.dumps(yaml.safe_load(raw)).encode(), rng)
        elif rng.random() < 0.5:
            lines = raw.split(b"\n")
            lines[rng.randrange(len(lines))] = rng.choice(_YAML_LINES)
            raw, how = b"\n".join(lines), "a line of another kind"
        else:
            raw, how = damaged_bytes(raw, rng)
        return {name: raw}, f"{name}: {how}"

    def use(self, folder: Path, way: str) -> object:
        from nestforge.profiles.load_profile import dump_profile, load_profile

        for name in sorted(self.files):
            profile = load_profile(folder / name)
            dump_profile(profile)
        return None


class TokenizerSubject(Subject):
    """A tokenizer's file alone, with texts that are long, odd or empty."""

    name = "tokenizer"

    def __init__(self, folder: Path) -> None:
        self.files = {"tokenizer.json": (folder / "tokenizer.json").read_bytes()}

    def use(self, folder: Path, way: str) -> object:
        from nestforge.bundle.entries.tensor_spec import TensorSpec
        from nestforge.bundle.manifest import TextEntry
        from nestforge.runtime.inputs.text import TextEncoder

        tokens = ("batch", "sequence")
        inputs = [TensorSpec(name, "int64", tokens, pad=0) for name in ("ids", "mask", "types")]
        encoder = TextEncoder(
            folder / "tokenizer.json", TextEntry("tokenizer.json", "ids", "mask", "types", None), inputs
        )
        texts = ["the quick brown fox", "", "a" * 3000, "unheard of \u1234\U0001f600 words", "the " * 300]
        encoded = encoder.encode(texts, 8, truncate=True)
        longest = max(array.shape[1] for array in encoded.feeds.values())
        assert longest <= 8, f"{longest} tokens after truncation to 8"
        return None


class ArraysSubject(Subject):
    """An NPZ file of rows, and one of a request."""

    name = "arrays"

    def __init__(self) -> None:
        rng, target = np.random.default_rng(0), io.BytesIO()
        arrays = {"ids": rng.integers(0, 9, (6, 16)), "mask": np.ones((6, 16), np.int64), "labels": np.arange(6)}
        np.savez(target, **arrays)
        self.files = {"rows.npz": target.getvalue()}

    def use(self, folder: Path, way: str) -> object:
        from nestforge.bundle.entries.tensor_spec import TensorSpec
        from nestforge.runtime.inputs.files import MAX_BYTES, checked_labels, read_array_file, read_npz

        read_npz(folder / "rows.npz", MAX_BYTES)
        inputs = [TensorSpec(name, "int64", ("batch", "sequence"), pad=0, high=9) for name in ("ids", "mask")]
        file = read_array_file(folder / "rows.npz", inputs)
        if file.labels is not None:
            checked_labels(folder / "rows.npz", file.labels, file.rows, 6)
        return None


class IndexSubject(Subject):
    """An index of a corpus, searched."""

    name = "index"

    def __init__(self, bundle: Path, folder: Path) -> None:
        self._bundle = bundle
        corpus, index = folder / "corpus.txt", folder / "corpus.index"
        corpus.write_text("the quick brown fox\na lazy dog\njumps over\n")
        run_command("index", str(bundle), "--text", str(corpus), "--output", str(index))
        self.files = {"corpus.index": index.read_bytes()}

    def use(self, folder: Path, way: str) -> object:
        return run_command("search", str(self._bundle), str(folder / "corpus.index"), "--query", "the lazy fox")


class CalibrationSubject(Subject):
    """Labelled lines as ``calibrate`` reads them."""

    name = "labelled lines"

    def __init__(self, bundle: Path) -> None:
        self._bundle = open_bundle(bundle)
        rows = [{"text": text, "label": i % 3} for i, text in enumerate(("the fox", "a dog", "over the lazy dog") * 4)]
        self.files = {"data.jsonl": "".join(f"{json.dumps(row)}\n" for row in rows).encode()}

    def use(self, folder: Path, way: str) -> object:
        from nestforge.runtime.calibrate.data import read_data

        read_data(folder / "data.jsonl", self._bundle, longest=16, truncate=True)
        return None


class Unprintable(AssertionError):
    """Output that no terminal should get."""


def run_command(*arguments: str) -> str:
    """A command in this process; its output. Raises what the command raises, Unprintable for what it prints."""
    from nestforge.errors import NestforgeError
    from nestforge.tools.cli import main

    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        code = main.main(list(arguments), standalone_mode=False)
    printed, complained = (bytes(stream.buffer.getvalue()).decode() for stream in streams)
    for text in (printed, complained):
        wrong = next((c for line in text.split("\n") for c in line if not c.isprintable()), None)
        if wrong is not None:
            raise Unprintable(f"{arguments[0]} printed {wrong!r}")
    if code:
        raise NestforgeError(complained.removesuffix("\n"))
    return printed


def _digest(array: np.ndarray[Any, Any]) -> str:
    return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"


_YAML_LINES = (
    *(b"name: &a [*a, *a]", b"!!python/object/apply:os.system ['true']", b"? [a, b]\n: c", b"<<: {a: 1}", b"\tname: x"),
    *(b"name: \xff\xfe", b"--- \n---", b"name: 2026-11-21", b"bandwidth: 1_000", b"bandwidth: 0x10"),
    *(b"bandwidth: 1:30:00", b"bandwidth: .inf", b"%YAML 9.9", b"name: !!binary aGk=", b"name: !!int '\xc2\xb2'"),
    *(b"name: !!timestamp '2026-99-99'", b"name: !!float 'x'", b"[" * 2000),
)
