"""The load of the service's benchmarks: the requests of the bare engine, as jobs."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engine.bare import MAX_NUM_BATCHED_TOKENS, Job, make_jobs
from benchmarks.service.parts import embedded_client, num_done_cheaply, wait_until
from sluice.producer.client import Producer
from sluice.producer.contract.jobs import job as one_job

NULL_VOCABULARY = 256
POLL_S = 0.2


def jobs_of(num_seqs: int, *, is_null: bool = False) -> list[Job]:
    """Return the requests of a case; a null model knows bytes only."""
    jobs = make_jobs()
    jobs = jobs if num_seqs > 1 else [Job(jobs[-2].prompt[:128], 128)] * 4
    if not is_null:
        return jobs
    return [Job(tuple(one % NULL_VOCABULARY for one in job.prompt), job.num_output_tokens) for job in jobs]


def batching(num_seqs: int) -> tuple[str, ...]:
    """Return the worker's flags for the same batching as the bare engine's.

    Without speculation, as the engines that it is compared with: a random model repeats itself, so its next tokens are
    guessed right.
    """
    tokens = str(MAX_NUM_BATCHED_TOKENS)
    off = ("--no-enable-prefix-caching", "--speculation", "off")
    return ("--max-num-seqs", str(num_seqs), "--max-num-batched-tokens", tokens, *off)


def run_jobs(producer: Producer, jobs: Sequence[Job], *, stream: bool = True, read: bool = False) -> float:
    """Run jobs that are submitted at once; return seconds from the first scheduled to the last end, by the server."""
    wanted = [
        one_job(job.prompt, max_tokens=job.num_output_tokens, temperature=0, ignore_eos=True, stream=stream)
        for job in jobs
    ]
    client = embedded_client(Path(os.environ["SLUICE_STATE_DIR"]))
    before = num_done_cheaply(client)
    receipts = [str(answer) for answer in producer.submit_many(wanted)]
    reader = threading.Thread(target=_follow, args=(receipts if read else [],))
    reader.start()
    # Poll rarely and cheaply: on two cores a client that asks for all would be measured with the service.
    wait_until(lambda: num_done_cheaply(client) - before == len(jobs), "all jobs to be done", every_s=POLL_S)
    reader.join()
    views = [view for view in producer.views(receipts) if view is not None]
    return (max(v.ended_ms or 0 for v in views) - min(v.first_scheduled_ms or 0 for v in views)) / 1000


def _follow(receipts: Sequence[str]) -> None:
    with Producer() as producer:
        for _ in producer.stream_many(receipts) if receipts else ():
            pass
