from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from nestforge.bucket import Bucket
from nestforge.compiler.job import resolve
from nestforge.compiler.planning.disk import written_bytes
from nestforge.errors import BuildError
from nestforge.profiles.compile_request import CompileRequest
from nestforge.profiles.precision import Precision
from support.tiny_compile import board


def test_weights_that_do_not_fit_the_disk_are_refused_before_the_work(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "made.bundle"
    job = resolve(CompileRequest(tiny_folder, board(), output=output, buckets=[Bucket(1, 8)]))
    written = written_bytes(job.source, job.profile, [job.source.spec.universal()])
    assert written == 4 * job.source.parameters(job.source.spec.universal())
    job.validate()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=written - 1))
    with pytest.raises(BuildError, match=r"made\.bundle: the weights alone take .* MB, and .* MB of its disk are free"):
        job.validate()
    (tmp_path / "made.bundle.partial").mkdir()
    (tmp_path / "made.bundle.partial" / "begun").write_bytes(b"x")
    job.validate()  # what an interrupted compile has written is written over


def test_what_several_precisions_share_is_counted_once(tiny_folder: Path, tmp_path: Path) -> None:
    def written(*precisions: Precision) -> int:
        profile = replace(board(), precisions=precisions)
        job = resolve(CompileRequest(tiny_folder, profile, output=tmp_path / "b", buckets=[Bucket(1, 8)]))
        whole = job.source.spec.universal()
        return written_bytes(job.source, job.profile, [replace(whole, precision=one) for one in precisions])

    assert written("fp32", "int8", "int8-dynamic") == max(written("fp32", "int8"), written("fp32", "int8-dynamic"))
