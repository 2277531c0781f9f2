"""Take pictures of the gateway's page: a gateway, two workers with jobs, and Chromium without a window.

    make screenshots

Writes docs/images/page-*.png. Needs Chromium (`apt install chromium`).
"""

import os
import random
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "images"
NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
WIDE = (1200, 1000)
LOAD_S = 180.0
URL = "http://127.0.0.1:8078"
WORKER = ("sluice.worker", "start", "--cpu", "--metrics-port", "0")
SLOW = "null?step_s=0.02"
QUESTIONS = ("What is 12 + 30?", "Count from 3 to 9.", "Tell me a story about a fox.", "What is the capital of France?")


@contextmanager
def running(log: Path, *command: str, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a module of ours as a process, and stop it at the end."""
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", *command], stdout=stream, stderr=stream, env={**os.environ, **settings}
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_for_gateway() -> None:
    """Wait until the gateway answers."""
    deadline_s = time.monotonic() + 60
    while not is_ready():
        if time.monotonic() > deadline_s:
            raise SystemExit("the gateway does not answer")
        time.sleep(0.2)


def is_ready() -> bool:
    """Return whether the gateway answers."""
    try:
        with urllib.request.urlopen(f"{URL}/readyz", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def submit_jobs(for_s: float) -> None:
    """Submit jobs of three tenants for a while."""
    from sluice.producer import Producer

    draw = random.Random(7)
    until_s = time.monotonic() + for_s
    with Producer() as chat, Producer(queue="bulk") as bulk:
        while time.monotonic() < until_s:
            tenant = draw.choice(("acme", "globex", "initech"))
            chat.submit(messages=draw.choice(QUESTIONS), tenant=tenant, max_tokens=60, priority=draw.choice((0, 5, 9)))
            batch = draw.choice(("nightly", "eval-7", None))
            bulk.submit("once upon a time", tenant=tenant, max_tokens=draw.choice((40, 200, 300)), batch=batch)
            if draw.random() < 0.04:
                bulk.submit("x" * 100_000, tenant=tenant)
            time.sleep(draw.expovariate(2.0))


def kill_under_a_job(worker: subprocess.Popen[bytes], log: Path) -> str:
    """Submit a long job, kill its worker once another one lives, wait for its end, and return its id."""
    from sluice.producer import Producer

    with Producer(queue="bulk") as bulk:
        while bulk.queue()[0].running_jobs:
            time.sleep(0.2)
        job = bulk.submit("once upon a time", tenant="acme", max_tokens=1000, batch="nightly", temperature=0.7)
        with running(log, *WORKER, "--queue", "bulk", SLUICE_MODEL=SLOW):
            while len(bulk.queue()[0].workers) < 2:
                time.sleep(0.2)
            for process in (psutil.Process(worker.pid), *psutil.Process(worker.pid).children(recursive=True)):
                process.kill()
            bulk.result(job, timeout_s=120)
            time.sleep(5)  # until the history has its end
    return job.id


def shoot(browser: Browser, name: str, path: str) -> None:
    """Take one picture in each colour scheme."""
    for scheme in ("light", "dark"):
        page = browser.new_page(
            viewport={"width": WIDE[0], "height": WIDE[1]}, color_scheme="dark" if scheme == "dark" else "light"
        )
        page.goto(f"{URL}{path}")
        page.wait_for_timeout(1500)
        taken = Image.open(BytesIO(page.screenshot()))
        # A palette is a third of the size, and the difference is not visible.
        few = taken.convert("RGB").quantize(160, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        few.save(IMAGES / f"page-{name}-{scheme}.png", optimize=True)
        page.close()


def main() -> None:
    """Start everything, work for a while, and take the pictures."""
    from sluice.protocol.redis import embedded

    chromium = next((path for name in NAMES if (path := shutil.which(name)) is not None), None)
    if chromium is None:
        raise SystemExit("no Chromium is installed: apt install chromium")
    with TemporaryDirectory() as folder, ExitStack() as stack:
        os.environ["SLUICE_STATE_DIR"] = folder
        stack.callback(embedded.stop, Path(folder))
        log = Path(folder, "log")
        stack.enter_context(running(log, *WORKER))
        bulk = stack.enter_context(running(log, *WORKER, "--queue", "bulk", SLUICE_MODEL=SLOW))
        serve = ("sluice.producer", "serve", "--port", URL.rpartition(":")[2], "--queue", "default", "--queue", "bulk")
        stack.enter_context(running(log, *serve))
        wait_for_gateway()
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        submit_jobs(LOAD_S)
        shoot(browser, "overview", "/ui/")
        job_id = kill_under_a_job(bulk, log)
        shoot(browser, "job", f"/ui/jobs/{job_id}")
        browser.close()


if __name__ == "__main__":
    main()
