"""The steps of a warm-up: within the limits, of every kind, and run by a real model."""

from pathlib import Path

import pytest

from sluice import worker
from sluice.engine.batch import Batch
from sluice.engine.execution import model_runner
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_planned, plan_load, warm_up
from sluice.engine.execution.start.warm_up import warm_up_batches

FOLDER = Path(worker.__file__).parent / "small_model"


def batches_of(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> list[Batch]:
    return list(
        warm_up_batches(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=16,
        )
    )


class TestGivenLimits:
    @pytest.mark.parametrize("limits", [(256, 8192, 40960), (1, 1, 1), (4, 4, 7), (3, 100, 20), (9, 33, 5000)], ids=str)
    def test_when_steps_are_made_then_each_is_within_them(self, limits: tuple[int, int, int]) -> None:
        max_num_seqs, max_num_batched_tokens, max_model_len = limits

        for batch in batches_of(*limits):
            assert 1 <= len(batch.rows) <= max_num_seqs
            assert batch.num_tokens <= max_num_batched_tokens
            assert all(0 <= one.start < one.start + one.num_tokens <= max_model_len for one in batch.rows)

    def test_when_steps_are_made_then_the_largest_and_the_longest_are_among_them(self) -> None:
        batches = batches_of(256, 8192, 40960)

        assert max(batch.num_tokens for batch in batches) == 8192
        assert {len(batch.rows) for batch in batches} >= {1, 2, 4, 8, 16, 32, 64, 128, 256}
        assert any(len(b.rows) == 256 and b.rows[0].start == 40959 for b in batches)
        assert len({one.sequence_id for b in batches for one in b.rows}) == sum(len(b.rows) for b in batches)


def test_when_a_model_is_warmed_up_then_every_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_load(
        ModelOptions(
            path=FOLDER, num_blocks=80, num_threads=1, max_num_seqs=5, max_num_batched_tokens=40, max_model_len=600
        )
    )
    runner, launched = load_planned(plan), list[int]()
    launch = model_runner.ModelRunner.launch

    def note(self: model_runner.ModelRunner, batch: Batch) -> object:
        launched.append(batch.num_tokens)
        return launch(self, batch)

    monkeypatch.setattr(model_runner.ModelRunner, "launch", note)
    warm_up(runner.decoder, plan)

    assert launched == [batch.num_tokens for batch in batches_of(5, 40, 600)]
