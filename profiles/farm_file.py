"""A farm as a YAML file: compiles times device profiles, and the folder of their bundles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ..errors import InputError
from ..outside_file import read_file
from ..strict import structure
from .backends import BACKENDS
from .compile_request import CompileRequest
from .job_file import load_job
from .load_profile import load_profile, requested_profile
from .strict_yaml import parse_yaml

_MOST_BYTES = 256 * 1024


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
    data = parse_yaml(read_file(path, _MOST_BYTES, InputError), path, InputError)
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
