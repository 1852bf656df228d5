"""Refusals: one clear line that says where and what, and nothing written; of a command, and of a compile."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import yaml
from click.testing import CliRunner
from nestforge.compiler.compile import compile_bundle
from nestforge.errors import NestforgeError
from nestforge.profiles.device_profile import profile_data
from nestforge.tools.cli import main
from support.tiny_compile import board


def contents(folder: Path) -> dict[str, object]:
    """Every path below ``folder``, with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refused(folder: Path, *arguments: object, code: int = 1) -> str:
    """The one line with which the command line refuses; nothing in ``folder`` may have changed."""
    before = contents(folder)
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.exit_code, result.stderr, result.exception)
    assert result.stdout == ""
    assert contents(folder) == before, "something was left behind"
    match = re.fullmatch(r"(?:[a-z ]+: \d+/\d+\n)*nestforge: error: ([^\n]{1,800})\n", result.stderr)  # after progress
    assert match, result.stderr
    return match[1]


def says(found: str, message: str) -> bool:
    """Whether ``found`` begins with ``message``, whose ``[...]`` stands for any text."""
    return re.match(".*".join(map(re.escape, message.split("[...]"))), found) is not None


class Case:
    """One compile that must be refused: a copy of the model to damage, a profile, and the arguments."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.inputs = folder / "inputs"
        self.model = Path(shutil.copytree(model, self.inputs / "model"))
        self.profile: Any = board()
        self.output = folder / "outputs" / "out"
        self.output.parent.mkdir()
        self.arguments: dict[str, Any] = {}

    def config(self, **changes: Any) -> None:
        path = self.model / "config.json"
        config = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))

    def weights(self, change: Callable[[dict[str, np.ndarray]], object]) -> None:
        tensors = safetensors.numpy.load_file(self.model / "model.safetensors")
        change(tensors)
        safetensors.numpy.save_file(tensors, self.model / "model.safetensors", metadata={"format": "pt"})

    def yaml(self, text: str | None = None, **changes: Any) -> None:
        self.profile = str(self.inputs / "device.yaml")
        data = {key: value for key, value in (profile_data(board()) | changes).items() if value is not ...}
        Path(self.profile).write_text(text if text is not None else yaml.safe_dump(data))

    def text(self, raw: bytes | None) -> None:
        self.arguments["text"] = self.inputs / "text.txt"
        if raw is not None:
            self.arguments["text"].write_bytes(raw)

    def refused_by(self, row: tuple[Damage, str], error: type[NestforgeError]) -> None:
        """``row``: the damage, and what the message says."""
        row[0](self)
        refusal = self.refused()
        assert type(refusal) is error
        assert re.search(row[1], str(refusal)), str(refusal)

    def refused(self) -> NestforgeError:
        before = sorted(self.output.parent.iterdir())
        with pytest.raises(NestforgeError) as failure:
            compile_bundle(self.model, self.profile, self.output, **self.arguments)
        message = str(failure.value)
        assert message
        assert "\n" not in message
        assert len(message) < 800
        assert sorted(self.output.parent.iterdir()) == before, "something was left behind"
        return failure.value


Damage = Callable[[Case], object]


def config(**changes: Any) -> Damage:
    """Other keys in ``config.json``; ``...`` removes one."""
    return lambda case: case.config(**changes)


def tensor(name: str, array: np.ndarray) -> Damage:
    """Another tensor of that name."""
    return lambda case: case.weights(lambda weights: weights.update({name: array}))


def device(text: str | None = None, **changes: Any) -> Damage:
    """The profile as a file of ``text``, or with other keys."""
    return lambda case: case.yaml(text, **changes)


def arguments(**changes: Any) -> Damage:
    """Other arguments of the compile."""
    return lambda case: case.arguments.update(changes)
