"""One run: producers at each durability level, faults one by one, drain, the verdict. Read `Run.run` first."""

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sluice.protocol.clock import wall_ms
from tests.chaos.network.faults import Fault
from tests.chaos.network.observing import Observer, longest_pause_s
from tests.chaos.network.report import LEVELS, Report, Row
from tests.chaos.network.site import WORKER, Site, site
from tests.chaos.network.verdict import GATEWAY, journal_of, judge, notes_of
from tests.chaos.soak.run import is_empty, num_unrecorded, write_undisturbed
from tests.integration.jobs import wait_until

CATALOGUE_SIZE, MAX_TOKENS = 200, 60
JOBS_PER_S = 12.0
"""Of each producer: more than the workers can do, so that jobs wait."""

QUIET_S = 1.0
"""Between a fault and the next, once all is well."""

LOOK_S = 0.5
DRAIN_S = 300.0


class Run:
    """A site under load. Mutable."""

    def __init__(
        self, name: str, seed: int, faults: Sequence[Fault], folder: Path, say: Callable[[str], object]
    ) -> None:
        self._seed = seed
        self._folder = folder
        self._faults = faults
        self._say = say
        self._catalogue = f"{seed}:{CATALOGUE_SIZE}:{MAX_TOKENS}"
        self._report = Report(name, seed, [])

    def run(self) -> Report:
        """Run the faults one by one under load, then drain, and read what the queue kept."""
        with site(self._folder) as place:
            write_undisturbed(place.folder, self._catalogue, {**WORKER, "RECORDER": "false"})
            self._start_producers(place)
            self._wait_for_load()
            observer = Observer(place.redis)
            time.sleep(QUIET_S)
            for fault in self._faults:
                self._try(place, observer, fault)
            observer.stop()
            _drain(place)
            judge(place, self._report)
        return self._report

    # ------------------------------------------------------------ the load

    def _start_producers(self, place: Site) -> None:
        common = ("--catalogue", self._catalogue, "--jobs-per-s", str(JOBS_PER_S))
        for number, level in enumerate(LEVELS):
            command = (
                "tests.chaos.soak.producing", "--redis-url", place.redis_url, "--name", f"p{number}", *common,
                "--seed", str(self._seed * 10 + number), "--journal", str(journal_of(place.folder, level)),
                "--durability", level,
            )  # fmt: skip
            place.producers.append(place.run_module("producer", command))
        command = (
            "tests.chaos.network.posting", "--url", place.gateway_url, "--api-key", place.api_key, *common,
            "--seed", str(self._seed), "--journal", str(journal_of(place.folder, GATEWAY)),
            "--reference", str(place.folder / "reference.json"), "--notes", str(notes_of(place.folder)),
        )  # fmt: skip
        place.producers.append(place.run_module("producer", command))

    def _wait_for_load(self) -> None:
        journals = [journal_of(self._folder, name) for name in (*LEVELS, GATEWAY)]
        deadline_s = time.monotonic() + DRAIN_S
        while not all(one.exists() and '"acknowledged"' in one.read_text() for one in journals):
            assert time.monotonic() < deadline_s, "a producer does not begin"
            time.sleep(LOOK_S)

    # ------------------------------------------------------------ the faults

    def _try(self, place: Site, observer: Observer, fault: Fault) -> None:
        row = Row(fault.kind, fault.what, fault.seconds)
        num_dropped = place.network.num_dropped
        row.began_s, row.began_ms = time.monotonic(), wall_ms()
        with fault.inject(place):
            time.sleep(fault.seconds)
        row.num_dropped = place.network.num_dropped - num_dropped
        row.well_s = place.wait_until_well()
        time.sleep(QUIET_S)
        row.ended_s = time.monotonic()
        row.failover_s = observer.promoted_after_s(place.primary_name, row.began_s, row.ended_s)
        row.pause_s = longest_pause_s(observer.ends_s(place.primary_name), row.began_s, row.ended_s)
        self._report.rows.append(row)
        failover = "none" if row.failover_s is None else f"after {row.failover_s:.1f} s"
        self._say(
            f"{row.what}, {row.seconds:g} s: {row.num_dropped} packets dropped, failover {failover}, "
            f"no job ended for {row.pause_s:.1f} s, well after {row.well_s:.1f} s"
        )
        assert all(one.poll() is None for one in place.producers), "a producer has ended"
        assert all(one.process.poll() is None for one in place.workers.values()), "a worker has ended"


def _drain(place: Site) -> None:
    """Wait until every job has ended and is recorded; stop the producers and workers."""
    for producer in place.producers:
        producer.terminate()
    for producer in place.producers:
        assert producer.wait(DRAIN_S) == 0, "a producer failed"
    place.clocks.catch_up()
    place.wait_until_well()
    with place.primary_client() as client:
        wait_until(lambda: is_empty(client), "every job has ended", patience_s=DRAIN_S)
        wait_until(lambda: not num_unrecorded(client), "all is recorded", patience_s=DRAIN_S)
    for worker in place.workers.values():
        worker.signal(signal.SIGTERM)
    for worker in place.workers.values():
        worker.wait()
