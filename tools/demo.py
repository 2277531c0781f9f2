"""Run the whole service on this machine: a bulk file, a killed worker whose jobs another completes, the history.

Everything is real: the embedded Valkey server, the worker processes, the small model, SIGKILL, SQLite. Files are in
`.demo/`, which is emptied at each start.

    make demo
"""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from sqlalchemy import create_engine, text

if TYPE_CHECKING:
    from sluice.producer.operations.follow import StreamEvent

FOLDER = Path(".demo").absolute()
STATE = FOLDER / "state"
KILL_AFTER_TOKENS = 150
"""The worker is killed once every long job has published this many tokens."""

LONG_JOBS = {
    "count": "Count from 1 to 1000.",
    "fox": "Tell a long story about a fox.",
    "owl": "Tell a long story about an owl.",
}
SHORT_PROMPTS = [f"What is {a} + {b}?" for a in range(11, 15) for b in range(21, 26)]

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


@dataclass(slots=True, eq=False)
class Reading:
    """The tokens read from one job's channel so far."""

    name: str
    text: str = ""
    num_tokens: int = 0
    is_ended: bool = False

    def take(self, event: "StreamEvent") -> None:
        """Append an event.

        Raises:
            SystemExit: a token is missing, repeated or out of order.
        """
        if event.start != self.num_tokens:
            raise SystemExit(f"{self.name}: expected token {self.num_tokens}, received token {event.start}")
        self.num_tokens += len(event.token_ids)
        self.text += event.text
        self.is_ended = event.end is not None


def log_of(name: str) -> Path:
    """Return the file of a worker's log."""
    return FOLDER / f"{name.replace(' ', '-')}.log"


def start_worker(name: str) -> subprocess.Popen[bytes]:
    """Start a worker on the embedded server: a parent process, the worker and a recorder."""
    say(f"{name} starts")
    with log_of(name).open("wb") as log:
        command = [sys.executable, "-P", "-m", "sluice.worker", "start", "--cpu", "--metrics-port", "0"]
        worker = subprocess.Popen([*command, "--log-format", "json"], stdout=log, stderr=log)
    atexit.register(worker.kill)
    return worker


def process_of(parent: subprocess.Popen[bytes]) -> int:
    """Return the process id of the worker that `worker start` has started."""
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    return next(int(pid) for pid in children if b"--incarnation" in Path(f"/proc/{pid}/cmdline").read_bytes())


def events_of(name: str, event: str) -> list[dict[str, Any]]:
    """Return the lines of a worker's log about an event."""
    lines = [json.loads(line) for line in log_of(name).read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


@contextmanager
def fresh_state() -> Iterator[None]:
    """Empty `.demo/`, and stop its server at the end."""
    from sluice.protocol.redis import embedded

    if STATE.exists():
        embedded.stop(STATE)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    try:
        yield
    finally:
        embedded.stop(STATE)


def table_of(readings: list[Reading], title: str) -> Table:
    """Show each job's number of tokens and the end of its text."""
    table = Table(title=title, title_justify="left", expand=True)
    table.add_column("job", min_width=8)
    table.add_column("tokens", justify="right", min_width=6)
    table.add_column("end of the text so far", no_wrap=True, overflow="crop")
    for reading in readings:
        shown = " ".join(reading.text.split())[-(console.width - 30) :]
        table.add_row(reading.name, str(reading.num_tokens), f"{shown}{' ■' if reading.is_ended else ''}")
    return table


def submit_file() -> None:
    """Submit a JSONL file with `producer submit`, and wait for its results."""
    file = FOLDER / "questions.jsonl"
    lines = [json.dumps({"messages": [{"role": "user", "content": p}], "temperature": 0}) for p in SHORT_PROMPTS]
    file.write_text("\n".join(lines) + "\n")
    say(f"$ producer submit {file.name} --wait -o answers.jsonl")
    command = [
        sys.executable,
        "-P",
        "-m",
        "sluice.producer",
        "submit",
        str(file),
        "--wait",
        "-o",
        str(FOLDER / "answers.jsonl"),
    ]
    subprocess.run(command, check=True)
    answer = json.loads((FOLDER / "answers.jsonl").read_text().splitlines()[0])
    content = answer["response"]["body"]["choices"][0]["message"]["content"]
    say(f"first answer in answers.jsonl: {content.strip()!r}")


def run_long_jobs(victim: subprocess.Popen[bytes], survivor: subprocess.Popen[bytes]) -> None:
    """Submit long jobs to worker 1 alone, kill it halfway, and let the survivor complete them."""
    from sluice.producer.client import Producer

    with Producer() as producer:
        jobs = {
            str(producer.submit(messages=[{"role": "user", "content": prompt}], max_tokens=1500, temperature=0)): name
            for name, prompt in LONG_JOBS.items()
        }
        say(f"{len(jobs)} long jobs submitted")
        readings = {job_id: Reading(name) for job_id, name in jobs.items()}
        watch(producer.stream_many(jobs), readings, victim, survivor)
        console.print(table_of(list(readings.values()), "all three done; every token received once, in order"))


def watch(
    events: "Iterator[StreamEvent]",
    readings: dict[str, Reading],
    victim: subprocess.Popen[bytes],
    survivor: subprocess.Popen[bytes],
) -> None:
    """Show tokens as they arrive, and kill worker 1 halfway."""
    title, has_killed, killed_ms = "worker 1 generates", False, 0
    with Live(console=console, refresh_per_second=12, transient=True) as live:
        for event in events:
            reading = readings[event.job_id]
            reading.take(event)
            live.update(table_of(list(readings.values()), title))
            if not has_killed and all(r.num_tokens >= KILL_AFTER_TOKENS for r in readings.values()):
                survivor.send_signal(signal.SIGCONT)
                os.kill(process_of(victim), signal.SIGKILL)
                has_killed, killed_ms = True, round(1000 * time.time())
                received = ", ".join(f"{r.name} {r.num_tokens}" for r in readings.values())
                say(f"worker 2 pulls again (SIGCONT), SIGKILL to worker 1; tokens received: {received}")
                title = "worker 1 was killed; worker 2 continues"
            elif killed_ms and event.token_ids and event.time_ms > killed_ms:
                later_s = (event.time_ms - killed_ms) / 1000
                say(f"{reading.name} continues at token {event.start}, {later_s:.1f} s after the kill")
                killed_ms = 0


def wait_for(name: str, event: str) -> None:
    """Wait until a worker's log has an event."""
    while not events_of(name, event):
        time.sleep(0.05)


def print_history() -> None:
    """Print the latency of every job of the demo, read from SQLite."""
    query = """
        SELECT state, count(*) AS jobs, max(attempts) AS attempts, sum(resumed_tokens) AS resumed,
               sum(output_tokens) AS tokens,
               round(1000 * avg(queue_s)) AS queue_ms, round(1000 * avg(ttft_s)) AS ttft_ms,
               round(1000 * avg(tpot_s), 2) AS tpot_ms, round(1000 * avg(itl_p99_s), 2) AS itl_p99_ms,
               round(avg(e2e_s), 2) AS e2e_s
        FROM jobs GROUP BY state, attempts ORDER BY attempts DESC
    """
    say(f"{FOLDER.name}/state/history.db, table jobs, by number of attempts:")
    with create_engine(f"sqlite:///{STATE / 'history.db'}").connect() as connection:
        result = connection.execute(text(query))
        table = Table(*result.keys())
        for row in result:
            table.add_row(*map(str, row))
    console.print(table)


def say(line: str) -> None:
    """Print a line after the time since the start."""
    console.print(f"[dim]{time.monotonic() - BEGAN_S:5.1f} s[/dim]  {line}")


BEGAN_S = time.monotonic()


def main() -> None:
    """Run the demo."""
    os.environ["SLUICE_STATE_DIR"] = str(STATE)
    for name in ("SLUICE_REDIS_URL", "SLUICE_DATABASE_URL"):
        os.environ.pop(name, None)
    with fresh_state():
        victim = start_worker("worker 1")
        survivor = start_worker("worker 2")
        submit_file()
        wait_for("worker 2", "worker started")
        survivor.send_signal(signal.SIGTSTP)
        wait_for("worker 2", "quiet: pulling no more")
        say("worker 2 pauses (SIGTSTP)")
        run_long_jobs(victim, survivor)
        survivor.send_signal(signal.SIGTERM)
        say(f"worker 2 finished its work and exited with code {survivor.wait(timeout=60)}")
        print_history()
    say(f"done; logs and results are in {FOLDER.name}/")


if __name__ == "__main__":
    main()
