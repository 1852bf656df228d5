from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from nestforge.compiler.compile import compile_bundle
from nestforge.profiles.load_profile import dump_profile
from support.once import traced_once
from support.refusals import Case
from support.tiny_compile import board, save_tiniest
from support.tiny_models import add_pooling, corpus


@pytest.fixture(scope="session", autouse=True)
def traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with traced_once(tmp_path_factory):
        yield


@dataclass(frozen=True)
class Compiled:
    """A bundle, what it was made from, and the progress that was reported while it was made."""

    bundle: Path
    model: Path
    arguments: dict[str, Any]
    events: tuple[tuple[str, int, int], ...]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiniest(tmp_path_factory.mktemp("checkpoint") / "tiny")
    add_pooling(folder)
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus") / "text.txt")


@pytest.fixture(scope="session")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "board.yaml"
    path.write_text(dump_profile(board(buckets=["1x8", "2x16"])))
    return path


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory, model: Path, text: Path, profile: Path) -> Compiled:
    """The one bundle that most tests look at: two buckets, four levels, and a submodel that was requested by id."""
    events: list[tuple[str, int, int]] = []
    arguments = {"profile": str(profile), "text": str(text), "submodels": ["ffn8_24-heads2_1"]}
    output = tmp_path_factory.mktemp("compiled") / "tiny.bundle"
    found = compile_bundle(model, output=output, progress=lambda *event: events.append(event), **arguments)
    return Compiled(found, model, arguments, tuple(events))


@pytest.fixture
def case(tmp_path: Path, model: Path) -> Case:
    return Case(tmp_path, model)
