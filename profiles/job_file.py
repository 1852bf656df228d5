"""Compiles as YAML files: the options of one request by their names (docs/python-api.md), and nothing else; and a farm,
compiles times device profiles, and the folder of their bundles."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ..argument_types import options_of
from ..bucket import Bucket
from ..errors import InputError, NestforgeError
from ..outside_file import read_file
from ..strict import nearest, structure, unstructure
from ..whole_file import write_whole
from .backends import BACKENDS
from .budget import BudgetSpec, check_budget
from .compile_request import JOB_OPTIONS, CompileRequest
from .load_profile import load_profile, requested_profile
from .strict_yaml import MAX_YAML_BYTES, parse_yaml

_SUFFIXES = (".yaml", ".yml")


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
    data = parse_yaml(read_file(path, MAX_YAML_BYTES, InputError), path, InputError)
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


@dataclass(frozen=True)
class _Farm:
    """``jobs`` are files of `nestforge compile --save`, each compiled for every one of ``profiles``: names of built-in
    ones or files; without any for the job's own. ``output`` is the folder of the bundles."""

    jobs: tuple[str, ...]
    output: str
    profiles: tuple[str, ...] = ()


def load_farm(path: Path) -> dict[str, CompileRequest]:
    """The compiles that the file ``path`` states, by the names of their bundles: ``JOB-PROFILE``. Paths are of the
    working directory, as in a job. Plans for TensorRT are left to the devices (``emit_only``).

    Raises InputError for a file that is missing or states anything else, and for two compiles of one name; ProfileError
    for a profile that there is not.
    """
    data = parse_yaml(read_file(path, MAX_YAML_BYTES, InputError), path, InputError)
    farm = structure(_Farm, data, str(path), InputError)
    if not farm.jobs:
        raise InputError(f"{path}: jobs: expected at least one file of `nestforge compile --save`")
    device = cache(load_profile)
    found: dict[str, CompileRequest] = {}
    stated: dict[str, str] = {}
    for job in farm.jobs:
        if not Path(job).is_file():
            raise InputError(f"{path}: jobs: {job}: no such file; expected one that `nestforge compile --save` writes")
        saved = load_job(Path(job))
        for profile in farm.profiles or ("",):
            name = "-".join(Path(part).stem for part in (job, profile) if part)
            output, here = Path(farm.output, f"{name}.bundle"), f"{job} for {profile or 'its own profile'}"
            if name in found:
                raise InputError(
                    f"{path}: {output} would be written twice, by {stated[name]} and {here}; rename a file"
                )
            saved |= {"profile": device(profile or saved.get("profile", CompileRequest.profile)), "output": output}
            request = CompileRequest(**saved)
            emits = not BACKENDS[requested_profile(request).backend].runs_graphs
            found[name], stated[name] = replace(request, emit_only=emits), here
    return found
