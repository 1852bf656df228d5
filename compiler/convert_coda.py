"""The road from an ordinary encoder to one with conditional adapters, as a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..argument_types import checked
from ..errors import OutputError
from ..exporters.checkpoints.checkpoint import Checkpoint, sha256_of
from ..exporters.checkpoints.hub import open_named
from ..exporters.checkpoints.own_folder import save_model
from ..exporters.families.coda.config import CodaConfig
from ..exporters.families.coda.convert import converted, decoder_behind
from ..exporters.families.coda.encoder_decoder import CodaEncoderDecoder
from ..exporters.families.coda.model import CodaEncoder
from ..exporters.source import open_source
from ..profiles.nest_request import ConversionSettings
from ..strict import digest
from .provenance import tool_versions
from .work.staging import staged

# Files that read a text, or prepare an image, as they did for the original.
_COMPANIONS = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model"),
    "preprocessor_config.json",
)
_OF_DECODERS = ("generation_config.json", "chat_template*")


@dataclass(frozen=True)
class ConversionReport:
    """``config`` is the encoder's; behind it are ``decoder_layers``. ``groups`` are parameters by name: adapters,
    routers and norms, which a task trains, among ``parameters`` in all. ``left_out`` is what of the checkpoint the
    folder has not."""

    output: Path
    config: CodaConfig
    parameters: int
    groups: dict[str, int]
    left_out: tuple[str, ...]
    decoder_layers: int = 0


@checked
def convert_coda(
    model: str | Path,
    output: str | Path,
    settings: ConversionSettings | None = None,
    with_decoder: bool = False,
    overwrite: bool = False,
) -> ConversionReport:
    """Adds adapters and routers to the encoder of the T5, ViT or BERT checkpoint ``model``, a folder or ``hub:...``, in
    the new folder ``output``; ``with_decoder`` keeps the decoder of a T5 behind it. At r = 1 the result answers as the
    checkpoint's encoder does, or as its whole model; at others it must be trained first. With ``overwrite`` a model
    folder that is there is replaced, in one step.

    Raises a NestforgeError and writes nothing if an input is bad.
    """
    settings = settings or ConversionSettings()
    checkpoint, output = open_named(model), Path(output)
    checkpoint.require_weights()
    if overwrite and output.exists() and output.samefile(checkpoint.folder):
        raise OutputError(f"{output}: is the model that is converted, which is not replaced; choose another `output`")
    companions = _companions(checkpoint, with_decoder)
    files = sorted({*checkpoint.source_files(), *companions})
    sources = {path.name: sha256_of(path) for path in files}
    key = digest(["convert-coda", tool_versions(), sources, settings, with_decoder])
    with staged(output, key, ("config.json", "model.safetensors") if overwrite else ()) as stage:
        found = converted(checkpoint, settings)
        made: CodaEncoder | CodaEncoderDecoder = found.model
        if with_decoder:
            made = decoder_behind(checkpoint, found.model)
        if not stage.is_published:
            save_model(made, made.config, stage.folder, {path.name: path.read_bytes() for path in companions})
    source = open_source(output)
    whole = source.spec.universal()
    groups, left_out = source.named_groups(whole), () if with_decoder else found.left_out
    layers = made.config.num_decoder_layers if isinstance(made, CodaEncoderDecoder) else 0
    return ConversionReport(output, found.config, source.parameters(whole), groups, left_out, layers)


def _companions(checkpoint: Checkpoint, with_decoder: bool) -> list[Path]:
    patterns = (*_COMPANIONS, *(_OF_DECODERS if with_decoder else ()))
    return sorted({path for pattern in patterns for path in checkpoint.folder.glob(pattern) if path.is_file()})
