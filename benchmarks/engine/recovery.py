"""From the kill of an engine's process to the next token: on another worker, and after a restart.

Several jobs generate on two workers, each with its engine in a process of its own. One engine is killed with SIGKILL;
its jobs are timed until each has a token of its next attempt. A worker that ended is started again before the next
kill. Alone, the one worker is started again at once, as a supervisor does, and the time includes its whole start.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.engine.bare import VOCAB_SIZE
from benchmarks.processes import Server, server, wait_until, worker
from sluice.history.percentiles import percentile
from sluice.producer.client import Producer
from sluice.protocol.jobs import job
from sluice.protocol.keys import QueueKeys
from sluice.protocol.rows import read_row

KEYS = QueueKeys("default")
NUM_JOBS = 16
SPOKEN_TOKENS = 8
"""Of each job, before the kill."""


@dataclass(slots=True, eq=False)
class Watch:
    """When a job had the first token of a new attempt. Changes as it is looked at."""

    attempt: int
    num_before: int | None = None
    """Tokens when the new attempt was first seen."""

    took_s: float | None = None

    def look(self, attempt: int, num_tokens: int, since_s: float) -> None:
        """Take note of a job's state."""
        if attempt == self.attempt or self.took_s is not None:
            return
        if self.num_before is None:
            self.num_before = num_tokens
        elif num_tokens > self.num_before:
            self.took_s = time.perf_counter() - since_s


@dataclass(frozen=True, slots=True)
class Scene:
    """A queue with workers that may be killed."""

    here: Server
    producer: Producer
    model: Path
    flags: Sequence[str]
    started: ExitStack
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list["subprocess.Popen[bytes]"])

    def start(self) -> None:
        """Start a worker, and wait until it is there."""
        flags = ("--engine-process", "on", "--max-num-seqs", f"{NUM_JOBS}", "--speculation", "off", *self.flags)
        self.processes.append(self.started.enter_context(worker(self.here, *flags, model=str(self.model))))

    def kill_engine(self) -> list[float]:
        """Kill the engine that has most jobs; return the seconds to the next token of each of its jobs."""
        prompts = [[3 + (17 * number + at) % (VOCAB_SIZE - 3) for at in range(64)] for number in range(NUM_JOBS)]
        asked = [job(prompt, max_tokens=400, temperature=0, ignore_eos=True) for prompt in prompts]
        ids = [str(answer) for answer in self.producer.submit_many(asked)]
        wait_until(lambda: min(tokens for _, tokens in self._states(ids)) >= SPOKEN_TOKENS, "all to speak")
        owners = [view.owner for view in self.producer.views(ids) if view is not None]
        owner = max(set(owners) - {None}, key=owners.count)
        mine = [one for one, of in zip(ids, owners, strict=True) if of == owner]
        pid = int(self.here.client.hget(KEYS.key("worker", str(owner)), "pid"))
        [parent] = [one for one in self.processes if one.pid == psutil.Process(pid).ppid()]
        self.processes.remove(parent)
        watches = [Watch(attempt) for attempt, _ in self._states(mine)]
        began_s = time.perf_counter()
        os.kill(engine_of(pid), signal.SIGKILL)
        if not self.processes:
            self._replace(parent)
        self._look_until_all_spoke(mine, watches, began_s)
        list(self.producer.cancel_many(ids))
        if parent.returncode is None:
            self._replace(parent)
        return [watch.took_s for watch in watches if watch.took_s is not None]

    def _look_until_all_spoke(self, ids: Sequence[str], watches: Sequence[Watch], began_s: float) -> None:
        def all_spoke() -> bool:
            for watch, (attempt, tokens) in zip(watches, self._states(ids), strict=True):
                watch.look(attempt, tokens, began_s)
            return all(watch.took_s is not None for watch in watches)

        wait_until(all_spoke, "all jobs to go on", every_s=0.002)

    def _states(self, ids: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Attempt and published tokens of jobs, in one round trip."""
        pipe: Any = self.here.client.pipeline(transaction=False)
        for one in ids:
            pipe.get(KEYS.job(one))
            pipe.xrevrange(KEYS.channel(one, 0), count=1)
        said = pipe.execute()
        for row, last in zip(said[::2], said[1::2], strict=True):
            yield read_row(row).attempt, int(last[0][0].split(b"-")[0]) if last else 0

    def _replace(self, ended: "subprocess.Popen[bytes]") -> None:
        """Start a worker in place of one whose engine was killed."""
        ended.wait()
        self.start()


def engine_of(pid: int) -> int:
    """Return the process of a worker's engine."""
    [engine] = [one.pid for one in psutil.Process(pid).children() if "sluice.worker.engine_process" in one.cmdline()]
    return engine


def recovery_rows(name: str, model: Path, flags: Sequence[str], num_kills: int) -> Iterator[tuple[str, ...]]:
    """Yield rows of milliseconds: with a worker beside, and alone."""
    for num_workers, how in ((2, "another worker"), (1, "restarted alone")):
        with server() as here, Producer() as producer, ExitStack() as started:
            scene = Scene(here, producer, model, flags, started)
            for _ in range(num_workers):
                scene.start()
            kills = num_kills if num_workers > 1 else max(1, num_kills // 3)
            took_ms = sorted(1000 * one for _ in range(kills) for one in scene.kill_engine())
        figures = (f"{percentile(took_ms, share):.0f}" for share in (50, 99))
        yield (name, how, f"{kills}", f"{len(took_ms)}", *figures)
