import os
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import psutil
import pytest
from nestforge.bucket import Bucket
from nestforge.errors import MeasurementError, ProfileError
from nestforge.profiles import host_load, measure_rates, probe_host
from nestforge.profiles.device_profile import ProductRates, Rates
from nestforge.profiles.load_profile import load_profile
from nestforge.profiles.probe_host import HostFacts, cache_folder, host_profile, is_this_host, measured_profile
from nestforge.profiles.probe_host import probe_host as probe

RATES = Rates(100.0, 50.0, 20.0, 10.0, 0.5, "measured on paper")


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A cache of its own; the list grows by the number of threads at every measurement."""
    calls: list[int] = []

    def measure(cores: int) -> Rates:
        calls.append(cores)
        return RATES

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measure_rates, "measure_host_rates", measure)
    return calls


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, str]], None]:
    """Lays out control groups: this process's membership line and files below the mount."""

    def lay_out(membership: str, files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "fs" / name).write_text(text)
        (tmp_path / "membership").write_text(membership)
        monkeypatch.setattr(host_load, "_CGROUP_ROOT", tmp_path / "fs")
        monkeypatch.setattr(host_load, "_CGROUP_MEMBERSHIP", tmp_path / "membership")

    return lay_out


def test_facts_of_this_host(cgroup: Callable[[str, dict[str, str]], None]) -> None:
    cgroup("0::/\n", {})
    facts = probe()
    assert facts.cpu
    assert 1 <= facts.cores <= (os.cpu_count() or 1)
    assert facts.memory_mb == psutil.virtual_memory().total / 1e6
    assert "onnxruntime" in facts.backends


def test_version_2_limits_of_a_parent_group_count(cgroup: Callable[[str, dict[str, str]], None]) -> None:
    files = {
        "a/memory.max": "3000000000\n",
        "a/b/memory.max": "max\n",
        "a/cpu.max": "100000 100000\n",
        "cpu.max": "max",
    }
    cgroup("0::/a/b\n", files)
    assert (probe().memory_mb, probe().cores) == (3000.0, 1)


def test_version_1_limits(cgroup: Callable[[str, dict[str, str]], None]) -> None:
    files = {
        "memory/a/memory.limit_in_bytes": "2000000000\n",
        "cpu/a/cpu.cfs_quota_us": "50000\n",
        "cpu/a/cpu.cfs_period_us": "100000\n",
    }
    cgroup("4:memory:/a\n1:cpu,cpuacct:/a\n0::/\n", files)
    assert (probe().memory_mb, probe().cores) == (2000.0, 1)


def test_unlimited_groups_change_nothing(cgroup: Callable[[str, dict[str, str]], None]) -> None:
    cgroup("0::/\n", {})
    free = probe()
    files = {
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
        "memory.max": "max",
    }
    cgroup("4:memory:/\n1:cpu:/\n0::/\n", files)
    assert probe() == free


def test_rates_are_measured_once(measured: list[int]) -> None:
    first = host_profile()
    assert host_profile() == first == load_profile("host-cpu")
    assert measured == [probe().cores]
    assert host_profile(refresh=True) == first
    assert len(measured) == 2


@pytest.mark.parametrize("damage", ["", "{}", "[1]", '{"gemm_gflops": "fast"}', "\xff"])
def test_damaged_cache_is_measured_again(measured: list[int], damage: str) -> None:
    host_profile()
    (entry,) = cache_folder().iterdir()
    entry.write_text(damage, encoding="latin-1")
    assert host_profile().rates == RATES
    assert len(measured) == 2
    assert host_profile().rates == RATES
    assert len(measured) == 2


def test_cache_is_private(measured: list[int], tmp_path: Path) -> None:
    (tmp_path / "cache" / "nestforge").mkdir(parents=True, mode=0o755)
    host_profile()
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700


def test_cache_that_cannot_be_written_costs_only_time(
    measured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert host_profile().rates == host_profile().rates == RATES
    assert len(measured) == 2


def test_host_profile_is_what_the_probe_found(measured: list[int]) -> None:
    profile, facts = host_profile(), probe()
    assert (profile.name, profile.backend, profile.cores) == ("host-cpu", "onnxruntime", facts.cores)
    assert profile.memory_mb == round(facts.memory_mb / 2)
    assert [str(bucket) for bucket in profile.buckets] == ["1x1..512"]
    assert profile.budget_shape == Bucket(1, 128)
    assert list(profile.budgets) == ["full", "balanced", "fast", "tiny"]


def test_only_a_profile_probed_here_is_of_this_host(measured: list[int]) -> None:
    assert is_this_host(host_profile())
    assert not is_this_host(load_profile("laptop-x86"))


@pytest.mark.parametrize(
    ("fact", "other", "same"),
    [
        ("system", "Linux 99.0", True),
        ("memory_mb", 1234.5, True),
        ("cpu", "another", False),
        ("architecture", "riscv64", False),
        ("cores", 999, False),
        ("backends", {"onnxruntime": "99.0"}, False),
    ],
)
def test_what_makes_another_host_and_what_only_new_rates(
    measured: list[int], monkeypatch: pytest.MonkeyPatch, fact: str, other: object, same: bool
) -> None:
    profile = host_profile()
    changed = HostFacts(**{**vars(probe()), fact: other})  # one fact of several types
    monkeypatch.setattr(probe_host, "probe_host", lambda: changed)
    assert is_this_host(profile) is same
    assert is_this_host(host_profile())
    assert len(measured) == 2


def test_a_device_without_the_onnx_package_is_the_same_host(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = host_profile()
    monkeypatch.setattr(probe_host.util, "find_spec", lambda name: None)
    assert is_this_host(profile)
    host_profile()
    assert len(measured) == 2  # by numpy, so other figures


def test_without_onnxruntime_there_is_no_host_profile(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    bare = HostFacts(**{**vars(probe()), "backends": {}})
    monkeypatch.setattr(probe_host, "probe_host", lambda: bare)
    with pytest.raises(ProfileError, match=r"onnxruntime is not installed; install nestforge\[cpu\]"):
        host_profile()
    assert measured == []


def test_profiles_import_no_backend_and_no_compiler() -> None:
    heavy = "torch transformers onnx onnxruntime nestforge.compiler nestforge.exporters nestforge.runtime"
    code = (
        "import sys, nestforge.profiles.load_profile, nestforge.profiles.measure_rates as _;"
        "from nestforge.profiles.probe_host import probe_host; probe_host();"
        f"print([name for name in {heavy.split()} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_rates_of_integer_products_are_kept(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with_integers = replace(RATES, at={"int8": ProductRates(300.0, 50.0), "int4": ProductRates(150.0, 50.0)})
    monkeypatch.setattr(measure_rates, "measure_host_rates", lambda cores: with_integers)
    assert host_profile().rates == with_integers
    monkeypatch.setattr(measure_rates, "measure_host_rates", lambda cores: RATES)
    assert host_profile().rates == with_integers


def test_rates_that_were_measured_in_another_way_are_measured_again(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = probe_host._MEASUREMENT_VERSION
    monkeypatch.setattr(probe_host, "_MEASUREMENT_VERSION", now - 1)
    host_profile()
    monkeypatch.setattr(probe_host, "_MEASUREMENT_VERSION", now)
    host_profile()
    host_profile()
    assert len(measured) == 2


def test_rates_of_other_benchmarks_have_another_version() -> None:
    """Raise the version with what is measured, else hosts keep the rates of the benchmarks before."""
    every = measure_rates.CHAINS | measure_rates.CHAINS_BY_PRECISION
    chains = {name: replace(chain, repeat=1) for name, chain in every.items()}
    graphs = {name: onnx.load_from_string(measure_rates._onnx_bytes(chain)).graph for name, chain in chains.items()}
    of_rows = "Abs ReduceMax Div QuantizeLinear QGemm Mul"
    assert (probe_host._MEASUREMENT_VERSION, {n: " ".join(o.op_type for o in g.node) for n, g in graphs.items()}) == (
        4,
        {
            "gemm": "Gemm Gemm",
            "batched_gemm": "MatMul MatMul",
            "elementwise": "Add Gelu LayerNormalization",
            "tiny": "Add",
            "int8": "QuantizeLinear QGemm QuantizeLinear QGemm",
            "int8-dynamic": f"{of_rows} {of_rows}",
            "int4": f"MatMulNBits {of_rows}",
            "int4-g128": f"MatMulNBits {of_rows}",
        },
    )


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """How much of the CPUs other programs use: at a look, and then while rates are measured."""
    shares: list[float | None] = [0.0, 0.0]

    class Load:
        def share(self) -> float | None:
            return shares[1]

    monkeypatch.setattr(probe_host, "others_now", lambda _: shares[0])
    monkeypatch.setattr(probe_host, "OthersLoad", Load)
    return shares


def test_rates_of_a_busy_host_are_marked_and_measured_again(measured: list[int], busy: list[float | None]) -> None:
    busy[:] = [0.9, 0.9]
    assert host_profile().rates == replace(RATES, others_share=0.9)
    assert host_profile().rates.others_share == 0.9
    assert len(measured) == 1, "as long as the host is busy they stand, so that two compiles see the same"
    busy[:] = [0.1, 0.1]
    assert host_profile().rates == RATES
    assert host_profile().rates == RATES
    assert len(measured) == 2


def test_a_profile_of_a_busy_host_is_refused_unless_forced(measured: list[int], busy: list[float | None]) -> None:
    good = measured_profile()
    for shares in ([0.6, 0.0], [0.0, 0.6]):
        busy[:] = shares
        with pytest.raises(MeasurementError, match=r"other programs use 60% of the CPUs, expected at most 20%"):
            measured_profile()
    busy[:] = [0.6, 0.6]
    assert measured_profile(force=True).rates.others_share == 0.6
    assert host_profile() == good, "good rates in the cache are not given up for noisy ones"
    busy[:] = [None, None]
    assert measured_profile() == good, "where nothing is known of others"
