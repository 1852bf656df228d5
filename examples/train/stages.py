"""Stages of a training: a finished one is not repeated.

``training.json`` holds a record of every finished stage with the key of what it was made from; a stage whose key and
files are there is kept. What a stage writes is written beside and renamed, so that what exists is whole.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...bundle.seal import to_json
from ...compiler.work.staging import write_synced
from ...strict import unstructure
from ...tools.console import Progress

Record = dict[str, Any]
RECORDS_NAME = "training.json"


@dataclass(frozen=True)
class Stages:
    """The stages whose results lie in ``output``; ``progress`` hears which are kept."""

    output: Path
    progress: Progress

    def run(self, name: str, key: Record, files: Iterable[Path], seed: int, work: Callable[[], Record]) -> None:
        """Does ``work``, with torch seeded, unless the record with this key and all ``files`` are there."""
        if self.kept(name, key, files):
            return
        torch.manual_seed(seed)
        started = time.perf_counter()
        result = work()
        self.store(name, key, {**unstructure(result), "seconds": round(time.perf_counter() - started, 1)})

    def kept(self, name: str, key: Record, files: Iterable[Path]) -> bool:
        """Whether the stage is done; if it is not, what an interrupted one left is removed."""
        if self.records().get(name, {}).get("made_from") == unstructure(key) and all(file.exists() for file in files):
            self.progress(f"{name}: kept", 1, 1)
            return True
        for left in self.output.glob("*.writing"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        return False

    def store(self, name: str, key: Record, record: Record) -> None:
        """Adds the record of a finished stage, or replaces its older one."""
        record = {**unstructure(record), "made_from": unstructure(key)}
        replace_file(self.output / RECORDS_NAME, to_json({**self.records(), name: record}))

    def records(self) -> Record:
        """Every record by stage: what ``training.json`` holds."""
        path = self.output / RECORDS_NAME
        records: Record = json.loads(path.read_bytes()) if path.exists() else {}
        return records


def replace_file(path: Path, data: bytes) -> None:
    """Writes ``path`` beside and renames it."""
    beside = path.with_name(path.name + ".writing")
    write_synced(beside, data)
    beside.rename(path)


def replace_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Lets ``write`` make a folder beside ``folder``, then puts it in its place."""
    beside = folder.with_name(folder.name + ".writing")
    write(beside)
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)
