"""The journal of a bulk file after a crash."""

from pathlib import Path

import pytest

from sluice.protocol.bulk_files.journal import Journal
from sluice.protocol.wire import JobId


class TestGivenAJournalOfARunOnTwoPartitions:
    @pytest.mark.parametrize(("is_new_run", "partitions"), [(False, 2), (True, 4)])
    def test_when_a_run_on_four_follows_then_only_a_new_one_records_them(
        self, tmp_path: Path, *, is_new_run: bool, partitions: int
    ) -> None:
        path = tmp_path / "b.journal"
        path.write_text('run 0\nasked {"partitions": 2}\nline 1\n0.acme.1f0c6a\n')

        with Journal(path, is_new_run=is_new_run, asked={"partitions": 4}) as journal:
            assert journal.partitions == (None if is_new_run else 2)
            journal.add(JobId("0.acme.77aa01"), 3)

        assert f'asked {{"partitions": {partitions}}}\nline 3\n' in path.read_text()


class TestGivenAJournalWhoseLastLineIsCutShort:
    def test_when_it_is_continued_then_the_line_is_no_id_of_another_job(self, tmp_path: Path) -> None:
        path = tmp_path / "b.journal"
        path.write_text("run 2\n0.acme.1f0c6a\n0.acme.77")

        with Journal(path) as journal:
            assert (journal.run, len(journal), "1f0c6a" in journal) == (2, 1, True)
            journal.add(JobId("0.acme.77aa01"), 3)

        assert path.read_text() == "run 2\n0.acme.1f0c6a\nline 3\n0.acme.77aa01\n"
