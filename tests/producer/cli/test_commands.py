"""The `producer` command, run in this process against a real server, with a small worker on a thread."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from sluice.history.database import open_database
from sluice.history.tables import jobs
from sluice.producer import AsyncProducer, Producer, Receipt
from sluice.producer.operations import submission
from sluice.protocol.bulk_files.journal import journal_path
from sluice.protocol.keys import QueueKeys
from sluice.protocol.states import JobState
from sluice.protocol.wire import decode_prompt
from tests.producer.commands import Ended, Run
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer


@contextmanager
def working(
    server: RedisServer, queue: str = "default", *, fails: Callable[[object], bool] = lambda _prompt: False
) -> Generator[None]:
    """A worker that generates three tokens for whatever comes; prompts that `fails` likes fail."""
    stop = threading.Event()

    def loop() -> None:
        with server.client() as client:
            worker = HandWorker(client, QueueKeys(queue))
            while not stop.wait(0.005):
                for leased in worker.pull():
                    if fails(decode_prompt(leased.payload)):
                        worker.say(leased, [], "", end=JobState.FAILED, error="it broke", code="broken")
                    else:
                        worker.generate(leased)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def joined(value: str | Sequence[str]) -> str:
    """A name for a case."""
    return value if isinstance(value, str) else " ".join(value)


def rows(path: Path) -> list[dict[str, Any]]:
    """Every line of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, *lines: object) -> Path:
    """A JSONL file."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


class TestGivenTheVariableOfAWorkerWithWeights:
    def test_when_it_names_one_queue_then_that_is_the_queue(
        self, run: Run, valkey: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SLUICE_QUEUE", "chat:3")

        with working(valkey, "chat"):
            ended = run("ask", "Name three rivers.", "--max-tokens", "3")

        assert ended == Ended(0, "w0 w1 w2 \n", "")

    def test_when_it_names_several_then_one_must_be_chosen(
        self, run: Run, valkey: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SLUICE_QUEUE", "chat:3 batch:1")

        refused = run("ask", "Name three rivers.")
        with working(valkey, "batch"):
            chosen = run("ask", "Name three rivers.", "--max-tokens", "3", "--queue", "batch")

        assert refused.code == 2
        assert "SLUICE_QUEUE names the queues chat, batch: choose one with --queue" in refused.err
        assert chosen.out == "w0 w1 w2 \n"


class TestGivenAWorker:
    def test_when_asked_then_the_completion_is_on_stdout_and_nothing_else(self, run: Run, valkey: RedisServer) -> None:
        with working(valkey):
            ended = run("ask", "Name three rivers.", "--max-tokens", "3")

        assert ended == Ended(0, "w0 w1 w2 \n", "")

    def test_when_asked_for_json_then_ids_usage_and_reason_are_there(self, run: Run, valkey: RedisServer) -> None:
        with working(valkey):
            ended = run("ask", "-", "--json", "--chat", stdin="Grüße".encode())

        answer = json.loads(ended.out)
        assert answer["choices"] == [{"text": "w0 w1 w2 ", "token_ids": [100, 101, 102], "finish_reason": "stop"}]
        assert answer["usage"]["output_tokens"] == 3

    def test_when_a_job_fails_then_the_sentence_is_on_stderr_and_the_code_is_one(
        self, run: Run, valkey: RedisServer
    ) -> None:
        with working(valkey, fails=lambda _prompt: True):
            ended = run("ask", "hello")

        assert ended.code == 1
        assert ended.err.count("\n") == 1
        assert "it broke" in ended.err

    def test_when_it_takes_too_long_then_the_job_is_cancelled(self, run: Run, producer: Producer) -> None:
        ended = run("ask", "hello", "--timeout", "0.2")

        assert ended.code == 1
        assert "is cancelled" in ended.err
        assert producer.queue()[0].waiting_jobs == 0

    def test_when_a_job_is_streamed_then_it_can_be_read_from_any_place(
        self, run: Run, producer: Producer, worker: HandWorker
    ) -> None:
        receipt = producer.submit("hello")
        [leased] = worker.pull()
        worker.generate(leased)

        assert run("stream", receipt.id).out == "w0 w1 w2 \n"
        assert run("stream", receipt.id, "--offset", "2").out == "w2 \n"
        assert run("result", receipt.id).out == "w0 w1 w2 \n"
        events = [json.loads(line) for line in run("stream", receipt.id, "--json").out.splitlines()]
        assert [event["cursor"] for event in events] == ["1:3", "2:6", "3:9", "3:9:end"]
        wrong = run("stream", receipt.id, "--offset", "9999")
        assert (wrong.code, "there is nothing after" in wrong.err) == (2, True)


class TestGivenJobsInTheQueue:
    def test_when_they_are_cancelled_requeued_and_deleted_then_each_is_answered(
        self, run: Run, producer: Producer, worker: HandWorker
    ) -> None:
        failed, waiting = producer.submit("a").id, producer.submit("b").id
        leased, _ = worker.pull()
        worker.say(leased, [], "", end=JobState.FAILED, error="broken", code="broken")
        assert leased.id == failed

        why = "not requeued: it is running, not failed"
        assert run("requeue", failed, waiting) == Ended(1, f"{failed}\trequeued\n{waiting}\t{why}\n", "")
        assert run("cancel", failed) == Ended(0, f"{failed}\tcancelled\n", "")
        assert run("cancel", "0.default.nobody").code == 1
        deleted = run("delete", failed, waiting)
        assert deleted.out == f"{failed}\tdeleted from queue\n{waiting}\tnot ended\n"
        assert deleted.code == 1
        assert "the history was not changed" in deleted.err

    def test_when_dead_jobs_are_requeued_by_filter_then_they_are_listed_and_confirmed(
        self, run: Run, producer: Producer, worker: HandWorker
    ) -> None:
        ids = [producer.submit(prompt, tenant="acme").id for prompt in ("a", "b")]
        for leased, code in zip(worker.pull(), ("out_of_memory", "engine_error"), strict=True):
            worker.say(leased, [1], "x", end=JobState.FAILED, error="it broke", code=code)

        shown = run("requeue", "--tenant", "acme", "--error-code", "out_of_memory")
        assert [line.split("\t")[:3] for line in shown.out.splitlines()[1:]] == [[ids[0], "out_of_memory", "1"]]
        assert shown.err == (
            "1 dead jobs are selected (out_of_memory: 1)\nNothing was changed: give --yes to requeue them.\n"
        )
        assert [row["id"] for row in json.loads(run("requeue", "--all", "--json").out)] == ids
        assert producer.queue()[0].dead == 2

        assert run("requeue", "--error-code", "out_of_memory", "--yes") == Ended(0, "1 jobs requeued\n", "")
        assert [producer.status(one).state for one in ids] == [JobState.QUEUED, JobState.FAILED]
        assert run("requeue", "--all", "--min-age", "3600", "--yes").out == "0 jobs requeued\n"
        assert run("requeue", "--max-age", "3600", "--yes").out == "1 jobs requeued\n"

    def test_when_a_batch_is_shown_closed_given_a_deadline_and_cancelled_then_it_shows(
        self, run: Run, producer: Producer, worker: HandWorker
    ) -> None:
        producer.submit("running", batch="b")
        worker.pull()
        waiting = producer.submit("waiting", batch="b")

        assert json.loads(run("batches", "show", "b", "--json").out)["total"] == 2
        assert json.loads(run("batches", "expire", "b", "--in", "3600", "--json").out)["deadline_ms"] is not None
        assert "total\t2" in run("batches", "close", "b").out
        cancelled = run("cancel", "--batch", "b", "--reason", "wrong file")
        assert cancelled == Ended(0, "1 jobs cancelled, 1 asked to stop\n", "")
        assert producer.status(waiting).error == "wrong file"

    @pytest.mark.parametrize(
        "arguments", [("cancel",), ("cancel", "0.a.b", "--batch", "b"), ("requeue",), ("requeue", "0.a.b", "--all")]
    )
    def test_when_it_is_not_said_which_or_said_twice_then_that_is_misuse(
        self, run: Run, arguments: tuple[str, ...]
    ) -> None:
        assert run(*arguments).code == 2

    def test_when_queues_are_looked_at_and_changed_then_it_shows(self, run: Run, producer: Producer) -> None:
        for _ in range(3):
            producer.submit("hello", tenant="acme", max_tokens=10)

        listed = json.loads(run("queues", "list", "--json").out)
        assert [(row["queue"], row["waiting"], row["paused"]) for row in listed] == [("default", 3, False)]
        assert listed[0]["tokens"] > 30
        table = run("queues", "list").out
        assert table.splitlines()[1].startswith("default\t3\t")
        assert table.endswith("\n")
        assert run("queues", "pause").code == 0
        assert run("queues", "set", "--max-waiting-jobs", "3", "--mode", "fair", "--weight", "acme=2").code == 0
        shown = json.loads(run("queues", "show", "--json").out)
        assert shown["paused"] is True
        assert shown["partitions"][0]["lanes"] == [["0", "acme", 3, shown["tokens"]]]
        assert shown["partitions"][0]["settings"]["max_waiting_jobs"] == "3"
        assert run("queues", "set", "--ttft-target", "1", "--tpot-target", "0.0335").code == 0
        table = run("queues", "show").out
        assert "0\tttft_target_ms\t1000.0\n" in table
        assert "0\ttpot_target_ms\t33.5\n" in table
        assert "acme" in run("queues", "show").out
        assert run("queues", "resume").code == 0
        assert run("queues", "purge").code == 2
        assert run("queues", "purge", "--yes").out == "3 jobs cancelled\n"

    def test_when_the_scale_is_asked_for_then_the_workers_to_want_are_told(
        self, run: Run, producer: Producer, valkey: RedisServer
    ) -> None:
        for _ in range(3):
            producer.submit("hello", max_tokens=10)
        with valkey.client() as client:
            client.hset("{default:0}:2:config", "capacity", "1.0")

        found = json.loads(run("queues", "scale", "--within", "30s", "--max", "2", "--json").out)

        assert (found["backlog_jobs"], found["rate_source"], found["within_s"]) == (3, "remembered", 30)
        assert found["backlog_tokens"] > 30
        assert found["wanted_workers"] == 2
        assert "wanted_workers\t1" in run("queues", "scale").out

    @pytest.mark.parametrize(
        ("option", "words"), [(("--within", "soon"), "expected a time such"), (("--min", "3", "--max", "2"), "min 3")]
    )
    def test_when_the_scale_has_a_wrong_option_then_one_sentence_says_so(
        self, run: Run, option: tuple[str, ...], words: str
    ) -> None:
        ended = run("queues", "scale", *option)

        assert ended.code == 2
        assert words in ended.err

    def test_when_one_is_shown_without_a_history_then_the_queue_answers(self, run: Run, producer: Producer) -> None:
        receipt = producer.submit("hello", batch="b")

        shown = json.loads(run("jobs", "show", receipt.id, "--json").out)
        totals = json.loads(run("jobs", "list", "--batch", "b", "--json").out)

        assert shown["queue"]["state"] == "queued"
        assert totals["total"] == 1
        assert run("jobs", "list").code == 1


class TestGivenAFile:
    CHAT = "/v1/chat/completions"

    def test_when_it_is_submitted_and_awaited_then_outputs_errors_and_figures_are_there(
        self, run: Run, valkey: RedisServer, tmp_path: Path
    ) -> None:
        message = {"role": "user", "content": "hi"}
        write_lines(
            tmp_path / "in.jsonl",
            {"prompt": "plain", "max_tokens": 3},
            {"custom_id": "chat", "method": "POST", "url": self.CHAT, "body": {"model": "m", "messages": [message]}},
            "{nonsense",
            {"custom_id": "ids", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": [1, 2]}},
            {"custom_id": "tools", "method": "POST", "url": self.CHAT, "body": {"messages": [message], "tools": [1]}},
            {"prompt": "please fail"},
        )

        with working(valkey, fails=lambda prompt: prompt == "please fail"):
            ended = run(
                "submit", "in.jsonl", "--wait", "-o", "out.jsonl", "--errors", "err.jsonl", "--ordered", "--stream"
            )

        assert ended.code == 1
        outputs = rows(tmp_path / "out.jsonl")
        assert [line["custom_id"] for line in outputs] == ["line-1", "chat", "ids"]
        assert [line["response"]["body"]["object"] for line in outputs] == [
            "text_completion", "chat.completion", "text_completion",
        ]  # fmt: skip
        assert outputs[1]["response"]["body"]["choices"][0]["message"]["content"] == "w0 w1 w2 "
        assert outputs[1]["error"] is None
        errors = {line["custom_id"]: line for line in rows(tmp_path / "err.jsonl")}
        assert errors.keys() == {"line-3", "tools", "line-6"}
        bad = errors["line-3"]["response"]["body"]["error"]
        assert (bad["code"], bad["line"], bad["type"]) == ("invalid_json", 3, "invalid_request_error")
        assert errors["tools"]["response"]["status_code"] == 400
        assert errors["line-6"]["response"] is None
        assert errors["line-6"]["error"] == {"code": "broken", "message": "it broke"}
        for label in ("Successful requests:", "Benchmark duration (s):", "Total generated tokens:", "Mean TTFT (ms):",
                      "P99 TPOT (ms):", "Median ITL (ms):", "Mean E2EL (ms):", "Mean Queue (ms):"):  # fmt: skip
            assert label in ended.out
        assert "n/a" not in ended.out

    def test_when_it_is_submitted_again_then_nothing_is_submitted_twice_by_default(
        self, run: Run, producer: Producer, tmp_path: Path
    ) -> None:
        write_lines(tmp_path / "in.jsonl", {"prompt": "same"}, {"prompt": "same"}, {"prompt": "other"})

        first = run("submit", "in.jsonl")
        second = run("submit", "in.jsonl")
        (tmp_path / "state" / "journals").rename(tmp_path / "elsewhere")
        without_journal = run("submit", "in.jsonl")
        write_lines(
            tmp_path / "in.jsonl", {"prompt": "same"}, {"prompt": "same"}, {"prompt": "other"}, {"prompt": "new"}
        )
        grown = run("submit", "in.jsonl")
        again = run("submit", "in.jsonl", "--again")
        after = run("submit", "in.jsonl")

        assert "3 jobs submitted, 0 submitted before" in first.err
        assert "0 jobs submitted, 3 submitted before" in second.err
        assert "0 jobs submitted, 3 submitted before" in without_journal.err
        assert "1 jobs submitted, 3 submitted before" in grown.err
        assert "4 jobs submitted, 0 submitted before" in again.err
        assert "0 jobs submitted, 4 submitted before" in after.err
        assert producer.queue()[0].waiting_jobs == 8

    def test_when_waiting_was_interrupted_then_the_next_run_writes_only_what_is_missing(
        self, run: Run, valkey: RedisServer, tmp_path: Path
    ) -> None:
        write_lines(tmp_path / "in.jsonl", *({"prompt": f"p{i}"} for i in range(5)))
        with working(valkey):
            run("submit", "in.jsonl", "--wait", "-o", "out.jsonl")
        whole = (tmp_path / "out.jsonl").read_text()
        kept = whole.splitlines(keepends=True)
        # Two whole lines, and one that was cut short by the interruption.
        (tmp_path / "out.jsonl").write_text("".join(kept[:2]) + kept[2][:20])

        ended = run("submit", "in.jsonl", "--wait", "-o", "out.jsonl")

        assert ended.code == 0
        assert sorted(line["custom_id"] for line in rows(tmp_path / "out.jsonl")) == [f"line-{i}" for i in range(1, 6)]
        assert (tmp_path / "out.jsonl").read_text().startswith("".join(kept[:2]))
        assert "2 lines had been written before" in ended.err

    def test_when_it_comes_by_stdin_with_a_batch_name_then_it_is_taken_once_too(self, run: Run) -> None:
        data = b'{"prompt": "hi"}\n'

        assert "1 jobs submitted" in run("submit", "-", "--batch", "mine", stdin=data).err
        assert "0 jobs submitted, 1 submitted before" in run("submit", "-", "--batch", "mine", stdin=data).err
        assert "1 jobs submitted" in run("submit", "-", stdin=data).err

    def test_when_it_is_strict_and_a_line_is_bad_then_nothing_is_submitted(
        self, run: Run, producer: Producer, tmp_path: Path
    ) -> None:
        write_lines(tmp_path / "in.jsonl", {"prompt": "good"}, {"prompt": ""}, "{")

        ended = run("submit", "in.jsonl", "--strict")

        assert ended.code == 1
        assert "2 lines are bad and nothing was submitted" in ended.err
        assert producer.queue()[0].waiting_jobs == 0

    def test_when_the_queue_is_full_then_it_waits_and_continues(
        self, run: Run, valkey: RedisServer, producer: Producer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(submission, "UNKNOWN_WAIT_S", 0.5)
        run("queues", "set", "--max-waiting-jobs", "20")
        write_lines(tmp_path / "in.jsonl", *({"prompt": f"p{i}"} for i in range(50)))

        with working(valkey):
            ended = run("submit", "in.jsonl", "--wait", "-o", "out.jsonl")

        assert ended.code == 0
        assert len(rows(tmp_path / "out.jsonl")) == 50

    def test_when_logprobs_are_asked_for_then_they_have_openais_shape(
        self, run: Run, producer: Producer, worker: HandWorker, tmp_path: Path
    ) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
        write_lines(tmp_path / "in.jsonl", {"custom_id": "c", "url": self.CHAT, "body": body})
        run("submit", "in.jsonl")
        [leased] = worker.pull()
        worker.say(leased, [5], "a", end=JobState.DONE, has_logprobs=True)

        run("submit", "in.jsonl", "--wait", "-o", "out.jsonl")

        [line] = rows(tmp_path / "out.jsonl")
        content = line["response"]["body"]["choices"][0]["logprobs"]["content"]
        assert content == [{"token": "token_id:5", "logprob": -0.5, "bytes": None, "top_logprobs": []}]


class TestGivenAMisuse:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["ask"], "Missing argument"),
            (["ask", "hi", "--max-tokens", "many"], "not a valid integer"),
            (["ask", "hi", "--top-p", "9"], "top_p must be"),
            (["ask", "hi", "--tenant", "No!"], "tenant"),
            (["ask", ""], "the prompt is empty"),
            (["ask", "hi", "--redis-url", "http://x"], "not a Redis URL"),
            (["stream", "nonsense"], "not a job id"),
            (["submit", "in.jsonl", "-o", "out.jsonl"], "-o needs --wait"),
            (["submit", "missing.jsonl"], "missing.jsonl"),
            (["queues", "set"], "nothing to set"),
            (["queues", "set", "--tpot-target", "-1"], "not in the range x>=0"),
            (["queues", "set", "--tpot-target", "inf"], "inf is not a finite number"),
            (["queues", "set", "--weight", "a=nan"], "the weight of tenant a must be from 0.001 to 1000, got nan"),
            (["nonsense"], "No such command"),
        ],
        ids=joined,
    )
    def test_when_it_is_run_then_one_sentence_says_so_and_the_code_is_two(
        self, run: Run, tmp_path: Path, arguments: list[str], words: str
    ) -> None:
        write_lines(tmp_path / "in.jsonl", {"prompt": "hi"})

        ended = run(*arguments)

        assert ended.code == 2
        assert words in ended.err
        assert "Traceback" not in ended.err
        assert ended.out == ""

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["result", "0.default.nobody"], "unknown"),
            (["ask", "hi", "--redis-url", "redis://:opensesame@127.0.0.1:1"], "does not answer"),
            (["jobs", "latency", "--database-url", "sqlite:////nowhere/x.db"], "no job history"),
            (["jobs", "latency", "--database-url", "mysql://x"], "not supported"),
        ],
        ids=joined,
    )
    def test_when_something_is_not_there_then_one_sentence_says_so_and_the_code_is_one(
        self, run: Run, arguments: list[str], words: str
    ) -> None:
        ended = run(*arguments)

        assert ended.code == 1
        assert words in ended.err
        assert "Traceback" not in ended.err
        assert "opensesame" not in ended.err

    def test_when_help_is_asked_for_then_commands_and_exit_codes_are_described(self, run: Run) -> None:
        commands = [[], ["ask"], ["submit"], ["stream"], ["result"], ["cancel"], ["requeue"], ["delete"], ["jobs"],
                    ["jobs", "list"], ["jobs", "show"], ["jobs", "latency"], ["queues"], ["queues", "list"],
                    ["queues", "show"], ["queues", "pause"], ["queues", "resume"], ["queues", "purge"],
                    ["queues", "set"], ["queues", "scale"], ["server"], ["server", "status"], ["server", "stop"],
                    ["batches"],
                    ["batches", "show"], ["batches", "close"], ["batches", "expire"]]  # fmt: skip

        helps = {" ".join(command): run(*command, "--help") for command in commands}

        assert {ended.code for ended in helps.values()} == {0}
        groups = ("", "jobs", "queues", "server", "batches")
        assert [name for name, ended in helps.items() if name not in groups and "Example" not in ended.out] == []
        assert "130  interrupted" in helps[""].out


def _hear_ctrl_c() -> None:
    """A suite that runs in the background ignores SIGINT, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class TestGivenAProcessOfItsOwn:
    @pytest.fixture
    def environ(self, valkey: RedisServer, tmp_path: Path) -> dict[str, str]:
        """For a subprocess."""
        return {**os.environ, "SLUICE_REDIS_URL": valkey.url, "SLUICE_STATE_DIR": str(tmp_path)}

    def test_when_ctrl_c_is_pressed_while_asking_then_the_job_is_cancelled(
        self, environ: dict[str, str], producer: Producer, worker: HandWorker
    ) -> None:
        command = [sys.executable, "-c", "from sluice.producer.cli.main import main; main()", "ask", "hello"]
        with subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_hear_ctrl_c
        ) as asking:
            leased = worker.pull()
            while not leased:
                leased = worker.pull()
            worker.say(leased[0], [1], "first")
            assert asking.stdout is not None
            assert asking.stdout.read(5) == b"first"

            asking.send_signal(signal.SIGINT)
            _, err = asking.communicate(timeout=20)

        assert asking.returncode == 130
        assert b"is cancelled" in err
        view = producer.status(leased[0].id)
        assert view.asked is JobState.CANCELLED

    def test_when_the_reader_of_its_output_goes_away_then_it_ends_quietly(
        self, environ: dict[str, str], producer: Producer, worker: HandWorker
    ) -> None:
        receipt = producer.submit("hello", max_tokens=100_000)
        assert isinstance(receipt, Receipt)
        [leased] = worker.pull()
        worker.say(leased, list(range(50_000)), "x" * 200_000)
        worker.say(leased, [1], "y", end=JobState.DONE)
        command = (
            f"{sys.executable} -c 'from sluice.producer.cli.main import main; main()' stream {receipt.id} | head -c 5"
        )

        ended = subprocess.run(command, shell=True, env=environ, capture_output=True, check=False, timeout=30)

        assert ended.stdout == b"xxxxx"
        assert ended.stderr == b""

    def test_when_the_client_is_imported_then_it_is_quick_and_brings_nothing_heavy(self) -> None:
        program = """
import sys, time
def seconds_of(*names):
    begin = time.process_time()
    for name in names:
        __import__(name)
    return time.process_time() - begin
libraries = seconds_of("redis.asyncio", "click", "rich.console", "msgpack")
ours = seconds_of("sluice.producer.client", "sluice.producer.cli.main", "sluice.producer.aio")
heavy = {"torch", "transformers", "alembic", "rq", "numpy", "tokenizers", "sqlalchemy"} & set(sys.modules)
print(ours / libraries, sorted(heavy))
"""
        printed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout

        share, heavy = printed.split(" ", 1)
        assert heavy.strip() == "[]"
        # As long as the four libraries that it stands on; a ratio, because machines differ.
        assert float(share) < 2


class TestGivenAHistory:
    """Rows as a recorder writes them, next to the queue."""

    @pytest.fixture
    def job_id(self, sqlite_url: str, producer: Producer, worker: HandWorker, monkeypatch: pytest.MonkeyPatch) -> str:
        """One done job, in the queue and in the history."""
        monkeypatch.setenv("SLUICE_DATABASE_URL", sqlite_url)
        receipt = producer.submit("hello", batch="b")
        [leased] = worker.pull()
        worker.generate(leased)
        view = producer.status(receipt)
        engine = open_database(sqlite_url, is_writer=True)
        with engine.begin() as connection:
            connection.execute(
                jobs.insert().values(
                    id=receipt.id, queue="default", partition=0, tenant="default", version=view.version, state="done",
                    batch="b", prompt="hello", choices=1, output_tokens=3, submitted_ms=view.submitted_ms,
                    scheduled_ms=view.submitted_ms + 10, first_token_ms=view.submitted_ms + 20,
                    finished_ms=view.submitted_ms + 40,
                )
            )  # fmt: skip
        engine.dispose()
        return receipt.id

    def test_when_jobs_are_listed_shown_and_measured_then_the_history_answers(self, run: Run, job_id: str) -> None:
        [row] = json.loads(run("jobs", "list", "--batch", "b", "--state", "done", "--json").out)
        assert (row["id"], row["e2e_s"]) == (job_id, 0.04)
        assert run("jobs", "list").out.splitlines()[1].startswith(f"{job_id}\tdone\t")

        shown = json.loads(run("jobs", "show", job_id, "--json").out)
        assert shown["history"]["ttft_s"] == 0.02
        assert shown["queue"]["state"] == "done"
        assert [event["event"] for event in shown["timeline"]] == ["submitted", "scheduled", "first_token", "done"]
        assert "first_token" in run("jobs", "show", job_id).out

        latency = {row["metric"]: row for row in json.loads(run("jobs", "latency", "--json").out)}
        assert latency["queue_s"]["p50_s"] == 0.01

        assert run("jobs", "show", "0.default.nobody").code == 1

    async def test_when_a_client_asks_for_jobs_then_it_has_the_same_rows(
        self, job_id: str, valkey: RedisServer, sqlite_url: str
    ) -> None:
        with Producer(valkey.url) as producer:
            rows = producer.jobs(batch="b", state="done")
        async with AsyncProducer(valkey.url, database_url=sqlite_url) as aproducer:
            same = await aproducer.jobs()

        assert [row.id for row in rows] == [row.id for row in same] == [job_id]
        assert rows[0].e2e_s == 0.04

    def test_when_it_is_deleted_then_neither_queue_nor_history_has_its_data(
        self, run: Run, job_id: str, sqlite_url: str, producer: Producer
    ) -> None:
        ended = run("delete", job_id)

        assert ended == Ended(0, f"{job_id}\tdeleted from queue and history\n", "")
        assert producer.views([job_id]) == [None]
        engine = open_database(sqlite_url)
        with engine.connect() as connection:
            [row] = connection.execute(jobs.select()).mappings()
        engine.dispose()
        assert (row["prompt"], row["state"]) == (None, "done")
        assert row["deleted_ms"] is not None


class TestGivenTheEmbeddedServer:
    def test_when_it_is_looked_at_and_stopped_then_it_says_where_it_is(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("SLUICE_REDIS_URL")
        with TemporaryDirectory(prefix="sluice-") as folder:
            monkeypatch.setenv("SLUICE_STATE_DIR", folder)

            assert json.loads(run("server", "status", "--json").out)["runs"] is False
            assert run("queues", "list").code == 0
            assert json.loads(run("server", "status", "--json").out)["state"] == "not running"
            assert run("server", "start").code == 0
            status = json.loads(run("server", "status", "--json").out)
            assert run("server", "stop").err == "stopped\n"
            assert run("server", "stop").err == "it was not running\n"

        assert status.pop("free_mib") >= 0
        assert status == {
            "url": f"unix://{folder}/server.sock", "runs": True, "state": "running", "used": False, "stays": True,
            "folder": folder, "history": f"{folder}/history.db", "log": f"{folder}/server.log",
        }  # fmt: skip

    def test_when_a_file_is_submitted_to_it_then_queue_and_server_are_named(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        write_lines(tmp_path / "in.jsonl", {"prompt": "a"})
        named = run("submit", "in.jsonl", "--queue", "q")
        monkeypatch.delenv("SLUICE_REDIS_URL")
        with TemporaryDirectory(prefix="sluice-") as folder:
            monkeypatch.setenv("SLUICE_STATE_DIR", folder)
            unnamed = run("submit", "in.jsonl", "--queue", "q")

        assert "embedded" not in named.err
        assert f"Queue 'q' is on the embedded server at unix://{folder}/server.sock" in unnamed.err


class TestGivenAQueueWithAnOddName:
    @pytest.mark.parametrize(
        "queue", ["../../..", "/etc", "..", ".", "\N{GRINNING FACE}" * 64, "a/b", "x\N{REPLACEMENT CHARACTER}"]
    )
    def test_when_a_file_is_submitted_then_its_journal_is_in_the_state_folder(
        self, run: Run, tmp_path: Path, queue: str
    ) -> None:
        path = write_lines(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b"})

        first = run("submit", str(path), "--queue", queue, "--batch", "b")
        second = run("submit", str(path), "--queue", queue, "--batch", "b")

        assert "2 jobs submitted, 0 submitted before" in first.err, first
        assert "0 jobs submitted, 2 submitted before" in second.err, second
        [journal] = tmp_path.rglob("*.journal")
        assert journal.parent.parent.parent == tmp_path / "state" / "journals"

    def test_when_names_differ_only_in_odd_letters_then_so_do_their_journals(self) -> None:
        odd = ["a/b", "a\\b", "a_b", "a" * 300, "a" * 301, ".."]
        odd.append(journal_path("s", "a/b", "b").parts[1])

        paths = [journal_path(*names) for one in odd for names in (("s", one, "b"), (one, "q", "b"), ("s", "q", one))]

        assert len(set(paths)) == len(paths)
        assert {len(path.parts) for path in paths} == {3}
        assert all(".." not in path.parts for path in paths)

    def test_when_names_joined_are_the_same_then_the_journals_are_not(self) -> None:
        paths = {journal_path("5f0c", *names) for names in (("prod", "eu-nightly"), ("prod-eu", "nightly"))}

        assert {str(path) for path in paths} == {"5f0c/prod/eu-nightly.journal", "5f0c/prod-eu/nightly.journal"}
