"""The load of the service's benchmarks: the requests of the bare engine, as jobs."""

from collections.abc import Sequence

from benchmarks.engine.bare import MAX_NUM_BATCHED_TOKENS, Job
from benchmarks.processes import Server, wait_until
from sluice.producer.client import Producer
from sluice.protocol.jobs import job as one_job

POLL_S = 0.2


def batching(num_seqs: int) -> tuple[str, ...]:
    """Return the worker's flags for the same batching as the bare engine's.

    Without speculation, as the engines that it is compared with: a random model repeats itself, so its next tokens are
    guessed right.
    """
    tokens = str(MAX_NUM_BATCHED_TOKENS)
    off = ("--no-enable-prefix-caching", "--speculation", "off")
    return ("--max-num-seqs", str(num_seqs), "--max-num-batched-tokens", tokens, *off)


def run_through(server: Server, producer: Producer, jobs: Sequence[Job]) -> float:
    """Run jobs that are submitted at once; return seconds from the first scheduled to the last end, by the server."""
    submitted = [one_job(job.prompt, max_tokens=job.num_output_tokens, temperature=0, ignore_eos=True) for job in jobs]
    before = server.count("done")
    receipts = [str(answer) for answer in producer.submit_many(submitted)]
    # Poll rarely and cheaply: on two cores a client that asks for all would be measured with the service.
    wait_until(lambda: server.count("done") - before == len(jobs), "all jobs to be done", every_s=POLL_S)
    views = [view for view in producer.views(receipts) if view is not None]
    return (max(v.ended_ms or 0 for v in views) - min(v.first_scheduled_ms or 0 for v in views)) / 1000
