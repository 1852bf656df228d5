"""Small folders of sentence-transformers, written by it, and the vectors that it makes of texts with them."""

import json
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from support.tiny_models import save_tiny_encoder

HIDDEN = 16
TEXTS = (
    "The quick brown FOX jumps over a lazy dog and the engine",
    "a dog",
    "unknown words run a test of the model shape",
    "Fox",
)
# The smallest encoder with two layers and two heads.
TINY = {"num_hidden_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 2, "intermediate_size": 32}
_CURRENT_TO_OLD = "sentence_transformers.models"
_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


@dataclass(frozen=True)
class Layout:
    """A folder: ``modules(m)`` are those behind the transformer, made of the classes in ``m``; ``old`` writes them as
    versions before 5 did, ``renamed`` gives their folders other names, ``transformer`` is written into
    ``sentence_bert_config.json``, ``config`` into ``config_sentence_transformers.json`` and ``tokenizer`` into
    ``tokenizer_config.json``. ``save`` makes the transformer; with ``kept`` its own files stay as they are, whatever
    class they are of. ``ask`` is what ``encode`` is asked beside texts."""

    name: str
    modules: Callable[[Any], Sequence[Any]]
    old: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    transformer: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    save: Callable[[Path], Path] = lambda folder: save_tiny_encoder(folder, **TINY)
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    kept: bool = False
    ask: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Writes the folder through sentence-transformers' own ``save``."""
        plain = self.save(folder.with_name(f"{folder.name}-plain"))
        save_tokenizer(plain)
        torch.manual_seed(1)
        m = classes()
        model = m.SentenceTransformer(modules=[m.Transformer(str(plain)), *self.modules(m)], device="cpu")
        model.save(str(folder), create_model_card=False)
        if self.kept:
            for name in ("config.json", "model.safetensors"):
                shutil.copyfile(plain / name, folder / name)
        shutil.rmtree(plain)
        if self.old:
            _as_old_versions_write(folder)
        for old, new in self.renamed.items():
            (folder / old).rename(folder / new)
            edit(
                folder / "modules.json",
                lambda data, o=old, n=new: [{**e, "path": n if e["path"] == o else e["path"]} for e in data],
            )
        edit(folder / "sentence_bert_config.json", lambda data: {**data, **self.transformer})
        edit(folder / "config_sentence_transformers.json", lambda data: {**data, **self.config})
        edit(folder / "tokenizer_config.json", lambda data: {**data, **self.tokenizer})
        return folder


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Writes what ``change`` makes of a JSON file."""
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def their_vectors(folder: Path, texts: Sequence[str] = TEXTS, **asked: Any) -> np.ndarray:
    """``[texts, D]`` float32 by sentence-transformers itself."""
    model = classes().SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    return model.encode(list(texts), **asked)


@cache
def classes() -> Any:
    """sentence-transformers' classes; importing it takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer import modules
    names = ("Transformer", "Pooling", "Dense", "Normalize", "LayerNorm", "Dropout")
    found = {name: getattr(modules, name) for name in names}
    return SimpleNamespace(SentenceTransformer=SentenceTransformer, **found)


def save_tokenizer(folder: Path) -> None:
    """The files by which transformers opens the tokenizer of a folder."""
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **special).save_pretrained(folder)


def _as_old_versions_write(folder: Path) -> None:
    def old_type(name: str) -> str:
        return f"{_CURRENT_TO_OLD}.{name.rpartition('.')[2]}"

    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([{**entry, "type": old_type(entry["type"])} for entry in modules]))
    for entry in modules:
        config = folder / entry["path"] / "config.json"
        if entry["type"].endswith(".Pooling"):
            edit(config, _old_pooling)
        elif entry["type"].endswith(".Normalize"):
            shutil.rmtree(folder / entry["path"])  # git keeps no empty folder
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32, "do_lower_case": False}))
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"__version__": {"sentence_transformers": "2.0.0", "transformers": "4.6.1", "pytorch": "1.8.1"}})
    )


def _old_pooling(data: Mapping[str, Any]) -> dict[str, Any]:
    modes = [data["pooling_mode"]] if isinstance(data["pooling_mode"], str) else data["pooling_mode"]
    flags = {flag: mode in modes for mode, flag in _FLAGS.items()}
    return {"word_embedding_dimension": data["embedding_dimension"], **flags}


_KINDS = {
    "mean": (("Pooling", {"pooling_mode_mean_tokens": True}), ("Normalize", None)),
    "cls": (("Pooling", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}),),
    "dense": (("Pooling", {"pooling_mode_mean_tokens": True}), ("Dense", {}), ("Normalize", None)),
}


def sentence_folder(folder: Path, model: Any, kind: str) -> Path:
    """A folder on a tiny BERT: mean pooling with Normalize; cls; mean with Dense and Normalize."""
    model.save_pretrained(folder)
    width = model.config.hidden_size
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for place, (name, settings) in enumerate(_KINDS[kind], 1):
        path = folder / f"{place}_{name}"
        path.mkdir()
        modules.append(
            {"idx": place, "name": str(place), "path": path.name, "type": f"sentence_transformers.models.{name}"}
        )
        if name == "Pooling":
            (path / "config.json").write_text(json.dumps({"word_embedding_dimension": width, **(settings or {})}))
        if name == "Dense":
            stated = {
                "in_features": width,
                "out_features": 16,
                "bias": True,
                "activation_function": "torch.nn.modules.activation.Tanh",
            }
            (path / "config.json").write_text(json.dumps(stated))
            torch.manual_seed(5)
            tensors = {"linear.weight": 0.3 * torch.randn(16, width), "linear.bias": 0.1 * torch.randn(16)}
            save_file(tensors, path / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40, "do_lower_case": False}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "unk_token": "[UNK]"})
    )
    return folder
