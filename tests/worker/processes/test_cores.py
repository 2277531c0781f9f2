"""Cores shared among processes: each core to one, neighbours together, and as before for who shares them."""

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sluice.worker.processes.cores import on_cores, own_cores, share_cores


class TestGivenCores:
    @given(cores=st.lists(st.integers(0, 500), min_size=1, unique=True), count=st.integers(1, 40))
    def test_when_they_are_shared_then_each_process_has_equally_many_of_its_own(
        self, cores: list[int], count: int
    ) -> None:
        shares = share_cores(cores, count)

        assert len(shares) == count
        if count > len(cores):
            assert set(shares) == {frozenset(cores)}
        else:
            assert sorted(core for share in shares for core in share) == sorted(cores)
            assert max(map(len, shares)) - min(map(len, shares)) <= 1

    def test_when_hyperthreads_are_numbered_far_apart_then_they_go_to_one_process(self, tmp_path: Path) -> None:
        own = sorted(os.sched_getaffinity(0))
        for place, core in enumerate(own):
            folder = tmp_path / f"cpu{core}" / "topology"
            folder.mkdir(parents=True)
            (folder / "physical_package_id").write_text("0\n")
            # The first and the last are threads of one core, and so on inwards.
            (folder / "core_id").write_text(f"{min(place, len(own) - 1 - place)}\n")

        cores = own_cores(tmp_path)

        assert sorted(cores) == own
        assert cores[:2] == sorted({own[0], own[-1]})[:2]

    def test_when_a_thread_is_put_on_one_then_it_has_all_of_them_again_afterwards(self) -> None:
        before = os.sched_getaffinity(0)

        with on_cores(frozenset([max(before)])):
            inside = os.sched_getaffinity(0)

        assert (inside, os.sched_getaffinity(0)) == ({max(before)}, before)
