"""Checks of the benchmark for a GPU that only a GPU runs in full."""

# torch's and transformers' types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from pathlib import Path

import pytest
import torch

from benchmarks.gpu.checks import parity
from benchmarks.gpu.checks.determinism import ALONE, BLOCK_SIZE, COMPANIES, MAX_MODEL_LEN, Company
from benchmarks.gpu.models import save_small_model


class TestGivenTransformersModel:
    @pytest.mark.long
    def test_when_it_is_run_in_another_dtype_then_its_weights_stay(self, tmp_path: Path) -> None:
        model = save_small_model("llama", tmp_path)
        before = [parameter.clone() for parameter in model.parameters()]

        with torch.inference_mode():
            parity._transformers_logits(model, [[3, 4, 5]], torch.bfloat16)  # pyright: ignore[reportPrivateUsage]

        for parameter, value in zip(model.parameters(), before, strict=True):
            assert parameter.dtype == torch.float32
            assert torch.equal(parameter, value)


class TestGivenACompanyOfARequest:
    @pytest.mark.parametrize("company", [ALONE, *COMPANIES], ids=lambda company: company.name)
    def test_when_it_runs_then_the_longest_sequence_fits_its_cache(self, company: Company) -> None:
        assert company.num_blocks * BLOCK_SIZE >= MAX_MODEL_LEN

    def test_when_it_is_preempted_then_not_all_sequences_fit(self) -> None:
        (preempted,) = [company for company in COMPANIES if company.name == "under preemption"]

        assert preempted.num_blocks * BLOCK_SIZE < preempted.num_at_once * MAX_MODEL_LEN / 2
