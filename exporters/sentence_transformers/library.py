"""A folder of sentence-transformers as that library itself answers texts: what texts through a bundle are held
against."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import normalize

from ...bundle.entries.tensor_spec import TensorSpec
from ...bundle.manifest import Manifest
from ...bundle.roles import embedding_output
from ...errors import CheckpointError, InputError
from ...optional import needed
from ...outside import library_errors
from ...runtime.answer import Answer
from ...runtime.inputs.arrays import Array
from .text_settings import read_model_config

# One word, one letter, several scripts, code, much white space; the last, longer than most models take, is a case of
# its own.
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "a",
    "Wie spät ist es? Der letzte Zug fährt um 23:41 Uhr von Gleis 7 ab.",
    "def parity(a, b): return abs(a - b) <= 1e-5",
    "北京的秋天很美，很多人去香山看红叶。",
    "   white   space   ",
    "word " * 600,
)
_ROWS = 6  # texts of one case


class TextCase(NamedTuple):
    """``texts`` behind the prompt of this name (None is the default one), and the tokens that the library makes of
    them, by name."""

    name: str
    texts: list[str]
    prompt_name: str | None
    feeds: dict[str, Array]


def is_installed() -> bool:
    """Whether the library is here."""
    return find_spec("sentence_transformers") is not None


def cut_outputs(manifest: Manifest, depth: int | None = None) -> tuple[TensorSpec, ...]:
    """The embedding ``[batch, width]`` of a bundle's submodel of ``depth`` layers (None is all), then that cut to each
    of the dimensions that go with them, as ``NAME in DIMENSIONS``."""
    spec = embedding_output(manifest)
    cuts = [cut for cut in (spec.dimensions or ())[1:] if spec.pairs is None or (depth, cut) in spec.pairs]
    return spec, *(replace(spec, name=f"{spec.name} in {cut}", dims=("batch", cut), dimensions=(cut,)) for cut in cuts)


def asked(ask: Callable[..., Answer], outputs: Sequence[TensorSpec]) -> dict[str, Array]:
    """Answers of ``ask``, a bundle with texts, as ``outputs``, the later ones by their ``dimensions``."""
    whole = outputs[0].name
    return {spec.name: ask(dimensions=None if spec.name == whole else spec.dims[1])[whole] for spec in outputs}


def _opened(library: Any, folder: Path) -> Any:
    """The library's own encoder of ``folder``, without its remark on a default prompt, which cases state anyway."""
    logger = logging.getLogger(library.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return library.SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    finally:
        logger.setLevel(level)


class Library(torch.nn.Module):
    """The library on ``folder``, in float32. It cuts texts to ``longest`` tokens as the bundle does, and vectors to
    each of ``outputs``, as ``encode`` with ``truncate_dim``, and ``normalize_embeddings`` where the model normalises.
    Raises InputError where it is not installed, CheckpointError for a folder that it refuses."""

    def __init__(self, folder: Path, outputs: Sequence[TensorSpec], longest: int) -> None:
        super().__init__()
        library = needed("sentence_transformers", "texts", "sentence-transformers", "leave them out")
        with library_errors(lambda said: CheckpointError(f"{folder}: the library does not load it ({said})")):
            encoder = _opened(library, folder)
        self.encoder: Any = encoder.float().eval()
        self.encoder.max_seq_length = min(self.encoder.max_seq_length or longest, longest)
        self.version = f"sentence-transformers {library.__version__}"
        self.folder, self.outputs = folder, tuple(outputs)
        self._names: tuple[str, ...] = ()

    def keep_layers(self, stack: str, depth: int) -> None:
        """Leaves out the layers behind the first ``depth`` of the transformer's list ``stack``."""
        del self.encoder[0].auto_model.get_submodule(stack)[depth:]

    def cases(self, texts: Sequence[str]) -> Iterator[TextCase]:
        """``texts`` behind the default prompt, and the first of them behind every other prompt of the folder. Raises
        InputError for texts that the library does not take."""
        config = read_model_config(self.folder)
        named = [name for name in config.texts if name != config.default_prompt_name]
        starts = [(None, start) for start in range(0, len(texts), _ROWS)] + [(name, 0) for name in named]
        for name, start in starts:
            rows = list(texts[start : start + _ROWS])
            prompt = config.texts.get(name or config.default_prompt_name or "", "")
            with library_errors(lambda said: InputError(f"{self.folder}: does not take the texts ({said})")):
                made = self.encoder.preprocess(rows, prompt=prompt or None)
            feeds: dict[str, Array] = {key: t.numpy() for key, t in made.items() if isinstance(t, torch.Tensor)}
            feeds["prompt_length"] = np.full(len(rows), made.get("prompt_length") or 0, np.int64)
            self._names = tuple(feeds)
            behind = "" if name is None else f", prompt {name}"
            yield TextCase(f"texts {start + 1} to {start + len(rows)}{behind}", rows, name, feeds)

    def forward(self, *tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Vectors ``[batch, dimensions]`` of each of ``outputs``; ``tokens`` are those of a case, in their order."""
        given = dict(zip(self._names, tokens, strict=True))
        whole = self.encoder({**given, "modality": "text"})["sentence_embedding"][..., : self.encoder.truncate_dim]
        cut = (whole[..., : spec.dims[1]] for spec in self.outputs[1:])
        normalizes = self.outputs[0].normalisation is not None
        return whole, *(normalize(each, dim=-1) if normalizes else each for each in cut)
