"""Libraries that a device may lack, imported where their types are asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .errors import InputError


def needed(module: str, asked: str, package: str, instead: str) -> Any:
    """The module of this dotted name. Raises InputError, which says what ``asked`` for it and what to do ``instead``,
    where ``package`` is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as failure:
        raise InputError(
            f"{asked}: needs {package}, which is not installed here; install it, or {instead}"
        ) from failure
