"""An architecture that can be compiled: one ``FAMILY`` per model in ``families/``."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from ..errors import CheckpointError
from ..strict import nearest
from .architecture import Architecture
from .checkpoints.checkpoint import Checkpoint, open_checkpoint
from .checkpoints.own_folder import OwnConfig

PREFIX = "preset:"


class Deferred:
    """The module ``name``, relative to ``package``, which needs torch, imported when one of its functions is called:
    plans are made without. Type checkers see the module itself, where ``TYPE_CHECKING`` imports it under the same
    name."""

    def __init__(self, name: str, package: str | None) -> None:
        self._where = name, package

    def __getattr__(self, function: str) -> Callable[..., Any]:
        return lambda *given, **named: getattr(import_module(*self._where), function)(*given, **named)


@dataclass(frozen=True)
class Family:
    """Models of one kind, known by ``model_type`` in config.json; one family has no types and reads all others.

    ``read`` is called once for a checkpoint, works without torch, and raises CheckpointError for whatever is missing,
    misfits or is not honoured. ``reads_config_alone``: config.json alone tells axes and parameters, so that a model can
    be planned before it is trained. ``presets`` are published configurations by name, each what config.json would hold:
    ``preset:NAME`` stands for such a model.
    """

    name: str
    model_types: tuple[str, ...]
    read: Callable[[Checkpoint], Architecture]
    reads_config_alone: bool = False
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def own_family(
    name: str,
    read: Callable[[Checkpoint], Architecture],
    presets: Mapping[str, OwnConfig],
    model_type: str | None = None,
) -> Family:
    """Models of ours, whose configuration alone tells axes and parameters, with published ones by name;
    ``model_type`` is ``name`` unless stated."""
    published = {preset: config.to_json() for preset, config in presets.items()}
    return Family(name, (model_type or name,), read, reads_config_alone=True, presets=published)


@cache
def families() -> tuple[Family, ...]:
    """Every family, found by looking into ``families/``: a module there, or in a folder there one whose name ends with
    ``family``, that defines ``FAMILY`` or ``FAMILIES`` is enough."""
    package = import_module(".families", __package__)
    found = [vars(module) for module in _modules(package)]
    own = (module.get("FAMILIES") or (module["FAMILY"],) for module in found if module.keys() & {"FAMILIES", "FAMILY"})
    return tuple(family for families in own for family in families)


def _modules(package: ModuleType) -> Iterator[ModuleType]:
    for info in iter_modules(package.__path__, f"{package.__name__}."):
        if not info.ispkg:
            yield import_module(info.name)
            continue
        for own in iter_modules(import_module(info.name).__path__, f"{info.name}."):
            if own.name.endswith("family"):
                yield import_module(own.name)


def family_of(checkpoint: Checkpoint) -> Family:
    """The family that names this checkpoint's type, else the one that names none and reads any."""
    model_type = checkpoint.config.get("model_type")
    named = (family for family in families() if model_type in family.model_types)
    return next(named, None) or next(family for family in families() if not family.model_types)


def load_model(folder: Path) -> Any:  # torch.nn.Module
    """The module of the model in ``folder``, of a class of ours: in eval mode and float32, without gradients.

    Raises CheckpointError for another folder, or one whose weights are missing, misfit or not finite.
    """
    checkpoint = open_checkpoint(folder)
    return family_of(checkpoint).read(checkpoint).load().model


def presets() -> dict[str, Mapping[str, Any]]:
    """Name to what ``config.json`` would hold, of every family."""
    return {name: config for family in families() for name, config in family.presets.items()}


def preset_checkpoint(name: str) -> Checkpoint:
    """The untrained model that ``preset:name`` stands for. Raises CheckpointError for an unknown name."""
    known = presets()
    if name not in known:
        raise CheckpointError(f"{PREFIX}{name[:80]}: no preset of this name{nearest(name[:80], known)}")
    where = f"{PREFIX}{name}"
    missing = (
        f"{where}: a preset has no weights; `nestforge inspect` and `nestforge plan` work without, everything else "
        "needs a trained model folder"
    )
    return Checkpoint(Path(where), known[name], {}, missing)
