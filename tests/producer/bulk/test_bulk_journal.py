"""The journal of a bulk file after a crash."""

from pathlib import Path

from sluice.producer.contract.bulk.journal import Journal
from sluice.producer.contract.wire import JobId


class TestGivenAJournalWhoseLastLineIsCutShort:
    def test_when_it_is_continued_then_the_line_is_no_id_of_another_job(self, tmp_path: Path) -> None:
        path = tmp_path / "b.journal"
        path.write_text("run 2\n0.acme.1f0c6a\n0.acme.77")

        with Journal(path) as journal:
            assert (journal.run, len(journal), "1f0c6a" in journal) == (2, 1, True)
            journal.add(JobId("0.acme.77aa01"), 3)

        assert path.read_text() == "run 2\n0.acme.1f0c6a\nline 3\n0.acme.77aa01\n"
