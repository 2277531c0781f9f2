"""vLLM's executor over a fake of vLLM that insists on what the real one relies on."""

import pytest

from sluice.engine.conformance.behaviours import CHECKS, checks_for
from sluice.engine.conformance.resumption import ROWS, Resume, resume_matrix
from sluice.engine.conformance.subject import Driver, Subject
from sluice.engine.errors import EngineBroken
from sluice.engine.null_model import NullTokenizer
from sluice.engine.request import FailureKind, FinishReason, Grammar
from sluice.worker.engines.vllm.executor import VllmExecutor
from sluice.worker.engines.vllm.load import UNREAD
from sluice.worker.engines.vllm.orders import StepOrder
from tests.engine.conformance.subjects import subject_of
from tests.worker.engines.vllm.fake_core import BAD_PROMPT, MAX_NUM_SEQS, FakeCore


def engine_over(core: FakeCore) -> Subject:
    """Our engine over the executor over a core."""
    executor = VllmExecutor(
        core, eos_token_ids=NullTokenizer.eos_token_ids, fingerprint="fake", max_num_seqs=MAX_NUM_SEQS
    )
    return subject_of(executor, NullTokenizer(), refused_options=frozenset(UNREAD))


@pytest.fixture(scope="module", params=[1, 3], ids=["one group of layers", "three groups"])
def driver(request: pytest.FixtureRequest) -> Driver:
    """The engine over a core whose layers have one block table, or three."""
    return Driver(engine_over(FakeCore(num_groups=request.param)))


class TestGivenTheEngineOverIt:
    @pytest.mark.parametrize("name", checks_for(frozenset(UNREAD)))
    def test_when_it_is_checked_then_it_behaves(self, driver: Driver, name: str) -> None:
        CHECKS[name].run(driver)

        driver.settle()

    def test_when_requests_are_resumed_then_every_cell_that_it_computes_is_bitwise_the_same(
        self, driver: Driver
    ) -> None:
        matrix = resume_matrix(driver)

        refused = {name for name, options in ROWS.items() if not driver.subject.refused_options.isdisjoint(options)}
        assert {name for name, cells in matrix.items() if set(cells) == {Resume.BITWISE}} == ROWS.keys() - refused
        assert {name for name, cells in matrix.items() if set(cells) == {Resume.REFUSED}} == refused


class TestGivenASequenceThatRuns:
    def test_when_it_decodes_then_only_its_news_are_sent(self) -> None:
        core = FakeCore()
        driver = Driver(engine_over(core))

        driver.run(driver.request(max_tokens=9))

        first, *others = core.orders
        assert [len(first.new), len(first.known)] == [1, 0]
        assert all(not order.new and len(order.known) == 1 for order in others)

    def test_when_a_step_fails_then_everything_is_sent_anew_under_other_ids(self) -> None:
        core = FakeCore()
        driver = Driver(engine_over(core))
        prompt = driver.prompt()
        [calm] = driver.run(driver.request(prompt))
        core.orders.clear()
        fails = iter([False, False, True])

        def before_step(_order: StepOrder) -> None:
            if next(fails, False):
                raise RuntimeError("the step fails")

        core.before_step = before_step
        [output] = driver.run(driver.request(prompt))

        assert output.token_ids == calm.token_ids
        failed, repeated = core.orders[2:4]
        assert not failed.new
        assert [known.id for known in failed.known] == list(repeated.forgotten)
        assert [len(repeated.new), len(repeated.known)] == [1, 0]

    def test_when_its_logits_are_not_finite_then_it_alone_fails_and_says_where(self) -> None:
        driver = Driver(engine_over(FakeCore()))

        bad, good = driver.run(driver.request(BAD_PROMPT), driver.request())

        assert bad.finish is not None
        assert (bad.finish.reason, bad.finish.failure) == (FinishReason.ERROR, FailureKind.LOGITS)
        assert bad.finish.error is not None
        assert "at output token 0" in bad.finish.error
        assert good.finish is not None
        assert good.finish.reason is FinishReason.LENGTH

    def test_when_a_process_of_vllm_has_ended_then_the_engine_is_broken(self) -> None:
        core = FakeCore()
        driver = Driver(engine_over(core))

        def before_step(_order: StepOrder) -> None:
            core.why_lost = "one of its worker processes has ended"
            raise RuntimeError("cancelled")

        core.before_step = before_step
        driver.add(driver.request())

        with pytest.raises(EngineBroken, match="one of its worker processes has ended"):
            driver.advance()


class TestGivenAPromptOfSeveralStepsWithAGrammar:
    def test_when_others_run_beside_it_then_its_text_matches_from_the_first_token(self) -> None:
        core = FakeCore()
        driver = Driver(engine_over(core))
        long = driver.prompt(200)
        beside = driver.request(max_tokens=120)
        driver.add(beside)
        driver.advance_times(2)

        [output] = driver.run(driver.request(long, grammar=Grammar(kind="choice", text='["blue"]')))

        assert output.text == "blue"
        steps = [order for order in core.orders if len(order.num_tokens) > 1]
        assert {len(order.draws.sequences) for order in steps} == {1, 2}, "parts of the prompt, and its end, beside"
        driver.finish(beside)
