"""Changes of held jobs by the queue: a flag to end one, a lost lease. Called by exchange and heartbeat."""

from sluice.protocol.states import JobState
from sluice.worker.jobs.held_job import HeldJob
from sluice.worker.serve.context import WorkerContext


def flag(context: WorkerContext, job: HeldJob, state: JobState) -> None:
    """End a job with `state`: now if the engine has it, before its admission otherwise."""
    with context.leases.lock:
        if job.flag(state):
            context.log.info("job flagged", job_id=job.id, attempt=job.leased.attempt, state=state)
            if job.was_admitted:
                context.mailbox.cancel([job.request_id])


def lose(context: WorkerContext, job: HeldJob, why: str) -> bool:
    """Release a job whose lease is lost, and drop its request; return False if it was not held."""
    if not context.leases.remove(job):
        return False
    context.mailbox.lose([job.request_id])
    context.meters.num_jobs_lost += 1
    context.log.warning("job lost", job_id=job.id, attempt=job.leased.attempt, why=why)
    return True
