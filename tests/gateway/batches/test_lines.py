"""The lines of a batch's file: which are refused, and which jobs the others become."""

import gzip
import io
from dataclasses import replace
from typing import BinaryIO

import pytest

from sluice.gateway.batches.batch import StoredBatch, window_of
from sluice.gateway.batches.lines import MAX_ERRORS, FileCheck, LineJobsOfBatch, Names, lines_from
from sluice.protocol.bulk_files.input import BadLine
from sluice.protocol.calls import NewJob
from tests.gateway.batches.processes import ENDPOINT, chat_line, encoded, numbered


def batch_of() -> StoredBatch:
    """A batch of two partitions."""
    return StoredBatch(
        id="batch_0123456789abcdef01234567",
        tenant="acme",
        queue="default",
        partitions=2,
        endpoint=ENDPOINT,
        input_file="file-1",
        window="24h",
        created_ms=0,
        expires_ms=1,
    )


def no_tick() -> None:
    """Renew nothing."""


def checked(batch: StoredBatch, file: BinaryIO) -> FileCheck:
    """The check of a whole file."""
    check = FileCheck(batch)
    assert check.run(file, no_tick)
    return check


def jobs_from(batch: StoredBatch, names: Names, content: bytes) -> list[NewJob]:
    """The jobs of the lines that the batch has not submitted."""
    jobs = LineJobsOfBatch(batch)
    found = [line.jobs(jobs) for line in lines_from(batch, names, io.BytesIO(content))]
    return [job for made in found if not isinstance(made, BadLine) for job in made]


class TestGivenAFileWithBadLines:
    @pytest.mark.parametrize(
        ("bad", "code"),
        [
            (b"{not JSON}", "invalid_json"),
            (b"\xff", "invalid_utf8"),
            (b"[1]", "invalid_json"),
            (encoded([chat_line("c-0")]).strip(), "duplicate_custom_id"),
            (encoded([{**chat_line("x"), "custom_id": None}]).strip(), "missing_custom_id"),
            (encoded([{**chat_line("x"), "custom_id": 7}]).strip(), "invalid_custom_id"),
            (encoded([{**chat_line("x"), "url": "/v1/other"}]).strip(), "invalid_url"),
            (encoded([{**chat_line("x"), "url": None}]).strip(), "missing_url"),
            (encoded([{**chat_line("x"), "method": "GET"}]).strip(), "invalid_method"),
            (encoded([chat_line("x", model="other")]).strip(), "mismatched_model"),
            (encoded([chat_line("x", no_such_option=1)]).strip(), "unknown_parameter"),
            (encoded([chat_line("x", temperature=-1)]).strip(), "invalid_request"),
            (encoded([chat_line("x", stream=1)]).strip(), "invalid_request"),
            (b'{"custom_id": "x", "prompt": "plain"}', "missing_body"),
        ],
    )
    def test_when_it_is_checked_then_the_line_is_named(self, bad: bytes, code: str) -> None:
        file = io.BytesIO(numbered(2) + b"\n" + bad + b"\n")

        found = checked(batch_of(), file)

        assert [(error.number, error.code) for error in found.errors] == [(4, code)]

    def test_when_a_line_is_for_the_other_endpoint_then_it_is_refused(self) -> None:
        line = {**chat_line("x"), "url": "/v1/completions"}  # its body is no completion either

        found = checked(batch_of(), io.BytesIO(encoded([line])))

        assert [(error.code, error.param) for error in found.errors] == [("mismatched_url", "url")]

    def test_when_a_line_has_no_url_then_the_advice_is_for_batches(self) -> None:
        line = {**chat_line("x"), "url": None}

        [error] = checked(batch_of(), io.BytesIO(encoded([line]))).errors

        assert (error.code, error.param) == ("missing_url", "url")
        assert "the batch's endpoint, /v1/chat/completions" in error.message

    def test_when_a_value_is_out_of_range_then_param_names_it(self) -> None:
        found = checked(batch_of(), io.BytesIO(encoded([chat_line("x", max_tokens=None, max_completion_tokens=0)])))

        assert [(error.code, error.param) for error in found.errors] == [("invalid_request", "max_completion_tokens")]

    def test_when_it_is_compressed_then_it_is_no_json(self) -> None:
        found = checked(batch_of(), io.BytesIO(gzip.compress(numbered(2), mtime=0)))

        assert {error.code for error in found.errors} <= {"invalid_utf8", "invalid_json"}
        assert found.errors

    def test_when_all_are_bad_then_only_the_first_are_listed(self) -> None:
        found = checked(batch_of(), io.BytesIO(b"x\n" * 2 * MAX_ERRORS))

        assert len(found.errors) == MAX_ERRORS

    @pytest.mark.parametrize("content", [b"", b"\n \n"])
    def test_when_it_has_no_requests_then_that_is_the_error(self, content: bytes) -> None:
        found = checked(batch_of(), io.BytesIO(content))

        assert [error.code for error in found.errors] == ["empty_file"]


class TestGivenAValidFile:
    def test_when_it_is_read_from_a_place_on_then_jobs_are_the_same(self) -> None:
        content = numbered(3) + b"\n" + encoded([chat_line("last")])
        batch = batch_of()

        found = checked(batch, io.BytesIO(content))
        whole = jobs_from(batch, found.names, content)
        behind_two = len(b"".join(content.splitlines(keepends=True)[:2]))
        skipped = jobs_from(replace(batch, submitted=2), found.names, content)
        sought = jobs_from(replace(batch, submitted=2, file_offset=behind_two), found.names, content)

        assert whole[2:] == skipped == sought
        assert len({job.id for job in whole}) == 4
        assert {job.id.split(".")[1] for job in whole} == {"acme"}
        assert (found.names.custom_ids, found.names.numbers) == (("c-0", "c-1", "c-2", "last"), (1, 2, 3, 5))
        assert found.model == "null"


class TestGivenACompletionWindow:
    @pytest.mark.parametrize(("text", "hours"), [("24h", 24), ("1h", 1), ("7d", 168)])
    def test_when_it_is_hours_or_days_then_it_is_a_time(self, text: str, hours: int) -> None:
        found = window_of(text)

        assert found is not None
        assert found.total_seconds() == hours * 3600

    @pytest.mark.parametrize("text", ["", "h", "24", "0h", "1.5h", "999999d", "24H", "24h\n", "-1h"])
    def test_when_it_is_something_else_then_it_is_none(self, text: str) -> None:
        assert window_of(text) is None


class TestGivenACheckInSlices:
    @pytest.mark.parametrize(
        "content",
        [
            numbered(3) + b"\n\n" + encoded([chat_line("last")]),
            encoded([chat_line("c-0"), chat_line("x", model="other"), chat_line("c-0"), chat_line("y", stream=True)]),
            encoded([chat_line("x", stream=True), chat_line("x"), chat_line("y"), {}]),
            b"\n \n",
            b"",
        ],
    )
    def test_when_each_has_one_line_then_it_finds_what_a_whole_check_does(self, content: bytes) -> None:
        whole = checked(batch_of(), io.BytesIO(content))
        slices: list[bytes] = []

        while not (check := FileCheck(batch_of(), slices)).run(io.BytesIO(content), no_tick, for_s=0):
            slices.append(check.new_lines())

        assert len(slices) == sum(bool(line.strip()) for line in content.splitlines())
        assert (check.names, check.errors, check.model) == (whole.names, whole.errors, whole.model)

    def test_when_slices_become_one_then_it_has_what_they_had(self) -> None:
        content = encoded([chat_line("c-0"), chat_line("x", stream=True), chat_line("c-1"), chat_line("c-2"), {}])
        batch, whole = batch_of(), checked(batch_of(), io.BytesIO(content))
        slices: list[bytes] = []

        while not (check := FileCheck(batch, slices)).run(io.BytesIO(content), no_tick, for_s=0):
            slices = [*slices[:1], check.new_lines(since=min(1, len(slices)))]

        assert len(slices) == 2
        assert (check.names, check.errors, check.model) == (whole.names, whole.errors, whole.model)

    def test_when_a_slice_is_cut_short_then_it_is_refused(self) -> None:
        check = FileCheck(batch_of())
        check.run(io.BytesIO(numbered(2)), no_tick, for_s=0)

        for data in (check.new_lines()[:-9], b"{}", b"[]"):
            with pytest.raises(ValueError, match=r".*"):
                FileCheck(batch_of(), [data])
