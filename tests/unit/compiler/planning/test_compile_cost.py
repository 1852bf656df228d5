import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.compiler.job import plan_here, resolve
from nestforge.compiler.planning import compile_cost
from nestforge.compiler.planning.compile_cost import CompileCost, require_room, written_bytes
from nestforge.errors import BuildError
from nestforge.profiles import host_load
from nestforge.profiles.compile_request import CompileRequest
from nestforge.profiles.precision import Precision
from safetensors.torch import load_file, save_file
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
    assert plan_here(job).notes[-1].startswith(f"a compile is refused here: {output}: the weights alone take")
    begun = tmp_path / "made.bundle.partial" / "begun"
    begun.parent.mkdir()
    begun.write_bytes(b"x")
    job.validate()  # what an interrupted compile has written is written over
    os.link(begun, begun.with_name("linked"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=written - 2))
    with pytest.raises(BuildError, match=r"made\.bundle: the weights alone take"):
        job.validate()  # once, under whatever names


def test_a_compile_that_memory_cannot_hold_is_refused_before_the_work(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the least of the estimate is more than a container allows; its greater part is mapped files, or time."""
    job = resolve(CompileRequest(tiny_folder, board(), output=tmp_path / "made.bundle", buckets=[Bucket(1, 8)]))
    (tmp_path / "membership").write_text("0::/\n")
    monkeypatch.setattr(host_load, "_CGROUP_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(host_load, "_CGROUP_ROOT", tmp_path)
    (tmp_path / "memory.max").write_text(str(int(0.56e6 * job.cost.memory_mb)))
    job.validate()
    (tmp_path / "memory.max").write_text(str(int(0.54e6 * job.cost.memory_mb)))
    with pytest.raises(
        BuildError, match=r"made\.bundle: a compile of it holds about \d+ MB in memory, at least \d+, and"
    ):
        job.validate()
    assert plan_here(job).notes[-1].startswith(f"a compile is refused here: {job.output}: a compile of it holds about")
    assert not list(tmp_path.glob("made*"))


def test_a_compile_costs_what_is_in_memory_at_once(tiny_folder: Path, tmp_path: Path) -> None:
    """Weights once as a packed engine has them, beside outputs and the programs; further submodels cost time alone."""

    def cost(**options: Any) -> CompileCost:
        profile = replace(board(), precisions=options.pop("precisions", ("fp32",)), budgets={})
        return resolve(CompileRequest(tiny_folder, profile, output=tmp_path / "b", **options)).cost

    one, several = (cost(buckets=[Bucket(1, 8)], levels={"ffn": levels}) for levels in ([1], [0.5, 1]))
    assert (one.memory_mb, one.disk_mb) == (several.memory_mb, several.disk_mb)
    assert one.cpu_seconds < several.cpu_seconds
    assert cost(buckets=[Bucket(1, 40)]).memory_mb > one.memory_mb
    assert cost(buckets=[Bucket(1, 8)], precisions=("int8-dynamic",)).memory_mb < one.memory_mb


def test_a_checkpoint_in_16_bits_is_in_memory_in_float32_until_it_is_stored(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large model, whose engines are asked without a copy of their weights."""
    narrow = shutil.copytree(tiny_folder, tmp_path / "narrow")
    (weights,) = narrow.glob("*.safetensors")
    tensors = load_file(weights)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, weights)
    monkeypatch.setattr("nestforge.exporters.source.LARGE", 0)
    wide, bf16 = (
        resolve(CompileRequest(folder, board(), output=tmp_path / "b", buckets=[Bucket(1, 1)])).cost
        for folder in (tiny_folder, narrow)
    )
    assert wide.disk_mb == bf16.disk_mb
    held = 4e-6 * sum(tensor.numel() for tensor in tensors.values())
    assert wide.memory_mb < 700 + held
    assert bf16.memory_mb == pytest.approx(700 + held, abs=1e-6)
    assert (wide.widened_mb, bf16.widened_mb) == (0, pytest.approx(held))
    large = replace(bf16, memory_mb=1e8, widened_mb=0.9e8)
    monkeypatch.setattr(compile_cost, "free_memory_bytes", lambda: 0.8e14)
    with pytest.raises(BuildError, match=r"holds about 100,000,000 MB in memory, at least 90,000,000, and"):
        require_room(large, tmp_path / "b")  # they are no estimate


def test_a_large_model_packs_nothing_its_widths_cost_little_and_its_integers_more(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost(precision: Precision, *levels: float) -> CompileCost:
        profile = replace(board(), precisions=(precision,), budgets={})
        options = {"buckets": [Bucket(1, 40, None, 1)], "levels": {"ffn": levels}}
        return resolve(CompileRequest(tiny_folder, profile, output=tmp_path / "b", **options)).cost

    small = cost("fp32", 1)
    monkeypatch.setattr("nestforge.exporters.source.LARGE", 0)
    one, two, integers = cost("fp32", 1), cost("fp32", 0.5, 1), cost("int8-dynamic", 1)
    assert (one.memory_mb, one.disk_mb) == (two.memory_mb, two.disk_mb)
    assert one.memory_mb < small.memory_mb
    assert one.cpu_seconds < two.cpu_seconds
    assert integers.cpu_seconds > one.cpu_seconds
    assert integers.memory_mb > one.memory_mb


def test_what_several_precisions_share_is_counted_once(tiny_folder: Path, tmp_path: Path) -> None:
    def written(*precisions: Precision) -> int:
        profile = replace(board(), precisions=precisions)
        job = resolve(CompileRequest(tiny_folder, profile, output=tmp_path / "b", buckets=[Bucket(1, 8)]))
        whole = job.source.spec.universal()
        return written_bytes(job.source, job.profile, [replace(whole, precision=one) for one in precisions])

    assert written("fp32", "int8", "int8-dynamic") == max(written("fp32", "int8"), written("fp32", "int8-dynamic"))


def test_examples_cost_time_of_their_own(tiny_folder: Path, tmp_path: Path) -> None:
    """They rank, calibrate and are measured on; of narrower widths they are measured on too."""

    def seconds(text: Path | None, precision: Precision, *levels: float) -> float:
        profile = replace(board(), precisions=(precision,), budgets={})
        buckets = [Bucket(1, 8)]
        request = CompileRequest(
            tiny_folder, profile, output=tmp_path / "b", buckets=buckets, levels={"ffn": levels}, text=text
        )
        return resolve(request).cost.cpu_seconds

    def more(precision: Precision, *levels: float) -> float:
        return seconds(text, precision, *levels) - seconds(None, precision, *levels)

    text = tmp_path / "text"
    text.write_text("\n".join(f"text number {number} of many" for number in range(300)))
    assert 0 < more("fp32", 1) < more("fp32", 0.5, 1)
    assert more("fp32", 1) < more("int8", 1) < more("int4-g128", 1)
