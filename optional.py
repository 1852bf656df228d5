"""Libraries that a device may lack, imported where their types are asked for."""

from importlib import import_module
from typing import Any

from .errors import InputError


def needed(module: str, user: str, package: str, instead: str) -> Any:
    """The module of this dotted name. Raises InputError, which names its ``user`` and says what to do
    ``instead``, where ``package`` is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as failure:
        raise InputError(f"{user}: needs {package}, which is not installed here; install it, or {instead}") from failure
