"""Cores that a process may keep busy: those of its affinity, within the quotas of its cgroups."""

import os
from pathlib import Path

import pytest
import torch

from sluice.engine.execution import threads
from sluice.engine.execution.cgroups import num_usable_cores
from sluice.engine.execution.threads import default_num_threads

GROUP, ROOT = "sys/fs/cgroup/pod/worker", "sys/fs/cgroup"


@pytest.fixture
def _of_sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def affinity(_pid: int) -> set[int]:
        return set(range(16))

    monkeypatch.setattr(os, "sched_getaffinity", affinity)


@pytest.mark.usefixtures("_of_sixteen_cores")
class TestGivenSixteenCores:
    """Cgroups are files below a temporary root."""

    @pytest.mark.parametrize(
        ("cgroup", "files", "num_cores"),
        [
            ("0::/pod/worker", {}, 16),
            ("\nnot a cgroup\n", {}, 16),
            ("0::/pod/worker", {f"{GROUP}/cpu.max": "max 100000"}, 16),
            ("0::/pod/worker", {f"{GROUP}/cpu.max": "3200000 100000"}, 16),
            ("0::/pod/worker", {f"{GROUP}/cpu.max": "800000 100000"}, 8),
            ("0::/pod/worker", {f"{GROUP}/cpu.max": "250000 100000"}, 2),
            ("0::/pod/worker", {f"{GROUP}/cpu.max": "50000 100000"}, 1),
            ("0::/pod/worker", {f"{GROUP}/cpu.max": "nothing"}, 16),
            ("0::/pod/worker", {f"{GROUP}/cpu.max": "8 0"}, 16),
            (
                "0::/pod/worker/child",
                {f"{GROUP}/cpu.max": "max 100000", f"{ROOT}/pod/cpu.max": "400000 100000"},
                4,
            ),
            ("0::/docker/1", {f"{ROOT}/cpu.max": "600000 100000"}, 6),
            (
                "3:cpu,cpuacct:/docker/1\n1:memory:/docker/1\n0::/",
                {f"{ROOT}/cpu/cpu.cfs_quota_us": 300_000, f"{ROOT}/cpu/cpu.cfs_period_us": 100_000},
                3,
            ),
            (
                "3:cpu:/docker/1",
                {f"{ROOT}/cpu/cpu.cfs_quota_us": -1, f"{ROOT}/cpu/cpu.cfs_period_us": 100_000},
                16,
            ),
            ("3:cpuacct:/", {f"{ROOT}/cpu/cpu.cfs_quota_us": 1, f"{ROOT}/cpu/cpu.cfs_period_us": 1}, 16),
        ],
        ids=[
            "none",
            "no-line",
            "max",
            "large",
            "quota",
            "part-of-a-core",
            "less-than-one",
            "unreadable",
            "no-period",
            "parent",
            "in-a-container",
            "version-1",
            "version-1-without",
            "another-controller",
        ],
    )
    def test_when_cgroups_have_a_quota_then_no_more_cores_count(
        self,
        tmp_path: Path,
        cgroup: str,
        files: dict[str, int | str],
        num_cores: int,
    ) -> None:
        for name, content in ({"proc/self/cgroup": cgroup} | files).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{content}\n")

        assert num_usable_cores(tmp_path) == num_cores

    def test_when_no_cgroups_are_there_then_all_count(self, tmp_path: Path) -> None:
        assert num_usable_cores(tmp_path) == 16


class TestGivenMoreThreadsThanTheQuota:
    @pytest.mark.parametrize(("stated", "num_threads"), [(None, 8), ("32", 32)])
    def test_when_the_threads_of_a_step_are_chosen_then_the_quota_bounds_them_unless_some_are_stated(
        self, monkeypatch: pytest.MonkeyPatch, stated: str | None, num_threads: int
    ) -> None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if stated is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", stated)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 32)
        monkeypatch.setattr(threads, "num_usable_cores", lambda: 8)

        assert default_num_threads() == num_threads
