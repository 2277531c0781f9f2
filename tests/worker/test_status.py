"""The table of `worker status`, from the fields of heartbeats."""

from sluice.worker.status import table_of

WORKER = {"worker": "0123456789ab", "name": "one", "model": "m", "device": "cuda:0", "state": "pulling"}
WHERE = "queue 'default' at redis://example:6379"


class TestGivenAWorkerOnAGpu:
    def test_when_torch_replaces_some_of_its_kernels_then_a_warning_names_them(self) -> None:
        lines = table_of([WORKER | {"kernels": "rms_norm sample"}], WHERE).splitlines()

        assert lines[2:] == ["warning: worker 01234567: torch's operators replace the kernels of rms_norm sample"]

    def test_when_all_its_kernels_work_then_there_is_no_warning(self) -> None:
        assert len(table_of([WORKER | {"kernels": "-"}, WORKER], WHERE).splitlines()) == 3


class TestGivenNoWorker:
    def test_when_the_table_is_made_then_it_names_queue_and_server(self) -> None:
        assert table_of([], WHERE) == "no living workers on queue 'default' at redis://example:6379"
