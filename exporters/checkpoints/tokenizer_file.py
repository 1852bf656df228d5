"""The tokenizer file of a folder as transformers sets it up.

``tokenizer_config.json`` may override ``tokenizer.json``: many classes of transformers (BERT's, Gemma's, Qwen2's) build
normalizer, pre-tokenizer and post-processor themselves, by its ``do_lower_case``, ``strip_accents``,
``add_prefix_space`` and the like, and take the vocabulary alone from ``tokenizer.json``. The runtime knows
``tokenizer.json`` only, so what transformers made of both files is written into one; and likewise what it made of the
files of a vocabulary (``vocab.txt``, ``vocab.json`` with ``merges.txt``, those of sentencepiece) that stand alone.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...outside import library_errors, printable
from ...outside_file import read_file, read_json
from ...runtime.inputs.text import open_tokenizer
from .config import offline_transformers

# The largest vocabularies that are published take 40 MB.
_MAX_BYTES = 2**28
SETTINGS_FILE = "tokenizer_config.json"
# Texts on which settings of tokenizers show: case, accents (composed and not), scripts, digits, punctuation, runs of
# whitespace, control characters, wide and invisible letters, emoji, words that no vocabulary has.
_PROBE_TEXTS = (
    "",
    "a",
    " a  B\tc\r\n\n d ",
    "The QUICK brown Fox's \u0130stanbul, STRASSE or stra\u00dfe",
    "caf\u00e9 cafe\u0301 na\u00efve \u00c9COLE \u00f8 \u0142 \u1e9e",
    "\u65e5\u672c\u8a9e\u6771\u4eac \u4e2d\u6587abc \ud55c\uad6d\uc5b4 \u3072\u3089\u304c\u306a",
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u03a3\u03af\u03c3\u03c5\u03c6\u03bf\u03c2",
    "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947",
    "0 12 345 6789012345 3.14 1,000 \u0661\u0662 \u00bd \u2460",
    "it's we'LL don't e-mail @user #tag $5 50% (x) [y] {z} <w> a_b ... ?! \u201cq\u201d \u2014 ``''",
    "nul\x00 bell\x07 bad\ufffd soft\u00adhyphen nbsp\u00a0x zwj\u200dx bom\ufeff wide\u3000x",
    "\uff26\uff35\uff2c\uff2c \ufb01 \u2163 \u2122 \u210c",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f \U0001f1e9\U0001f1ea \U00013000",
    "\u2581a \u2581 \u0120b \u010a ##ing </w>",
    "qzxjv Pneumonoultramicroscopicsilicovolcanoconiosis " + "x" * 250,
)
_REMEDY = f"if tokenizer.json alone is right, take {SETTINGS_FILE} away: tokenizer.json is then trusted as it is"
_CONVERT = "write a tokenizer.json into the folder: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
# Added tokens of a tokenizer that are tried; some have thousands that are not used.
_MAX_ADDED_TOKENS = 64


def tokenizer_content(file: Path) -> bytes:
    """Content of a ``tokenizers`` file that tokenises as transformers' ``AutoTokenizer`` of the folder does.

    It is ``file`` (the folder's ``tokenizer.json``) itself where the folder has no ``tokenizer_config.json``, or one
    that changes nothing. Without that file it is what transformers makes of the folder's vocabulary. Code is neither
    fetched nor run.
    Raises CheckpointError for a tokenizer that transformers cannot load, or that no such file can state, and
    BundleCorruptError if ``file`` is not a tokenizer.
    """
    if not file.is_file():
        return _converted(file)
    content = read_file(file, _MAX_BYTES, CheckpointError)
    settings = file.with_name(SETTINGS_FILE)
    if not settings.is_file():
        return content
    transformers = _Transformers(settings, _REMEDY)
    ours, loaded = open_tokenizer(file, content), transformers.loaded()
    backend = getattr(loaded, "backend_tokenizer", None)  # classes in Python have none
    if backend is not None:
        theirs = open_tokenizer(file, backend.to_str().encode())
        if theirs.to_str() != ours.to_str():
            ours, content = theirs, theirs.to_str().encode()
    transformers.refuse_other_tokens(ours, loaded)
    return content


def _converted(file: Path) -> bytes:
    """Transformers' reading of the vocabulary beside ``file``, which is not there."""
    for path in file.parent.glob("*.model"):
        if find_spec("sentencepiece") is None:
            raise CheckpointError(
                f"{path}: transformers makes a tokenizer of it with the package sentencepiece, which is not installed; "
                f"install it, or, where it is, {_CONVERT}"
            )
    transformers = _Transformers(file, _CONVERT)
    loaded = transformers.loaded()
    name = type(loaded).__name__
    reads = sorted({*type(loaded).vocab_files_names.values()} - {file.name})
    if reads and not any(file.with_name(read).is_file() for read in reads):
        raise CheckpointError(f"{file}: no such file, and {name} of transformers reads {', '.join(reads)}; {_CONVERT}")
    if getattr(loaded, "backend_tokenizer", None) is None:
        raise CheckpointError(
            f"{file}: no such file, and {name} of transformers tokenises in Python, which none can state; a bundle "
            "takes texts by a tokenizer.json alone"
        )
    content: bytes = loaded.backend_tokenizer.to_str().encode()
    transformers.refuse_other_tokens(open_tokenizer(file, content), loaded)
    return content


@dataclass(frozen=True)
class _Transformers:
    """transformers' reading of the folder that ``file`` lies in, which errors name, with the ``remedy`` for them."""

    file: Path
    remedy: str

    def loaded(self) -> Any:
        """The folder's ``AutoTokenizer``."""
        transformers = offline_transformers()
        for path in (self.file.with_name(SETTINGS_FILE), self.file.with_name("config.json")):
            self._refuse_other_classes(path, read_json(path, CheckpointError) if path.is_file() else {}, transformers)
        with self._library_errors(self.file):
            return transformers.AutoTokenizer.from_pretrained(
                self.file.parent, local_files_only=True, trust_remote_code=False
            )

    def _refuse_other_classes(self, path: Path, stated: Mapping[str, Any], transformers: Any) -> None:
        """``AutoTokenizer`` calls whatever transformers has under the name: other Auto classes, which ask whether to
        run a folder's code, and models."""
        from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

        if not (name := stated.get("tokenizer_class")):
            return
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: tokenizer_class: expected a name, got {name!r:.80}")
        stem = name.removesuffix("Fast")
        for tried in (name, stem, f"{stem}Fast"):
            with self._library_errors(path):
                found = tokenizer_class_from_name(tried)
            if found is not None and not (
                isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerBase)
            ):
                raise CheckpointError(
                    f"{path}: tokenizer_class {name!r:.80} is not a tokenizer of transformers, or needs a package that "
                    f"is not installed; {self.remedy}"
                )

    def refuse_other_tokens(self, ours: Any, loaded: Any) -> None:
        """Classes that tokenise in Python, and settings that no file states (``split_special_tokens``)."""
        added = sorted(ours.get_added_tokens_decoder().items())[:_MAX_ADDED_TOKENS]
        texts = [*_PROBE_TEXTS, *(f"a {token.content} b{token.content}c" for _, token in added)]
        with self._library_errors(self.file):
            expected = loaded(texts, padding=False, truncation=False, verbose=False)["input_ids"]
            found = [row.ids for row in ours.encode_batch(texts)]
        for text, theirs, own in zip(texts, expected, found, strict=True):
            if theirs != own:
                raise CheckpointError(
                    f"{self.file}: {type(loaded).__name__} of transformers makes tokens {theirs!s:.60} of "
                    f"{printable(text, 40)!r}, a bundle's tokenizer file {own!s:.60}: it cannot state the difference; "
                    f"{self.remedy}"
                )

    def _library_errors(self, path: Path) -> AbstractContextManager[None]:
        return library_errors(
            lambda said: CheckpointError(
                f"{path}: transformers cannot load the tokenizer, code of the folder is never run ({said}); "
                f"{self.remedy}"
            )
        )
