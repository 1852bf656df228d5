"""The road from an ordinary encoder to one with conditional adapters, as a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..exporters.checkpoints.checkpoint import Checkpoint, open_checkpoint, sha256_of
from ..exporters.checkpoints.own_folder import save_model
from ..exporters.families.coda.architecture.config import CodaConfig
from ..exporters.families.coda.conversion.convert import converted
from ..exporters.families.coda.conversion.settings import ConversionSettings
from ..exporters.source import open_source
from ..strict import unstructure
from .publish.write_bundle import tool_versions
from .work.staging import staged

# What reads a text, or prepares an image, as it did for the original.
_COMPANIONS = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model"),
    "preprocessor_config.json",
)


@dataclass(frozen=True)
class ConversionReport:
    """``groups`` are parameters by name: adapters, routers and norms, which a task trains, among ``parameters`` in all.
    ``left_out`` is what of the checkpoint the folder has not."""

    output: Path
    config: CodaConfig
    parameters: int
    groups: dict[str, int]
    left_out: tuple[str, ...]


def convert_coda(model: str | Path, output: str | Path, settings: ConversionSettings | None = None) -> ConversionReport:
    """Adds adapters and routers to the encoder of the T5, ViT or BERT checkpoint in folder ``model``, in the new folder
    ``output``. At r = 1 the result answers as the checkpoint's encoder does; at others it must be trained first.

    Raises a NestforgeError and writes nothing if an input is bad.
    """
    settings = settings or ConversionSettings()
    checkpoint, output = open_checkpoint(Path(model)), Path(output)
    companions = _companions(checkpoint)
    files = sorted({*checkpoint.source_files(), *companions})
    key = {
        "job": "convert-coda",
        "tools": tool_versions(),
        "source": {path.name: sha256_of(path) for path in files},
        "settings": unstructure(settings),
    }
    with staged(output, key) as stage:
        found = converted(checkpoint, settings)
        if not stage.is_published:
            save_model(found.model, found.config, stage.folder, {path.name: path.read_bytes() for path in companions})
    source = open_source(output)
    whole = source.spec.universal()
    return ConversionReport(output, found.config, source.parameters(whole), source.named_groups(whole), found.left_out)


def _companions(checkpoint: Checkpoint) -> list[Path]:
    return sorted({path for pattern in _COMPANIONS for path in checkpoint.folder.glob(pattern) if path.is_file()})
