"""The model that computes nothing, and the faults that can be put around it."""

import subprocess
import sys
from dataclasses import replace

import pytest

from sluice.engine.batch import Admission, Batch, Sampled, ScheduledRow
from sluice.engine.config import StepTargets
from sluice.engine.null_model import NullModel, NullModelConfig, NullTokenizer
from sluice.engine.request import ChoiceProgress, Embed, FinishReason, Request, Sampling
from sluice.engine.testing.fault_injection import ChaoticExecutor, Fault, FaultKind, faults_in
from tests.engine.given import engine_over, request, run, undisturbed


class TestGivenTheNullModel:
    def test_when_seed_choice_or_prompt_differ_then_so_do_the_tokens(self) -> None:
        outputs = [
            undisturbed(request("r", prompt, seed=seed, num_choices=2, max_tokens=30))["r", choice].text
            for prompt in ("one", "other")
            for seed in (0, 2**64 - 1)
            for choice in (0, 1)
        ]

        assert len(set(outputs)) == 8

    def test_when_it_runs_in_another_process_then_it_says_the_same(self) -> None:
        assert undisturbed(request("r", "hello", max_tokens=12))["r", 0].text == "kxduzdda.cmf"

    def test_when_it_takes_time_then_it_sleeps_for_each_step_and_token(self) -> None:
        slept: list[float] = []
        model = NullModel(NullModelConfig(step_s=1.0, token_s=0.25), sleep=slept.append)
        engine = engine_over(model)
        engine.add([request("r", b"pppp", max_tokens=2)])

        run(engine)

        assert slept == [2.0, 1.25]

    def test_when_it_ends_sequences_then_their_mean_length_is_as_asked(self) -> None:
        model = NullModel(NullModelConfig(mean_output_tokens=20))
        engine = engine_over(model, max_num_seqs=64)
        engine.add([request(f"r{n}", seed=n, max_tokens=1000) for n in range(200)])

        lengths = [len(t.token_ids) for t in run(engine).values()]

        assert 15 < sum(lengths) / len(lengths) < 25

    def test_when_a_sequence_generates_nothing_then_it_draws_nothing_as_a_real_executor(self) -> None:
        def admission(sequence_id: int, max_tokens: int) -> Admission:
            sampling = Sampling(max_tokens=max_tokens, prompt_logprobs=0)
            return Admission(sequence_id, sequence_id, "r", 0, sampling, "", (1, 2), 2, (sequence_id,))

        rows = tuple(ScheduledRow(slot, slot, 0, 2, samples=True) for slot in (0, 1))
        batch = Batch(rows, admissions=(admission(0, 0), admission(1, 5)))

        silent, drawn = NullModel().launch(batch).collect()

        assert silent == Sampled(())
        assert len(drawn.token_ids) == 1

    @pytest.mark.parametrize(
        "asked",
        [
            replace(request("r", b"q" * 30, max_tokens=0, priority=1), embed=Embed()),
            request("r", b"q" * 30, max_tokens=0, priority=1, prompt_logprobs=1),
            request("r", b"q" * 30, max_tokens=5, priority=1, prompt_logprobs=1),
        ],
        ids=["vector", "scored", "scored and continued"],
    )
    def test_when_the_step_of_its_admission_has_no_time_for_a_prompt_then_it_is_read(self, asked: Request) -> None:
        engine = engine_over(NullModel(), step_targets=StepTargets(tpot_s=1e-4))
        engine.add([request("lower class", max_tokens=20)])
        for _ in range(5):
            engine.advance()

        # Both join before the one that decodes, and the first takes the time that the step has for prompts.
        engine.add([request("first", b"p" * 40, max_tokens=1, priority=1), asked])
        deltas = [delta for _ in range(30) for delta in engine.advance() if delta.request_id == "r"]

        assert [delta.prompt for delta in deltas if delta.prompt] == [
            delta.prompt for delta in undisturbed(asked)["r", 0].deltas if delta.prompt
        ]
        assert deltas[-1].finish is not None

    def test_when_nothing_is_scheduled_then_it_draws_nothing(self) -> None:
        assert NullModel().launch(Batch(())).collect() == []


class TestGivenTheNullTokenizer:
    def test_when_text_is_encoded_then_it_decodes_to_the_same(self) -> None:
        tokenizer = NullTokenizer()

        assert tokenizer.decode(tokenizer.encode("naïve €"), skip_special_tokens=True) == "naïve €"


class TestGivenPromptsThatAskForFaults:
    def test_when_they_are_read_then_each_fault_is_found(self) -> None:
        assert faults_in("say [[kill@7]] or [[fail@3x2]] but [[sing@1]]") == [
            Fault(kind=FaultKind.KILL, at=7),
            Fault(kind=FaultKind.FAIL, at=3, times=2),
        ]

    def test_when_one_runs_then_it_goes_wrong_where_it_asked_for_it(self) -> None:
        tokenizer = NullTokenizer()
        executor = ChaoticExecutor(
            NullModel(), read_prompt=lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True)
        )
        engine = engine_over(executor)
        engine.add([request("bad", "[[nan@2]]", max_tokens=5), request("good", "hello", max_tokens=5)])

        transcripts = run(engine)

        assert len(transcripts["bad", 0].token_ids) == 2
        finish = transcripts["good", 0].finish
        assert finish is not None
        assert finish.reason is FinishReason.LENGTH

    def test_when_one_was_resumed_then_a_fault_that_comes_once_does_not_come_again(self) -> None:
        fault = Fault(kind=FaultKind.NAN, at=2, times=1)
        engine = engine_over(ChaoticExecutor(NullModel(), [fault]))

        engine.add([request("r", max_tokens=5, progress=(ChoiceProgress(token_ids=(97, 97)),))])
        finish = [delta.finish for _ in range(3) for delta in engine.advance()][-1]

        assert finish is not None
        assert finish.reason is FinishReason.LENGTH

    @pytest.mark.slow
    def test_when_it_asks_for_death_then_the_process_dies(self) -> None:
        code = """
from sluice.engine.testing.fault_injection import *
from sluice.engine.null_model import NullModel
from tests.engine.given import engine_over, request, run
engine = engine_over(ChaoticExecutor(NullModel(), [Fault(kind=FaultKind.KILL, at=1)]))
engine.add([request("r", max_tokens=3)])
print([delta.token_ids for delta in engine.advance()], flush=True)
engine.advance()
print("still alive", flush=True)
"""

        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

        assert done.returncode == -9
        assert "still alive" not in done.stdout
        assert done.stdout.startswith("[(")
