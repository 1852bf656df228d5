"""What TensorRT measured in earlier builds on this GPU, kept so that later ones need not measure it again.

One file for each GPU model, compute capability and release of TensorRT, in a folder of this user alone: it holds
compiled kernels, which TensorRT runs. It may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tensorrt as trt

from ...bundle.device_files.plan_index import Gpu
from ...bundle.private_files import private_folder
from ...file_lock import alone
from ...whole_file import write_whole


def timing_cache_file(gpu: Gpu) -> Path:
    """Where the timings of ``gpu`` are kept. Raises OutputError if others may change that folder."""
    words = re.findall(r"[A-Za-z0-9.]+", f"{gpu.name} {gpu.compute_capability} {gpu.tensorrt}")
    return private_folder("tensorrt") / f"{'-'.join(words)}.timing"


@contextmanager
def timing_cache(config: trt.IBuilderConfig, path: Path) -> Iterator[None]:
    """Lets the build of ``config`` use the timings in ``path``, and adds what it measures to them.

    Another process may build meanwhile: what it added is kept too. Raises OutputError if the file cannot be written.
    """
    cache = config.create_timing_cache(_kept(path))
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        cache = config.create_timing_cache(b"")  # a damaged file costs its timings, no more
        config.set_timing_cache(cache, ignore_mismatch=False)
    yield
    lock = path.with_suffix(".lock")
    lock.touch()
    with alone(lock):
        others = config.create_timing_cache(_kept(path))
        if others is not None:
            cache.combine(others, ignore_mismatch=False)  # says no to a damaged file, and changes nothing
        timings = bytes(memoryview(cache.serialize()))
        write_whole(path, lambda stream: stream.write(timings), "the timing cache", mode=0o600)


def _kept(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""
