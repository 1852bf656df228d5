"""The worker's side: reads seeds, tries each under a limit on memory, and writes results, one JSON line each."""

import faulthandler
import importlib
import json
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

from nestforge.bundle.open_bundle import open_bundle

from .outcomes import Result

GOLDEN = Path(__file__).parents[1] / "golden"

# Above what the process has when an input begins. Addresses are taken by threads and arenas that use little of them.
MEMORY_MB = 1024
ADDRESSES_MB = 6144

_channel: IO[str] | None = None


def begin(what: str, how: str, seconds: float | None = None) -> None:
    """Called by a driver before it uses an input: if the process dies, this says of what. ``seconds`` is how long it
    may take from now on, where that is more than for other inputs."""
    if _channel is not None:
        print(json.dumps({"what": what, "how": how, "seconds": seconds}), file=_channel, flush=True)


def golden_bundles() -> list[Path]:
    """The golden bundles that this host can run: those whose engines are not for TensorRT."""
    found = sorted(path for path in GOLDEN.glob("bundle-*") if path.is_dir())
    return [path for path in found if open_bundle(path).manifest.engines[0].backend == "onnxruntime"]


def serve(driver: str, folder: Path) -> None:
    """Tries the seeds that stdin gives; stdout is the channel, so whatever else is printed goes to stderr."""
    global _channel
    faulthandler.enable()
    _channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    attempt: Callable[[int], Result] = importlib.import_module(f"hostile.{driver}").open_driver(folder)
    print(json.dumps({"ready": True}), file=_channel, flush=True)  # from here on the time of an input counts
    for line in sys.stdin:
        seed = int(line)
        before = _megabytes("VmRSS")
        _limit_addresses()
        _forget_peak()
        result = attempt(seed)
        grown = _megabytes("VmHWM") - before
        if grown > MEMORY_MB and not result.is_bad:
            result = replace(result, outcome="memory", message=f"{grown:.0f} MB; {result.outcome}: {result.message}")
        print(json.dumps(asdict(result)), file=_channel, flush=True)


def _limit_addresses() -> None:
    """Memory that would be allocated but never touched shows as an error of allocation."""
    ceiling = int((_megabytes("VmSize") + ADDRESSES_MB) * 2**20)
    resource.setrlimit(resource.RLIMIT_AS, (ceiling, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _megabytes(field: str) -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(f"{field}:"))


if __name__ == "__main__":
    # The module that drivers import, not a second one under the name of __main__.
    from hostile import worker

    worker.serve(sys.argv[1], Path(sys.argv[2]))
