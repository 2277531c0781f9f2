"""A deterministic process: on the CPU the native kernels, or an error that says what to change."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from benchmarks.gpu.checks.determinism import ALONE, Company, outputs
from sluice.engine.errors import DeterminismUnavailable, KernelsUnavailable
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start import determinism
from sluice.engine.execution.start.kernel_trial import allowed_kernels, choose
from sluice.engine.execution.start.model_loading import load_model_runner, plan_load
from sluice.engine.models.config import parse_config
from sluice.engine.models.folder import open_model_folder
from sluice.engine.request import Request, Sampling
from sluice.kernels import chain
from sluice.kernels.linear import cpu as linear_cpu
from sluice.kernels.native import library
from sluice.kernels.trial.runner import Verdict
from tests.oracles.tiny_models import GEMMA2, TinyModel

SIZES: dict[str, object] = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 32, "num_hidden_layers": 2}
MODEL = TinyModel("gemma2", {**GEMMA2, **SIZES, "num_attention_heads": 4, "num_key_value_heads": 2})
TOGETHER = Company(name="in chunks, among others", num_at_once=6, max_num_batched_tokens=16, num_blocks=40)


@pytest.fixture(autouse=True)
def _usual_mode_afterwards() -> Iterator[None]:
    yield
    chain.set_deterministic(False)


def options_for(folder: Path, company: Company = ALONE, **options: Any) -> ModelOptions:  # its other fields
    return ModelOptions(
        path=folder,
        is_deterministic=True,
        num_blocks=company.num_blocks,
        num_threads=1,
        max_num_seqs=company.num_at_once,
        max_num_batched_tokens=company.max_num_batched_tokens,
        **options,
    )


@pytest.mark.skipif(library() is None, reason="there is no C compiler")
class TestGivenAModelInBfloat16:
    def test_when_requests_run_among_others_in_chunks_then_outputs_have_the_same_bits(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On a processor that does not multiply bfloat16, too: torch's product would be the faster one."""
        monkeypatch.setattr(linear_cpu, "multiplies_bfloat16", lambda: False)
        MODEL.save(tmp_path)
        random = Random(0)
        asked = [
            Request(
                id=str(n),
                prompt_token_ids=tuple(random.randrange(2, 97) for _ in range(random.randrange(1, 40))),
                sampling=Sampling(seed=n, temperature=n % 3 / 2, max_tokens=5, ignore_eos=True, logprobs=3),
            )
            for n in range(6)
        ]

        alone, together = (
            outputs(load_model_runner(options_for(tmp_path, company, dtype="bfloat16")), asked, company)
            for company in (ALONE, TOGETHER)
        )

        assert together == alone
        assert all(len(tokens) == 5 for tokens in alone.values())

    def test_when_it_is_loaded_then_its_fingerprint_is_that_of_the_usual_mode(self, tmp_path: Path) -> None:
        """A job may go on with either: no token changes by it where the native kernels are the usual ones."""
        MODEL.save(tmp_path)
        options = options_for(tmp_path, dtype="bfloat16")

        fingerprints = [load_model_runner(replace(options, is_deterministic=it)).fingerprint for it in (True, False)]

        assert fingerprints[0] == fingerprints[1]


class TestGivenAModelThatTheNativeKernelsCannotCompute:
    def test_when_it_is_in_float32_then_the_error_says_what_to_set(self, tmp_path: Path) -> None:
        MODEL.save(tmp_path)

        with pytest.raises(DeterminismUnavailable, match="needs a model in bfloat16, and this one is in float32"):
            plan_load(options_for(tmp_path, dtype="float32"))

    def test_when_its_cache_is_in_fp8_then_the_error_says_what_to_set(self, tmp_path: Path) -> None:
        MODEL.save(tmp_path)

        with pytest.raises(DeterminismUnavailable, match="set kv_cache_dtype to auto"):
            plan_load(options_for(tmp_path, dtype="bfloat16", kv_cache_dtype="fp8"))

    def test_when_there_is_no_compiler_then_the_error_says_what_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(determinism, "library", lambda: None)
        MODEL.save(tmp_path)

        with pytest.raises(DeterminismUnavailable, match="install a C compiler"):
            plan_load(options_for(tmp_path, dtype="bfloat16"))

    @pytest.mark.skipif(library() is None, reason="there is no C compiler")
    def test_when_its_rows_are_no_whole_steps_then_the_error_names_them(self, tmp_path: Path) -> None:
        TinyModel("llama", {**SIZES, "num_attention_heads": 4, "intermediate_size": 72}).save(tmp_path)

        with pytest.raises(DeterminismUnavailable, match="cannot multiply rows of 64, 72"):
            plan_load(options_for(tmp_path, dtype="bfloat16"))


class TestGivenAGpu:
    """Only what is chosen, not the kernels."""

    def test_when_no_triton_may_be_used_then_the_error_says_what_to_set(self, tmp_path: Path) -> None:
        MODEL.save(tmp_path)
        folder = open_model_folder(tmp_path)
        options = options_for(tmp_path, device="cuda", kernels="torch")

        with pytest.raises(DeterminismUnavailable, match="set kernels to auto or triton"):
            determinism.check_deterministic(parse_config(folder.config), folder.dtype("auto"), options)

    def test_when_a_kernel_does_not_work_then_nothing_replaces_it(self, tmp_path: Path) -> None:
        chain.set_deterministic(True)
        wrong = Verdict(problems={"rms_norm": "it is wrong"})

        with pytest.raises(KernelsUnavailable, match=r"rms_norm does not work .* Turn deterministic off"):
            choose(wrong, allowed_kernels(options_for(tmp_path)))

        assert chain.stepped_down() == {}

    def test_when_a_process_is_deterministic_then_its_description_says_so(self) -> None:
        usual = chain.description()
        chain.set_deterministic(True)

        assert chain.description() == f"{usual}, deterministic"


class TestGivenTheUsualMode:
    @pytest.mark.skipif(library() is None, reason="there is no C compiler")
    @pytest.mark.parametrize(
        ("dtype", "is_native", "expected"),
        [("bfloat16", True, True), ("bfloat16", False, False), ("float32", True, False)],
    )
    def test_when_a_model_is_planned_then_it_is_bitwise_where_the_native_kernels_are_usual(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, is_native: bool, expected: bool
    ) -> None:
        monkeypatch.setattr(determinism, "multiplies_bfloat16", lambda: is_native)
        MODEL.save(tmp_path)
        plan = plan_load(replace(options_for(tmp_path, dtype=dtype), is_deterministic=False))

        assert plan.is_bitwise is expected

    def test_when_its_determinism_was_asked_for_then_it_is_bitwise_on_a_gpu_too(self, tmp_path: Path) -> None:
        MODEL.save(tmp_path)
        config, options = parse_config(open_model_folder(tmp_path).config), options_for(tmp_path, device="cuda")

        assert determinism.is_bitwise(config, torch.bfloat16, options)
        assert not determinism.is_bitwise(config, torch.bfloat16, replace(options, is_deterministic=False))
