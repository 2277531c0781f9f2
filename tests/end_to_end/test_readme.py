"""Every command and snippet of the README and the guide, run as printed against one worker with the small model.

Commands are run once, however often they are printed. `ONLY_PARSED` has those that are checked but not run.
"""

import ast
import gzip
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import sqlalchemy as sa
import torch
from _pytest.mark.structures import ParameterSet

from sluice.producer.client import Producer
from sluice.protocol.redis import embedded
from tests import forks
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.grids import fast_only
from tests.rules.commands import parse
from tests.servers import binary_of, free_port, how_to_get

ROOT = Path(__file__).parent.parent.parent
GUIDE = ("start", "web-backend", "http", "bulk", "offline", "models", "operations", "gpu", "callbacks", "history",
         "responses", "batches", "native-routes", "page", "scaling", "traces", "schedules", "chains")  # fmt: skip
PAGES = {"README": ROOT / "README.md"} | {name: ROOT / "docs" / "guide" / f"{name}.md" for name in GUIDE}
TEXT = "\n".join(path.read_text() for path in PAGES.values())
"""The README and the guide, in the order in which a new user reads them."""

ONLY_PARSED = {
    "worker tune ./my-model traffic.jsonl --ttft-target 1 --tpot-target 0.05": "minutes: tests/worker/test_tune.py",
    "worker start --gpu all --model ./my-model": "needs GPUs",
    "worker fleet --scale-to-backlog --processes 4 --min 0 --within 300 --model ./Qwen3-0.6B": "needs the model",
}
"""Commands that are checked for their options only, and why."""

PRODUCER_OF_PAGES = "from sluice.producer import Producer; producer = Producer()"
"""What the pages whose snippets are one program take for granted."""

START_TIMEOUT_S = 60.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(binary_of("valkey") is None, reason=how_to_get("valkey")),
]


def blocks(language: str) -> list[str]:
    """The code blocks of one language, each once; answers that a tool has written are left out."""
    written = re.sub(r"<!-- generated -->.*?<!-- end -->", "", TEXT, flags=re.DOTALL)
    return list(dict.fromkeys(re.findall(rf"```{language}\n(.*?)```", written, flags=re.DOTALL)))


def commands() -> list[str]:
    """Every shell command, each once, comments cut, continued lines joined."""
    lines = [line for block in blocks("sh") for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    found = (line.split("  #")[0].strip() for line in lines if not line.startswith("#"))
    return list(dict.fromkeys(command for command in found if command))


def answer_shown_for(command: str) -> str:
    """The line of a comment that shows what a command prints."""
    [block] = [block for block in blocks("sh") if command in re.sub(r"\\\n\s*", "", block)]
    after = re.sub(r"\\\n\s*", "", block).split(command)[1]
    return after.split("\n# ")[1].splitlines()[0]


def example_lines() -> list[str]:
    """Every line of a bulk file that a document shows, with words in place of what it leaves out."""
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    shown = [example for path in documents for example in re.findall(r'`(\{"[^`]*\})`', path.read_text())]
    lines = [one for one in shown if re.match(r'\{"(prompt|messages|token_ids|custom_id)"', one)]
    left_out = {
        '"messages": […]': '"messages": [{"role": "user", "content": "Hello"}]',
        '"messages": …': '"messages": [{"role": "user", "content": "Hello"}]',
        '"token_ids": […]': '"token_ids": [5, 6, 7]',
        '"prompt": …': '"prompt": "Once upon a time"',
        "…": "Once upon a time",
    }
    for what, words in left_out.items():
        lines = [line.replace(what, words) for line in lines]
    return list(dict.fromkeys(lines))


def is_standalone(snippet: str) -> bool:
    """Whether a snippet of Python runs by itself; the others are parts of a web backend."""
    return "app." not in snippet and "request." not in snippet


IN_THEIR_PROCESS = ("offline", "chats", "tools offline", "streams")
"""Snippets that load a model in their process, but for the README's, which the fast suite runs."""


def snippets() -> list[ParameterSet]:
    """The snippets that run by themselves, named. One that loads a model in its process takes as long as a worker."""
    names = ["openai", "pydantic", "offline in the readme", "sync", "async", "waits", "durability", "offline", "chats",
             "tools offline", "streams", "responses", "schedules", "pipeline", "chains"]  # fmt: skip
    found = zip(names, [block for block in blocks("python") if is_standalone(block)], strict=True)
    return [
        pytest.param(snippet, id=name, marks=pytest.mark.long if name in IN_THEIR_PROCESS else ())
        for name, snippet in found
    ]


def is_of_openai(snippet: str) -> bool:
    """Whether a snippet uses the stock client, of a gateway."""
    return "from openai" in snippet


@dataclass(frozen=True)
class Place:
    """Where commands are run: a folder with its own server, worker, gateway and environment."""

    folder: Path
    environment: dict[str, str]
    gateway_url: str = ""

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run what a script of the distribution runs, in a fork."""
        program, *arguments = shlex.split(command)
        return forks.run((f"sluice.{program}", *arguments), self.environment, self.folder)

    def run_snippet(self, snippet: str) -> subprocess.CompletedProcess[str]:
        """Run a program in Python, in a fork."""
        file = self.folder / "snippet.py"
        file.write_text(snippet)
        return forks.run((str(file),), self.environment, self.folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A fresh state folder with a running worker, which runs the printed command."""
    folder = tmp_path_factory.mktemp("readme")
    state = folder / "state"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLUICE_")}
    # The guide's page on tools says that the small model needs the last one.
    environment |= {"SLUICE_STATE_DIR": str(state), "SLUICE_METRICS_PORT": "0", "SLUICE_TOOL_FORMAT": "hermes"}
    worker = forks.Fork(("sluice.worker", "start", "--cpu"), environment, folder / "worker.log")
    here = Place(folder, environment)
    try:
        _wait_for_worker(here, worker)
        with _gateway(here) as gateway:
            yield replace(here, gateway_url=gateway.url.removesuffix("/v1"))
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(timeout=60)
        embedded.stop(state)


def _wait_for_worker(here: Place, worker: forks.Fork) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        assert worker.poll() is None, (here.folder / "worker.log").read_text()
        done = here.run("worker status --json")
        if done.returncode == 0 and json.loads(done.stdout):
            return
        time.sleep(0.2)
    raise TimeoutError((here.folder / "worker.log").read_text())


@contextmanager
def _gateway(here: Place) -> Generator[GatewayProcess]:
    """Start a gateway of that worker, with tables of its own, which have no keys."""
    url, database_url = embedded.Embedded(here.folder / "state").url, f"sqlite:///{here.folder / 'gateway.db'}"
    here.run(f"worker migrate --database-url {database_url}")
    with gateway_process(url, database_url=database_url) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def producer(place: Place) -> Iterator[Producer]:
    """A client of the same server."""
    with Producer(embedded.Embedded(place.folder / "state").url) as client:
        yield client


# ---------------------------------------------------------------- how each command is run


def _succeeds(here: Place, command: str, _producer: Producer) -> None:
    done = here.run(command)
    assert done.returncode == 0, done.stdout + done.stderr


def _is_running_already(here: Place, command: str, _producer: Producer) -> None:
    assert command == "worker start --cpu"
    assert json.loads(here.run("worker status --json").stdout), "the fixture's worker was started by this command"


def model_of(command: str) -> str:
    """The model that a command names."""
    words = shlex.split(command)
    return words[words.index("--model") + 1]


def _says_what_it_lacks(here: Place, command: str, _producer: Producer) -> None:
    """The GPU and the model's folder are the reader's own: without one the worker exits with a message."""
    no_gpu, no_model = "SLUICE_DEVICE: there is no GPU 0 ", f"SLUICE_MODEL: {model_of(command)} is not a folder: "
    done = here.run(command)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    first, problem = done.stderr.splitlines()
    assert first == "1 setting is wrong:"
    assert problem.strip().startswith(no_model if torch.cuda.is_available() or "--gpu" not in command else no_gpu)


def _is_a_target(_here: Place, command: str, _producer: Producer) -> None:
    done = subprocess.run([*shlex.split(command), "-n"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _installs_extras_that_exist(_here: Place, command: str, _producer: Producer) -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"\[([\w,]+)\]", command)[0].split(","):
        assert re.search(rf"^{extra} = \[", declared, flags=re.MULTILINE), extra


def _is_parsed(_here: Place, command: str, _producer: Producer) -> None:
    assert command in ONLY_PARSED
    parse(command)


def _answers(here: Place, command: str, _producer: Producer) -> None:
    done = here.run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d", done.stdout), "the small model answers sums"


def _pauses(here: Place, command: str, producer: Producer) -> None:
    _succeeds(here, command, producer)
    _succeeds(here, "producer queues resume", producer)


def _submits_a_file(here: Place, command: str, producer: Producer) -> None:
    line = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 8}
    (here.folder / "questions.jsonl").write_text(json.dumps(line) + "\n")
    body = {"model": "small", "prompt": "Once upon a time", "max_tokens": 8}
    openai = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    with gzip.open(here.folder / "batch.jsonl.gz", "wt") as file:
        file.write(json.dumps(openai) + "\n")
    _succeeds(here, command, producer)
    if "answers.jsonl" in command:
        answer = json.loads((here.folder / "answers.jsonl").read_text())
        assert answer["response"]["status_code"] == 200


def _follows_a_batch(here: Place, command: str, producer: Producer) -> None:
    producer.submit("Once upon a time", max_tokens=4, batch=command.split()[-1])
    done = here.run(f"{command} --more-within 0")  # the batch is open
    assert re.search(r"^(\d+)/\1 ", done.stdout.splitlines()[-1]), done.stdout + done.stderr
    assert (done.returncode == 0) is ("failed" not in done.stdout)


def _about_a_done_job(here: Place, command: str, producer: Producer) -> None:
    receipt = producer.submit("Once upon a time", max_tokens=4)
    producer.result(receipt, timeout_s=30)
    _succeeds(here, command.replace("JOB_ID", receipt.id), producer)


def _about_a_job_in_the_history(here: Place, command: str, producer: Producer) -> None:
    receipt = producer.submit("Once upon a time", max_tokens=4)
    producer.result(receipt, timeout_s=30)
    _wait_for_row(here, receipt.id)
    _succeeds(here, command.replace("JOB_ID", receipt.id), producer)


def _cancels(here: Place, command: str, producer: Producer) -> None:
    receipt = producer.submit("Once upon a time", max_tokens=2000, ignore_eos=True)
    _succeeds(here, command.replace("JOB_ID", receipt.id), producer)


def _requeues(here: Place, command: str, producer: Producer) -> None:
    receipt = producer.submit("Once upon a time", max_tokens=4, model="a model that no worker serves")
    deadline_s = time.monotonic() + 30
    while producer.status(receipt).state != "failed" and time.monotonic() < deadline_s:
        time.sleep(0.01)
    _succeeds(here, command.replace("JOB_ID", receipt.id), producer)


def _sets_a_variable(_here: Place, command: str, _producer: Producer) -> None:
    name = command.removeprefix("export ").split("=")[0]
    assert name in (ROOT / "producer" / "config.py").read_text(), "a variable that the client reads too"


def _runs_until_stopped(here: Place, command: str, _producer: Producer) -> None:
    # Another test may serve the usual port at this moment.
    is_gateway = command.startswith("producer serve")
    program, *arguments = shlex.split(command) + (["--port", str(free_port())] if is_gateway else [])
    log = here.folder / "until-stopped.log"
    log.unlink(missing_ok=True)
    process = forks.Fork((f"sluice.{program}", *arguments), here.environment, log)
    deadline_s = time.monotonic() + 30
    while not re.search(" started|serving", log.read_text()):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0, log.read_text()


def _asks_the_gateway(here: Place, command: str, producer: Producer) -> None:
    """As printed, but for the port and the id; the answer has the fields that the page shows."""
    receipt = producer.submit("Once upon a time", max_tokens=4)
    asked = command.replace("http://127.0.0.1:8000", here.gateway_url)
    asked = re.sub(r"0\.default\.\w+…", receipt.id, asked)
    done = subprocess.run(shlex.split(asked), capture_output=True, text=True, timeout=30, check=True)

    shown = answer_shown_for(command)
    if shown.startswith("{"):
        assert json.loads(done.stdout).keys() >= set(re.findall(r'"(\w+)":', shown))
    else:
        assert done.stdout.startswith(f"{shown}\n")
        assert done.stdout.rstrip().splitlines()[-1].startswith("data: ")


def _revokes_a_key(here: Place, command: str, _producer: Producer) -> None:
    created = here.run("producer keys create --tenant acme --json")
    _succeeds(here, command.replace("KEY_ID", json.loads(created.stdout)["id"]), _producer)


def _wait_for_row(here: Place, job_id: str) -> None:
    engine = sa.create_engine(f"sqlite:///{here.folder / 'state' / 'history.db'}")
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        with engine.connect() as connection:
            found = connection.execute(sa.text("SELECT state FROM jobs WHERE id = :id"), {"id": job_id}).scalar()
        if found == "done":
            engine.dispose()
            return
        time.sleep(0.05)
    raise TimeoutError(job_id)


def _about_a_schedule(here: Place, command: str, producer: Producer) -> None:
    """After the command that adds it, which another process of the suite may have run."""
    add = next(one for one in commands() if one.startswith("producer schedules add report "))
    _succeeds(here, add, producer)
    _succeeds(here, command, producer)


Runner = Callable[[Place, str, Producer], None]
RUNNERS: dict[str, Runner] = {
    "make ": _is_a_target,
    **dict.fromkeys(ONLY_PARSED, _is_parsed),
    "pip install ": _installs_extras_that_exist,
    "worker start --cpu": _is_running_already,
    "worker start --gpu": _says_what_it_lacks,
    "worker start --model ./SmolLM2": _says_what_it_lacks,
    "worker callbacks": _runs_until_stopped,
    "producer server": _succeeds,
    "producer serve": _runs_until_stopped,
    "worker ": _succeeds,
    "producer submit": _submits_a_file,
    "producer follow": _follows_a_batch,
    "producer jobs show": _about_a_job_in_the_history,
    "producer stream": _about_a_done_job,
    "producer result": _about_a_done_job,
    "producer cancel": _cancels,
    "producer ask": _answers,
    "producer queues pause": _pauses,
    "producer requeue JOB_ID": _requeues,
    "producer keys revoke KEY_ID": _revokes_a_key,
    **dict.fromkeys(
        (f"producer schedules {verb}" for verb in ("next", "pause", "resume", "remove")), _about_a_schedule
    ),
    "producer ": _succeeds,
    "curl ": _asks_the_gateway,
    "export ": _sets_a_variable,
}


SLOW = (
    "worker doctor", "worker audit", "worker callbacks", "worker migrate", "worker fleet", "worker start --gpu 0",
    "producer keys ", "producer serve --queue", "producer queues pause", "producer jobs list --",
)  # fmt: skip
"""Commands that the long suite runs: each takes a second or more, and has tests of its own."""


def is_slow(command: str) -> bool:
    """Whether only the long suite runs a command."""
    return command.startswith(SLOW) or ("--gpu" in command and "--queue" in command)


class TestGivenTheReadmeAndTheGuide:
    @pytest.mark.parametrize(
        "command", fast_only([c for c in commands() if not is_slow(c)], [c for c in commands() if is_slow(c)])
    )
    def test_when_a_command_is_run_then_it_does_what_it_says(
        self, command: str, place: Place, producer: Producer
    ) -> None:
        runner = next(run for prefix, run in RUNNERS.items() if command.startswith(prefix))

        runner(place, command, producer)

    def test_when_a_line_of_a_bulk_file_is_shown_then_the_default_service_runs_it(self, place: Place) -> None:
        lines = example_lines()
        (place.folder / "examples.jsonl").write_text("\n".join(lines) + "\n")

        done = place.run("producer submit examples.jsonl --wait -o shown.jsonl")

        assert done.returncode == 0, done.stdout + done.stderr
        assert len(lines) > 3
        answers = [json.loads(line) for line in (place.folder / "shown.jsonl").read_text().splitlines()]
        assert [answer["response"]["status_code"] for answer in answers] == [200] * len(lines)

    @pytest.mark.parametrize("snippet", snippets())
    def test_when_a_python_snippet_is_run_then_it_prints_text(self, snippet: str, place: Place) -> None:
        if is_of_openai(snippet):
            snippet = snippet.replace("http://127.0.0.1:8000", place.gateway_url)

        done = place.run_snippet(snippet)

        assert done.returncode == 0, done.stderr
        assert len(done.stdout) > 5

    @pytest.mark.parametrize("page", fast_only(["embeddings", "structured-output"], ["tools"]))
    def test_when_the_snippets_of_a_page_are_run_in_its_order_then_none_fails(self, page: str, place: Place) -> None:
        text = (ROOT / "docs" / "guide" / f"{page}.md").read_text()
        program = "\n".join([PRODUCER_OF_PAGES, *re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)])

        done = place.run_snippet(program.replace("http://localhost:8000", place.gateway_url))

        assert done.returncode == 0, done.stderr

    def test_when_a_snippet_is_part_of_a_backend_then_it_is_parsed(self) -> None:
        snippets = [snippet for snippet in blocks("python") if not is_standalone(snippet)]

        for snippet in snippets:
            compile(snippet, "snippet", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

        assert len(snippets) == 2

    def test_when_the_sql_is_run_then_it_answers(self, place: Place, producer: Producer) -> None:
        receipt = producer.submit("Once upon a time", max_tokens=4)
        producer.result(receipt, timeout_s=30)
        _wait_for_row(place, receipt.id)
        engine = sa.create_engine(f"sqlite:///{place.folder / 'state' / 'history.db'}")

        with engine.connect() as connection:
            rows = [tuple(row) for query in blocks("sql") for row in connection.execute(sa.text(query))]
        engine.dispose()

        # One query counts the jobs of each tenant: this one, and those of tests before.
        [(_, num_jobs, ttft_s, _, num_tokens)] = [row for row in rows if len(row) == 5 and row[0] == "default"]
        assert num_jobs >= 1
        assert num_tokens >= 4
        assert 0 < ttft_s < START_TIMEOUT_S


class TestGivenNoGpu:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
    def test_when_a_gpu_is_asked_for_then_the_worker_says_so_and_exits_with_2(self, place: Place) -> None:
        done = place.run("worker start --gpu 0")

        assert done.returncode == 2
        assert "there is no GPU 0" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
