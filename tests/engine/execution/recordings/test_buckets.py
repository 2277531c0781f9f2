"""The recorded step that a batch takes, and its padding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.batch import Batch, PaddingRow, ScheduledRow
from sluice.engine.execution.recordings.buckets import MIXED_TOKENS, Buckets, nothing, pad


def scheduled(start: int, num_tokens: int) -> ScheduledRow:
    return ScheduledRow(slot=0, sequence_id=0, start=start, num_tokens=num_tokens, samples=True)


def decodes(count: int, context: int = 100) -> Batch:
    return Batch(tuple(scheduled(context - 1, 1) for _ in range(count)))


BUCKETS = Buckets(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=40_960)


class TestGivenDecodes:
    @pytest.mark.parametrize(
        ("count", "size"), [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 24), (200, 200), (255, 256), (256, 256)]
    )
    def test_when_counted_then_they_take_the_next_size(self, count: int, size: int) -> None:
        bucket = BUCKETS.of(decodes(count))

        assert bucket is not None
        assert bucket[:3] == (size, size, 1)

    @pytest.mark.parametrize(
        ("context", "laid_out_for"), [(1, 2048), (2048, 2048), (2049, 8192), (32_769, 40_960), (40_960, 40_960)]
    )
    def test_when_a_context_is_long_then_all_are_laid_out_for_it(self, context: int, laid_out_for: int) -> None:
        bucket = BUCKETS.of(Batch((scheduled(0, 1), scheduled(context - 1, 1))))

        assert bucket is not None
        assert bucket.max_context_len == laid_out_for

    def test_when_fewer_may_run_than_a_size_has_then_the_largest_is_as_many_as_may(self) -> None:
        few = Buckets(max_num_seqs=11, max_num_batched_tokens=2048, max_model_len=4096)

        assert [bucket.num_rows for bucket in few.first if bucket.max_query_len == 1] == [11, 8, 4, 2, 1]
        assert [few.of(decodes(count)).num_rows for count in (8, 9, 11)] == [8, 11, 11]  # pyright: ignore[reportOptionalMemberAccess]


class TestGivenAStart:
    def test_when_steps_are_recorded_then_contexts_are_short_and_the_largest_comes_first(self) -> None:
        buckets = Buckets(max_num_seqs=400, max_num_batched_tokens=8192, max_model_len=40_960)

        mixed = [bucket.num_tokens for bucket in buckets.first if bucket.max_query_len > 1]
        decodes = [bucket.num_tokens for bucket in buckets.first if bucket.max_query_len == 1]

        assert {bucket.max_context_len for bucket in buckets.first} == {2048}
        assert mixed == sorted(MIXED_TOKENS, reverse=True)
        assert decodes[:3] == [400, 256, 248]
        assert decodes[-3:] == [4, 2, 1]
        assert buckets.most_tokens == 2048


class TestGivenAnyBatch:
    @given(
        sizes=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 700)), min_size=1, max_size=64),
        num_places=st.integers(0, 300),
        max_model_len=st.integers(1, 9000),
    )
    def test_when_it_has_a_bucket_then_it_is_padded_to_its_very_sizes_behind_what_it_was(
        self, sizes: list[tuple[int, int]], num_places: int, max_model_len: int
    ) -> None:
        sizes = [(start, num_tokens) for start, num_tokens in sizes if start + num_tokens <= max_model_len] or [(0, 1)]
        buckets = Buckets(
            max_num_seqs=len(sizes) + num_places, max_num_batched_tokens=2048, max_model_len=max_model_len
        )
        batch = Batch(tuple(scheduled(start, num_tokens) for start, num_tokens in sizes), num_joined=1)

        bucket = buckets.of(batch)

        if batch.num_tokens > MIXED_TOKENS[-1]:
            assert bucket is None, "it is long enough to be launched kernel by kernel"
        if bucket is None:
            assert batch.num_tokens > MIXED_TOKENS[-1] or max_model_len < MIXED_TOKENS[-1]
            return
        assert bucket.num_rows <= bucket.num_tokens, "each row has the logits of one of its tokens"
        for padded in (pad(batch, bucket), nothing(bucket)):
            assert padded.num_tokens + padded.num_padding_tokens == bucket.num_tokens
            assert len(padded.rows) + len(padded.padding) == bucket.num_rows
            rows = [(row.num_tokens, row.start + row.num_tokens) for row in padded.rows]
            rows += [(row.num_tokens, row.context_len) for row in padded.padding]
            assert max(size for size, _ in rows) <= bucket.max_query_len
            assert max(context for _, context in rows) <= bucket.max_context_len <= max_model_len
            num_logits = len(padded.rows) + sum(row.num_tokens == 1 for row in padded.padding)
            assert num_logits <= bucket.num_rows
        assert pad(batch, bucket).rows == batch.rows
        assert pad(batch, bucket).num_joined == 1

    def test_when_nothing_is_asked_for_then_a_bucket_of_padding_alone_has_its_sizes(self) -> None:
        for bucket in BUCKETS.first:
            padded = nothing(bucket)
            assert padded.num_padding_tokens == bucket.num_tokens
            assert len(padded.padding) == bucket.num_rows

    def test_when_it_is_padded_by_its_discipline_or_empty_then_it_has_none(self) -> None:
        assert BUCKETS.of(Batch(())) is None
        assert BUCKETS.of(Batch((scheduled(4, 1),), padding=(PaddingRow(1, 5),))) is None
