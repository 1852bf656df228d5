"""Exports that answer through something of their own: an embeddings server by its URL, a bundle of ours; and texts,
which a server takes and a folder with a tokenizer turns into tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib import error, request

import numpy as np

from ..bundle.open_bundle import open_bundle
from ..errors import CheckpointError, InputError
from ..exporters.checkpoints.config import offline_transformers
from ..exporters.sentence_transformers.text_settings import read_model_config
from ..outside import library_errors, said_by
from ..runtime.inputs.arrays import Array, Arrays
from ..runtime.load import load
from .cases import IDS, MASK, TYPES, Trial
from .export import Export, Port
from .model import Model

_SECONDS, _MOST_BYTES = 60, 2**26
TEXTS = "texts"
# One word, one letter, several scripts, code, much white space, and one that is longer than most models take.
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "a",
    "Wie spät ist es? Der letzte Zug fährt um 23:41 Uhr von Gleis 7 ab.",
    "def parity(a, b): return abs(a - b) <= 1e-5",
    "北京的秋天很美，很多人去香山看红叶。",
    "   white   space   ",
    "word " * 600,
)
_ROWS = 8  # texts of one case


class ServerExport(Export):
    """A server that embeds texts: OpenAI's ``/v1/embeddings``, or ``/embed`` of text-embeddings-inference."""

    kind = "embeddings server"
    inputs = (Port(TEXTS, "str", ("batch",)),)
    outputs = (Port("sentence_embedding", "float32"),)

    def __init__(self, url: str) -> None:
        self.label = url
        self._is_openai = not url.rstrip("/").endswith("/embed")

    def run(self, feeds: Arrays) -> dict[str, Array]:
        texts = [str(text) for text in feeds[TEXTS]]
        body: dict[str, object] = {"input": texts, "model": "default"} if self._is_openai else {"inputs": texts}
        post = request.Request(self.label, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310
        try:
            with request.urlopen(post, timeout=_SECONDS) as answer:  # noqa: S310  (http or https, see is_url)
                data = json.loads(answer.read(_MOST_BYTES))
            rows = [row["embedding"] for row in data["data"]] if self._is_openai else data
            found = np.array(rows, np.float32)
        except error.HTTPError as failure:
            raise InputError(f"{self.label}: answers {failure.code} {failure.reason}") from failure
        except (OSError, ValueError, KeyError, TypeError) as failure:
            raise InputError(f"{self.label}: does not answer with embeddings ({said_by(failure)})") from failure
        if found.ndim != 2 or len(found) != len(texts):
            raise InputError(f"{self.label}: answers shape {list(found.shape)} to {len(texts)} texts")
        return {"sentence_embedding": found}

    def width_problem(self, answered: Arrays, expected: Arrays) -> str | None:
        """Why these are embeddings of another model."""
        (got,), wanted = answered.values(), expected.get("sentence_embedding")
        if wanted is None:
            return f"{self.label}: the model has no sentence embedding; give its sentence-transformers folder"
        if got.shape[-1] != wanted.shape[-1]:
            return f"{self.label}: answers with {got.shape[-1]} numbers a text; the model gives {wanted.shape[-1]}"
        return None


class BundleExport(Export):
    """The largest submodel of a bundle, asked through the runtime."""

    kind = "bundle"

    def __init__(self, path: Path) -> None:
        manifest = open_bundle(path).manifest
        self.label = str(path)
        self.inputs = tuple(Port(spec.name, spec.dtype, spec.dims) for spec in manifest.inputs)
        self.outputs = tuple(Port(spec.name, spec.dtype, spec.dims) for spec in manifest.outputs)
        self._model = load(path)
        longest = max((engine.bucket for engine in manifest.engines), key=lambda b: (b.sequence, b.batch))
        self.largest = (longest.batch, longest.sequence)
        self.files = tuple(sorted(file for file in path.iterdir() if file.is_file()))
        self.precision = self._model.submodels[0].precision

    def run(self, feeds: Arrays) -> dict[str, Array]:
        return dict(self._model(dict(feeds)).outputs)

    def close(self) -> None:
        self._model.close()


def is_url(export: str) -> bool:
    return export.startswith(("http://", "https://"))


def text_trials(model: Model, export: Export, texts: Sequence[str]) -> list[Trial]:
    """``texts`` as cases, by the model's own tokenizer, behind its default prompt, cut to what it takes. A
    server is given the texts themselves beside the tokens. Raises InputError, for a model without a tokenizer too."""
    if not texts:
        return []
    if model.folder is None or not (model.folder / "tokenizer.json").is_file():
        raise InputError(f"{model.label}: has no tokenizer.json, which texts need; give the model's folder with it")
    tokenizer, prompt, most = _tokenizer(model)
    found = []
    for start in range(0, len(texts), _ROWS):
        rows = list(texts[start : start + _ROWS])
        with library_errors(lambda said: InputError(f"{model.label}: its tokenizer does not take the texts ({said})")):
            encoded = [tokenizer(prompt + row, truncation=True, max_length=most)["input_ids"] for row in rows]
        longest = max(map(len, encoded))
        ids = np.full((len(rows), longest), model.facts.pad, np.int64)
        mask = np.zeros_like(ids)
        for row, tokens in enumerate(encoded):
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        feeds: dict[str, Any] = {IDS: ids, MASK: mask}
        if TYPES in model.inputs:
            feeds[TYPES] = np.zeros_like(ids)
        if isinstance(export, ServerExport):
            feeds[TEXTS] = np.array(rows, object)
        found.append(Trial(f"texts {start + 1} to {start + len(rows)}", feeds, traits=frozenset({"padding"})))
    return found


def _tokenizer(model: Model) -> tuple[Any, str, int]:
    assert model.folder is not None
    with library_errors(lambda said: CheckpointError(f"{model.folder}: its tokenizer does not load ({said})")):
        tokenizer = offline_transformers().AutoTokenizer.from_pretrained(
            model.folder, local_files_only=True, trust_remote_code=False
        )
    most = min(tokenizer.model_max_length, model.facts.positions or 512, 512)
    settings = model.folder / "sentence_bert_config.json"
    if settings.is_file():
        most = min(most, json.loads(settings.read_text()).get("max_seq_length") or most)
    config = read_model_config(model.folder)
    prompt = config.texts.get(config.default_prompt_name or "", "")
    return tokenizer, prompt, most
