"""A job whose worker was killed, continued by one whose generation_config.json says something else."""

import json
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from sluice.protocol.rows import read_row
from sluice.protocol.wire import (
    JobId,
    JobOptions,
    JobRecord,
    ResolvedOptions,
    decode_events,
    decode_record,
    decode_resolved,
)
from tests.end_to_end.processes import ROOT, WorkerPool, worker_pool
from tests.integration.jobs import KEYS, Ask, field_of, num_on_channel, result_of, submit_all, wait_for_ends, wait_until
from tests.servers import RedisServer

END = 2
ASK = Ask(prompt="Once upon a time", options=JobOptions(logit_bias={END: -100.0}), seed=5)
"""It leaves all to the model, but never says the model's end token."""

FIRST = ResolvedOptions(
    max_tokens=1200, temperature=0.9, top_p=0.95, top_k=50, min_p=0.01, repetition_penalty=1.2, end_token_ids=(END,)
)


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:
    with valkey.client() as client:
        client.hset(KEYS.key("config"), "test_clock_offset_ms", 3_600_000)
        yield client


@pytest.fixture
def workers(valkey: RedisServer, tmp_path: Path, client: Any) -> Generator[WorkerPool]:
    del client
    with worker_pool(valkey.url, tmp_path) as made:
        yield made


def model_with(folder: Path, **generation_config: object) -> str:
    shutil.copytree(ROOT / "worker" / "small_model", folder)
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return str(folder)


def record_of(client: Any, job_id: JobId) -> JobRecord:
    """As the history would get it."""
    events = [event for _, fields in client.xrange(KEYS.key("outbox")) for event in decode_events(fields[b"e"])]
    (record,) = (one.fields["record"] for one in events if one.kind == "ended" and one.job_id == job_id)
    assert isinstance(record, bytes)
    return decode_record(record)


class TestGivenAWorkerThatIsKilledInAJob:
    """The next worker's generation config has other defaults, fewer tokens, and nearly every token as its end."""

    @pytest.mark.long
    def test_when_that_one_continues_then_the_output_is_that_of_the_first_alone(
        self, workers: WorkerPool, client: Any, tmp_path: Path
    ) -> None:
        mine = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.2}
        first = model_with(tmp_path / "first", max_new_tokens=1200, eos_token_id=END, **mine)
        other = model_with(tmp_path / "other", max_new_tokens=50, temperature=0.1, eos_token_id=[*range(3, 500)])
        # Rounds of 20 ms though nobody reads, and over a second of tokens: else it may end before it is killed.
        (killed,) = workers.start_all(1, MODEL=first, DTYPE="float32", UNREAD_INTERVAL_S="0")
        (undisturbed,) = submit_all(client, [ASK])
        wait_for_ends(client, [undisturbed])
        (job_id,) = submit_all(client, [ASK])
        wait_until(lambda: num_on_channel(client, job_id) >= 100, "it speaks")

        killed.kill()
        assert 100 <= num_on_channel(client, job_id) < 1200
        assert decode_resolved(read_row(client.get(KEYS.job(job_id))).rare[b"resolved"]) == FIRST
        workers.start_all(1, MODEL=other, DTYPE="float32")
        wait_for_ends(client, [job_id])

        assert result_of(client, job_id).choices == result_of(client, undisturbed).choices
        assert len(result_of(client, job_id).choices[0].token_ids) == 1200
        record = record_of(client, job_id)
        assert (record.resolved, record.exactness) == (FIRST, "same_fingerprint")
        assert not field_of(client, job_id, "resolved"), "the record has it now"
