"""A worker of the null model that notes when a job is first scheduled, and when a round trip is sent; else as ever.

    PEER_LEDGER=FILE python -m benchmarks.probed_worker start --cpu --model null ...

It writes what the peers' jobs write (`peers/queues/ledger.py`): a name of 16 bytes and CLOCK_MONOTONIC in ns. The name
is the job's random part, or `SENT` for a round trip.
"""

from typing import Any

from benchmarks.peers.queues import ledger
from engine.batch import Batch
from engine.executor import Computed
from engine.null_model import NullModel
from producer.contract.wire import split_job_id
from worker import trips
from worker.cli import main

SENT = "-" * ledger.NAME_CHARS


def name_of(job_id: str) -> str:
    """What a job is called in the ledger."""
    return split_job_id(job_id)[2][: ledger.NAME_CHARS]


def _install() -> None:
    launch, send = NullModel.launch, trips.run_many

    def noting_launch(self: NullModel, batch: Batch) -> Computed:
        for scheduled in batch.sequences:
            if scheduled.start == 0:
                ledger.record(name_of(scheduled.sequence.request_id.partition("#")[0]))
        return launch(self, batch)

    def noting_send(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - handed through
        ledger.record(SENT)
        return send(*arguments, **options)

    NullModel.launch = noting_launch
    trips.run_many = noting_send


if __name__ == "__main__":
    _install()
    main()
