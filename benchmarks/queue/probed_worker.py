"""A worker of the null model that records when a job is first scheduled, and when a round trip is sent.

    PEER_LEDGER=FILE python -m benchmarks.queue.probed_worker start --until-eof --cpu --model null ...

It writes the same ledger as the peers' jobs (`peers/queues/ledger.py`): a name of 16 bytes and CLOCK_MONOTONIC in ns.
The name is the job's random part, or `SENT` for a round trip.
"""

from typing import Any

from benchmarks.peers.queues import ledger
from sluice.engine.batch import Batch
from sluice.engine.executor import Computed
from sluice.engine.null_model import NullModel
from sluice.producer.contract.job_ids import split_job_id
from sluice.worker.cli import main
from sluice.worker.serve import round_trips as trips

SENT = "-" * ledger.NAME_CHARS


def name_of(job_id: str) -> str:
    """Return a job's name in the ledger."""
    return split_job_id(job_id)[2][: ledger.NAME_CHARS]


def _install() -> None:
    launch, send = NullModel.launch, trips.run_many

    def noting_launch(self: NullModel, batch: Batch) -> Computed:
        for admission in batch.admissions:
            ledger.record(name_of(admission.request_id.partition("#")[0]))
        return launch(self, batch)

    def noting_send(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - handed through
        ledger.record(SENT)
        return send(*arguments, **options)

    NullModel.launch = noting_launch
    trips.run_many = noting_send


if __name__ == "__main__":
    _install()
    main()
