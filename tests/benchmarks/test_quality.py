"""What rounding costs: the row of a comparison, and the whole script on one question of each kind."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.engine.quality import answer_logits, load, print_row
from sluice.kernels.native import library

ROOT = Path(__file__).parent.parent.parent


class TestGivenLogits:
    LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.5]])
    RIGHT = torch.tensor([0, 1])

    def test_when_nothing_is_rounded_then_nothing_is_lost(self, capsys: pytest.CaptureFixture[str]) -> None:
        print_row("same", self.LOGITS, self.LOGITS, self.RIGHT)

        assert "logit 0.0000 mean 0.00 max | KL 0.000000 mean" in (printed := capsys.readouterr().out)
        assert "same best token 100.00%" in printed

    def test_when_one_of_two_best_tokens_changes_then_it_shows(self, capsys: pytest.CaptureFixture[str]) -> None:
        rounded = self.LOGITS.clone()
        rounded[1, 2] = 1.5

        print_row("rounded", self.LOGITS, rounded, self.RIGHT)

        assert "1.00 max" in (printed := capsys.readouterr().out)
        assert "same best token 50.00%" in printed


class TestGivenTheSmallModel:
    def test_when_an_answer_is_read_then_each_token_has_logits_robust_to_rounding(self) -> None:
        question_and_answer = list(range(3, 13))

        exact, rounded = (
            answer_logits(load(dtype, "none"), question_and_answer, 4) for dtype in ("float32", "bfloat16")
        )

        assert exact.shape[0] == len(question_and_answer) - 4
        assert 0 < (exact - rounded).abs().max() < 1

    @pytest.mark.long
    def test_when_it_answers_in_both_forms_then_rounding_hardly_shows(self) -> None:
        if library() is None:
            pytest.skip("there is no C compiler")

        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.engine.quality", "--count", "1"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip

        kept = re.findall(r"^(\w+) .* same best token ([\d.]+)%", done.stdout, re.MULTILINE)
        assert [name for name, _ in kept] == ["bfloat16", "int8"]
        assert all(float(share) > 90 for _, share in kept)
