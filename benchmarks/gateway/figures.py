"""The figures of the gateway with the null model."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gateway.parts import Served, ask_client, served
from benchmarks.processes import ROOT, process_s
from sluice.history.percentiles import percentile

ROUND_S = "0.02"
"""How often a worker sends tokens, unless set otherwise."""

STEP_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """Times of first tokens, paired by job."""

    added_ms: tuple[float, ...]
    """From the arrival of a job's first entry at a reader of its channel to that of its text over HTTP."""

    ttft_ms: tuple[float, ...]
    """From the request to its first text."""

    queued_ms: tuple[float, ...]
    """From the request to the event that its submit writes."""

    num_late: int

    def __str__(self) -> str:
        added, whole, queued = (
            f"p50 {percentile(ordered, 50):.2f} ms, p99 {percentile(ordered, 99):.2f} ms"
            for ordered in map(sorted, (self.added_ms, self.ttft_ms, self.queued_ms))
        )
        pairs = f"{len(self.added_ms)} pairs, {self.num_late} left out"
        return (
            f"time to first token, added by the gateway: {added} ({pairs}); whole {whole}; until it is queued {queued}"
        )


def first_token(
    num_streams: int, num_requests: int, *, step_s: float = STEP_S, is_realtime: bool = False
) -> FirstToken:
    """Compare arrivals of first tokens while this many streams are open."""
    model = f"null?step_s={step_s}"
    with served("--stream-interval", ROUND_S, model=model, is_realtime=is_realtime) as here:
        _warm_up(here)
        found = ask_client(
            here, "follow", is_paired=True, streams=num_streams, requests=num_requests, max_tokens=60, spread=80
        )
        return FirstToken(
            added_ms=tuple(found["added_ms"]),
            ttft_ms=tuple(found["ttft_ms"]),
            queued_ms=tuple(found["queued_ms"]),
            num_late=found["late"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The cost of streamed tokens."""

    num_tokens: int
    num_events: int
    gateway_s: float
    """Processor time."""

    took_s: float

    def __str__(self) -> str:
        return (
            f"{self.num_tokens / self.num_events:.1f} tokens an event: {self.num_tokens / self.gateway_s:,.0f} tokens "
            f"per second of the gateway's processor time ({self.gateway_s / self.num_events * 1e6:.0f} us an event; "
            f"{self.num_tokens / self.took_s:,.0f} tokens/s for {self.took_s:.0f} s)"
        )


def tokens(num_streams: int, num_tokens: int, *, step_s: float, round_s: str, is_realtime: bool = False) -> Tokens:
    """Stream a number of tokens on each of a number of streams."""
    with served("--stream-interval", round_s, model=f"null?step_s={step_s}", is_realtime=is_realtime) as here:
        _warm_up(here)
        before_s, began_s = process_s(here.pid), time.perf_counter()
        found = ask_client(here, "follow", streams=num_streams, requests=num_streams, max_tokens=num_tokens)
        return Tokens(
            num_tokens=num_streams * num_tokens,
            num_events=found["events"],
            gateway_s=process_s(here.pid) - before_s,
            took_s=time.perf_counter() - began_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """The cost of open streams whose jobs have not begun."""

    num_streams: int
    before_mib: float
    mib: float
    """Resident memory of the gateway."""

    busy: float
    """Seconds of its processor time per second while nothing happens."""

    def __str__(self) -> str:
        each = (self.mib - self.before_mib) * 1024 / self.num_streams
        return (
            f"{self.num_streams} silent streams: {self.mib:.0f} MiB ({self.before_mib:.0f} before, {each:.0f} KiB "
            f"each), {self.busy:.3f} s of processor time a second"
        )


def silent(num_streams: int, *, settle_s: float = 20.0, watch_s: float = 20.0) -> Silent:
    """Open streams without a worker, and watch them."""
    with served(model=None) as here:
        before_mib = resident_mib(here.pid)
        given = json.dumps({"port": here.port, "streams": num_streams})
        command = [sys.executable, "-m", "benchmarks.gateway.client", "hold", given]
        with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
            assert client.stdout is not None
            if not client.stdout.readline():
                raise RuntimeError("the client failed")
            time.sleep(settle_s)
            before_s, began_s = process_s(here.pid), time.perf_counter()
            time.sleep(watch_s)
            busy = (process_s(here.pid) - before_s) / (time.perf_counter() - began_s)
            mib = resident_mib(here.pid)
            client.kill()
        return Silent(num_streams=num_streams, before_mib=before_mib, mib=mib, busy=busy)


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def _warm_up(here: Served) -> None:
    ask_client(here, "follow", streams=4, requests=8, max_tokens=4)
