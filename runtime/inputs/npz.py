"""Arrays by name from an NPZ file of any origin: nothing in it is executed."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from ...errors import InputError
from ...outside_file import open_file
from .arrays import Array


def read_npz(path: Path, max_bytes: int) -> dict[str, Array]:
    """The arrays of an NPZ file, of up to ``max_bytes`` unpacked. Raises InputError for anything else."""
    with open_file(path, InputError) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
            if unpacked <= max_bytes:
                file.seek(0)
                with np.load(file, allow_pickle=False) as members:
                    arrays = dict(members)
                if all(isinstance(array, np.ndarray) for array in arrays.values()):
                    return arrays
        except Exception as failure:  # zipfile, decompressors and numpy's header parser have errors of their own
            raise _refusal(path) from failure
    if unpacked > max_bytes:
        raise InputError(f"{path}: unpacks to {unpacked} bytes, more than the {max_bytes} allowed; send fewer rows")
    raise _refusal(path)  # other files among the arrays, which numpy hands out as bytes


def _refusal(path: Path) -> InputError:
    return InputError(f"{path}: expected an NPZ file of plain arrays, as numpy.savez writes it")
