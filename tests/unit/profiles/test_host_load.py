"""The share of the CPUs that others use, from counters that a test moves by hand."""

import os
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from nestforge.profiles import host_load
from nestforge.profiles.host_load import OthersLoad, others_now


class Times(SimpleNamespace):
    """Seconds of one CPU, as psutil gives them: a tuple with names."""

    def __iter__(self) -> Any:
        return iter(vars(self).values())


class Host:
    """Two CPUs; this process may use both."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.own = 0.0
        self.cpus = [
            Times(user=100.0, system=10.0, idle=50.0, iowait=5.0, steal=1.0, guest=20.0, guest_nice=0.0) for _ in "12"
        ]
        monkeypatch.setattr(host_load, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(host_load, "process_time", lambda: self.own)
        monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [Times(**vars(cpu)) for cpu in self.cpus])
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)

    def passes(self, seconds: float, own: float = 0.0, others: float = 0.0, **more: float) -> None:
        """``own`` and ``others`` are CPU seconds, as user time of the first CPU; ``more`` of the second."""
        self.wall, self.own = self.wall + seconds, self.own + own
        self.cpus[0].user += own + others
        self.cpus[0].idle += seconds - own - others
        for name, value in more.items():
            setattr(self.cpus[1], name, getattr(self.cpus[1], name) + value)
        self.cpus[1].idle += seconds - sum(more.values())


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def test_what_this_process_uses_is_its_own(host: Host) -> None:
    load = OthersLoad()
    host.passes(2.0, own=1.5)
    assert load.share() == 0.0
    host.passes(2.0, own=1.0, others=1.0)
    assert load.share() == pytest.approx(1.0 / 8)


@pytest.mark.parametrize(("kind", "share"), [("steal", 0.5), ("iowait", 0.0), ("system", 0.5)])
def test_stolen_time_is_used_and_waiting_is_not(host: Host, kind: str, share: float) -> None:
    load = OthersLoad()
    host.passes(1.0, **{kind: 1.0})
    assert load.share() == pytest.approx(share)


def test_time_of_guests_is_not_counted_twice(host: Host) -> None:
    load = OthersLoad()
    host.passes(1.0, user=0.5, guest=0.5)
    host.cpus[1].idle += 0.5  # guest seconds are among the user's
    assert load.share() == pytest.approx(0.25)


def test_other_cpus_do_not_count(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    load = OthersLoad()
    host.passes(1.0, user=1.0)
    assert load.share() == 0.0


def test_too_short_or_without_counters_nothing_is_said(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    load = OthersLoad()
    host.passes(0.1, others=0.1)
    assert load.share() is None

    def hidden(percpu: bool) -> Any:
        raise FileNotFoundError("/proc/stat")

    monkeypatch.setattr(psutil, "cpu_times", hidden)
    host.passes(1.0)
    assert load.share() is None
    assert OthersLoad().share() is None


def test_a_look_takes_the_time_that_it_is_given(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_load, "sleep", lambda seconds: host.passes(seconds, others=0.6 * seconds))
    assert others_now(1.0) == pytest.approx(0.3)


def test_this_hosts_own_counters_can_be_read() -> None:
    share = others_now(0.3)
    assert share is None or 0.0 <= share <= 1.0


def test_under_a_quota_the_cpus_of_others_say_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    load = OthersLoad()
    host.wall += 1.0
    for cpu in host.cpus:
        cpu.user += 1.0
    for quotas, share in (([], 1.0), ([2.0], 1.0), ([4.0, 1.5], None)):
        monkeypatch.setattr(host_load, "cgroup_cpu_quotas", lambda quotas=quotas: iter(quotas))
        assert load.share() == share
