"""`worker trace`: of a worker that runs, and of a traffic in virtual time."""

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import islice
from pathlib import Path

import pytest
from click.testing import CliRunner

from sluice.engine.watching import Iteration, Watcher
from sluice.protocol.wire import JobOptions
from sluice.worker.cli import main
from sluice.worker.config import MetricsConfig
from sluice.worker.errors import ExitCode, NotReady
from sluice.worker.iteration_feed import MAX_KEPT, IterationFeed
from sluice.worker.iterations.live import live_iterations
from sluice.worker.model.loaded_model import LocalModel
from tests.integration.jobs import Ask, submit_all, wait_for_ends, wait_until
from tests.integration.workers import running_worker
from tests.servers import RedisServer


@pytest.fixture
def port() -> int:
    """One that is free."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def iteration(number: int) -> Iteration:
    return Iteration(
        number=number, at_s=0.0, took_s=0.0, joined=(), running=(), left=(), preempted=(), waiting=(), num_waiting=0,
        max_tokens=1, num_free_blocks=0, num_blocks=1,
    )  # fmt: skip


class OneLine(BaseHTTPRequestHandler):
    """Answer with the path that is asked for."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_message(self, format: str, *args: object) -> None: ...


def is_open(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class TestGivenAWorkerThatRuns:
    def test_when_its_iterations_are_followed_then_each_job_joins_and_leaves(
        self, valkey: RedisServer, port: int
    ) -> None:
        loaded: list[LocalModel] = []
        lines: list[str] = []

        def keep(served: LocalModel) -> LocalModel:
            loaded.append(served)
            return served

        def follow() -> None:
            stream = live_iterations(MetricsConfig(port=port), has_all=True)
            lines.extend(islice(stream, 7))
            stream.close()

        flags = {"metrics__enabled": True, "metrics__port": port}
        with valkey.client() as client, running_worker(valkey.url, change=keep, **flags):
            engine = loaded[0].engine
            wait_until(lambda: is_open(port), "it serves its metrics")
            follower = threading.Thread(target=follow, daemon=True)
            follower.start()
            wait_until(lambda: engine.is_watched, "somebody watches")
            (job_id,) = submit_all(client, [Ask(options=JobOptions(max_tokens=3, ignore_eos=True), prompt="x" * 40)])
            wait_for_ends(client, [job_id])
            follower.join(30)
            wait_until(lambda: not engine.is_watched, "nobody watches")

        assert all("  1 run  0 wait  " in lines[head] for head in (0, 2, 4)), lines
        assert f"joins     {job_id}" in lines[1]
        assert lines[1].endswith("/0 40 from 0 in 3")
        assert lines[3].endswith("/0 1 from 40 in 3")
        assert f"leaves    {job_id}" in lines[6]
        assert lines[6].endswith("/0 length")

    def test_when_the_environment_names_a_proxy_then_the_worker_is_asked_directly(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        server = HTTPServer(("127.0.0.1", 0), OneLine)
        threading.Thread(target=server.handle_request, daemon=True).start()

        with server:
            lines = list(live_iterations(MetricsConfig(port=server.server_port), has_all=False))

        assert lines == ["/iterations"]

    def test_when_there_is_no_worker_then_it_says_where_to_look(self, port: int) -> None:
        with pytest.raises(NotReady, match=rf"no worker serves its iterations at 127\.0\.0\.1:{port}"):
            next(live_iterations(MetricsConfig(host="0.0.0.0", port=port), has_all=False))


class TestGivenAFeed:
    def test_when_followers_come_and_go_then_the_engine_is_watched_while_there_is_one(self) -> None:
        watched: list[Watcher | None] = []
        feed = IterationFeed(watched.append)

        with feed.follow() as first:
            with feed.follow() as second:
                put(watched[0])(iteration(1))
                seen = [first(), second()]
            put(watched[0])(iteration(2))
            seen.append(first())

        assert seen == [iteration(1), iteration(1), iteration(2)]
        assert [one is None for one in watched] == [False, True]

    def test_when_a_follower_is_too_slow_then_it_misses_some_and_the_loop_does_not_wait(self) -> None:
        watched: list[Watcher | None] = []
        with IterationFeed(watched.append).follow() as next_iteration:
            for number in range(MAX_KEPT + 10):
                put(watched[0])(iteration(number))

            seen = [one.number for one in iter(next_iteration, None)]

        assert seen == list(range(MAX_KEPT))


def put(watcher: Watcher | None) -> Callable[[Iteration], None]:
    """A watcher that there must be."""
    assert watcher is not None
    return watcher


class TestGivenATraffic:
    ARRIVALS = ((0.0, 40, 3), (0.0, 60, 3), (0.02, 30, 30))

    def trace(self, folder: Path, *flags: str, lines: object = None) -> tuple[int, str]:
        traffic = folder / "traffic.jsonl"
        rows = lines or [
            {"at_s": at_s, "prompt_tokens": num_prompt, "output_tokens": num_output}
            for at_s, num_prompt, num_output in self.ARRIVALS
        ]
        traffic.write_text("\n".join(map(json.dumps, rows)))  # pyright: ignore[reportArgumentType]  # a list
        size = ["--num-blocks", "8", "--max-num-batched-tokens", "64", "--max-num-seqs", "2"]
        done = CliRunner().invoke(main, ["trace", "--simulate", str(traffic), *size, *flags])
        return done.exit_code, done.output

    def test_when_it_is_simulated_then_every_iteration_is_printed(self, tmp_path: Path) -> None:
        code, printed = self.trace(tmp_path, "--iterations")

        assert code == 0
        assert printed.splitlines()[:9] == [
            "     1  at 0.000 s  16.4 ms  64 of 64 tokens  2 run  0 wait  1 of 8 blocks free",
            "        joins     0/0 40 from 0 in 3, 1/0 24 from 0 in 4",
            "     2  at 0.016 s  13.7 ms  37 of 64 tokens  2 run  0 wait  1 of 8 blocks free",
            "        runs      0/0 1 from 40 in 3, 1/0 36 from 24 in 4",
            "     3  at 0.030 s  10.2 ms  2 of 64 tokens  2 run  1 wait  1 of 8 blocks free",
            "        runs      0/0 1 from 41 in 3, 1/0 1 from 60 in 4",
            "        leaves    0/0 stop",
            "        waits     2/0",
            "     4  at 0.040 s  13.1 ms  31 of 64 tokens  2 run  0 wait  2 of 8 blocks free",
        ]
        assert len([line for line in printed.splitlines() if " blocks free" in line]) == 33

    def test_when_only_changes_are_asked_for_then_the_others_are_left_out(self, tmp_path: Path) -> None:
        _, printed = self.trace(tmp_path)

        numbers = [line.split()[0] for line in printed.splitlines() if " blocks free" in line]
        assert numbers == ["1", "3", "4", "33"]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ({"prompt": "hi", "output_tokens": 3}, "give prompt_tokens instead of prompt"),
            ({"prompt_tokens": 500, "output_tokens": 3}, "request 0 failed: prompt and output can become 503 tokens"),
        ],
        ids=["text", "too large"],
    )
    def test_when_a_request_cannot_run_then_it_is_named(self, tmp_path: Path, line: object, message: str) -> None:
        code, printed = self.trace(tmp_path, lines=[line])

        assert code == ExitCode.MISUSED
        assert message in printed
