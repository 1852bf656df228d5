"""A compile as a YAML file: the options of its request by their names (docs/python-api.md), and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ..argument_types import options_of
from ..bucket import Bucket
from ..errors import InputError, NestforgeError
from ..outside_file import read_file
from ..strict import nearest, structure, unstructure
from ..whole_file import write_whole
from .budget import BudgetSpec, check_budget
from .compile_request import JOB_OPTIONS, CompileRequest
from .strict_yaml import parse_yaml

_SUFFIXES = (".yaml", ".yml")
_MOST_BYTES = 256 * 1024


def is_job_name(path: Path) -> bool:
    """Whether a file of this name is a job."""
    return path.suffix.lower() in _SUFFIXES


def save_job(request: CompileRequest, path: Path) -> None:
    """Writes every option of ``request``, with the defaults where it states none, into the new file ``path``. Raises
    InputError for another suffix, OutputError for a file that exists."""
    if not is_job_name(path):
        raise InputError(f"{path}: expected a file name that ends in {' or '.join(_SUFFIXES)}")
    data = {name: _plain(getattr(request, name)) for name in JOB_OPTIONS}
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    write_whole(path, lambda stream: stream.write(text.encode()), "the job", new=True)


def load_job(path: Path) -> dict[str, Any]:
    """The options in the file ``path``, as ``CompileRequest`` takes them; those that it leaves out have their defaults.
    Raises InputError for an option that there is not, and for a value of another kind."""
    data = parse_yaml(read_file(path, _MOST_BYTES, InputError), path, InputError)
    if not isinstance(data, dict) or data.get("model") is None:
        raise InputError(
            f"{path}: expected a compile's options by name, the folder of its model among them: `model: FOLDER`"
        )
    for key in data:
        if key not in JOB_OPTIONS:
            raise InputError(f"{path}: no option {key!r:.80}{nearest(str(key)[:80], JOB_OPTIONS)}")
    stated = options_of(CompileRequest)
    job = {name: value for name, value in data.items() if value is not None or stated[name].default is None}
    try:
        if job.get("budgets") is not None:
            job["budgets"] = structure(dict[str, BudgetSpec], job["budgets"], "budgets", InputError)
            for name, budget in job["budgets"].items():
                check_budget(budget, f"budgets.{name}")
        CompileRequest(**job)
    except NestforgeError as failure:
        raise InputError(f"{path}: {failure}") from failure
    return job


def _plain(value: object) -> Any:
    if isinstance(value, Bucket | Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    return unstructure(value)
