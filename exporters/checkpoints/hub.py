"""Models named by their id on the Hugging Face hub, ``hub:OWNER/NAME`` or ``hub:OWNER/NAME@REVISION``.

``huggingface_hub`` fetches them into its cache, of one commit, which a bundle states. Weights in safetensors and what
describes them is fetched, never code and never a pickle.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...outside import said_by
from .checkpoint import Checkpoint, open_checkpoint
from .config import stated_offline

HUB = "hub:"
_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+|[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DESCRIPTIONS = ("*.json", "*.txt", "*.model", "*.jinja", "README.md")
_WEIGHTS = ("*.safetensors",)
# Copies of the same weights for other tools.
_OTHERS = ("onnx/*", "openvino/*", "original/*", "consolidated*")


def open_named(model: Path | str, with_weights: bool = True) -> Checkpoint:
    """The checkpoint in a folder, whose weights may be missing, or ``open_hub`` of what the hub has. Raises
    CheckpointError."""
    text = str(model)
    return open_hub(text, with_weights) if text.startswith(HUB) else open_checkpoint(Path(model), untrained=True)


def open_hub(text: str, with_weights: bool = True) -> Checkpoint:
    """The checkpoint that ``hub:...`` names; what of it the cache lacks is fetched.

    A commit that the cache has whole needs no network; a branch or tag, which may have moved, is asked for. Raises
    CheckpointError, one line, for an id that is none, a model or revision that there is not, and without a network.
    """
    found = _ID.fullmatch(text.removeprefix(HUB))
    if found is None:
        raise CheckpointError(f"{text:.120}: expected {HUB}OWNER/NAME or {HUB}OWNER/NAME@REVISION")
    name, revision = found["name"], found["revision"] or "main"
    patterns = (*_DESCRIPTIONS, *(_WEIGHTS if with_weights else ()))
    is_pinned = _COMMIT.fullmatch(revision) is not None
    with _online(text, name, is_pinned) as hub:
        endpoint = os.environ.get("HF_ENDPOINT")
        wanted = {"endpoint": endpoint, "allow_patterns": list(patterns), "ignore_patterns": list(_OTHERS)}
        folder = _cached(hub, name, revision, wanted) if is_pinned else None
        if folder is None:
            # Without a network this fails at once, where each file would be tried several times.
            revision = hub.HfApi(endpoint=endpoint).model_info(name, revision=revision).sha
            folder = Path(hub.snapshot_download(name, revision=revision, **wanted))
    return replace(open_checkpoint(folder, untrained=not with_weights), hub=f"{name}@{revision}")


def _cached(hub: Any, name: str, commit: str, wanted: Mapping[str, Any]) -> Path | None:
    """The cache's folder of this commit, where nothing that is ``wanted`` is known to be missing from it."""
    try:
        folder = Path(hub.snapshot_download(name, revision=commit, local_files_only=True, **wanted))
    except hub.errors.LocalEntryNotFoundError:
        return None
    # A library that fetched files one by one, as transformers does, left no list of those that the commit has.
    needed = {"config.json", *_WEIGHTS} & {"config.json", *wanted["allow_patterns"]}
    return folder if all(any(folder.glob(pattern)) for pattern in needed) else None


@contextmanager
def _online(text: str, name: str, is_pinned: bool) -> Iterator[Any]:
    """``huggingface_hub``, which may use the network within, and nowhere else, unless the user forbids it."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import huggingface_hub as hub
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import logging
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if sys.stderr is None or not sys.stderr.isatty():
        disable_progress_bars()
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, stated_offline()
    spoken = logging.get_verbosity()
    logging.set_verbosity(logging.log_levels["error"])
    pinned = (
        "the cache lacks files of this commit; fetch them once with a network, or name a folder"
        if is_pinned
        else f"name a commit that its cache has, {HUB}{name}@COMMIT, or a folder"
    )
    try:
        yield hub
    except errors.RevisionNotFoundError as failure:
        raise CheckpointError(f"{text}: the hub has no such revision of {name}") from failure
    except errors.GatedRepoError as failure:
        raise CheckpointError(
            f"{text}: the hub asks for access to {name}; request it there, then `hf auth login`"
        ) from failure
    except errors.RepositoryNotFoundError as failure:
        raise CheckpointError(
            f"{text}: the hub has no model {name}, or it is private; check the name, or `hf auth login`"
        ) from failure
    except errors.OfflineModeIsEnabled as failure:
        raise CheckpointError(f"{text}: HF_HUB_OFFLINE forbids the network; {pinned}") from failure
    except CheckpointError:
        raise
    except Exception as failure:  # of any kind: no network, a proxy, a disk that is full
        raise CheckpointError(f"{text}: cannot be fetched ({said_by(failure)}); {pinned}") from failure
    finally:
        constants.HF_HUB_OFFLINE = before
        logging.set_verbosity(spoken)
