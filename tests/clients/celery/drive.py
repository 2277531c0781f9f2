"""A Producer in Celery tasks that a soft time limit ends: `drive.py URL FOLDER`.

Prints one JSON object: how many tasks were ended by the limit, and how the calls after it were answered.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded

from sluice.producer import Producer
from tests.late_replies import late_replies

NUM_TASKS = 12
LATE_S = 0.05

FOLDER = Path(os.environ.get("FOLDER") or sys.argv[2])
app = Celery("drive", broker="filesystem://", backend=f"file://{FOLDER}/results")
app.conf.update(
    worker_prefetch_multiplier=1,
    broker_transport_options={f"{name}_folder{end}": str(FOLDER / name) for name, end in
                              (("data", "_in"), ("data", "_out"), ("control", ""))},
)  # fmt: skip
producer = Producer(os.environ["LATE"]) if "LATE" in os.environ else None  # made before Celery forks


@app.task(name="look", soft_time_limit=1)
def look_until_the_limit(asked, others):
    try:
        while True:
            producer.status(asked)
    except SoftTimeLimitExceeded:
        return [producer.status(other).id == other for other in others]


def main():
    url = sys.argv[1]
    for name in ("data", "control", "results"):
        (FOLDER / name).mkdir()
    with late_replies(Path(url.removeprefix("unix://")), LATE_S) as late:
        environ = {**os.environ, "LATE": late, "FOLDER": str(FOLDER)}
        here = Path(__file__).parent
        command = [
            sys.executable,
            "-m",
            "celery",
            "-A",
            "drive",
            "worker",
            "--pool",
            "prefork",
            "-c",
            "4",
            "-l",
            "error",
        ]
        with (FOLDER / "celery.log").open("wb") as log:
            worker = subprocess.Popen(command, cwd=here, env=environ, stdout=log, stderr=log)
        try:
            with Producer(url) as plain:
                asked, *others = [str(plain.submit(f"prompt {number}")) for number in range(4)]
            sent = [look_until_the_limit.delay(asked, others) for _ in range(NUM_TASKS)]
            found = [one.get(timeout=60) for one in sent]
        finally:
            worker.terminate()
            worker.wait(30)
    print(json.dumps({"ended": len(found), "answers": sum(map(len, found)), "right": sum(map(sum, found))}))


if __name__ == "__main__":
    main()
