"""vLLM's executor over a fake of vLLM that insists on what the real one relies on."""

from dataclasses import replace
from pathlib import Path

import pytest

from sluice.engine.adapters.catalogue import NO_ADAPTERS, Catalogue, read_catalogue
from sluice.engine.conformance.behaviours import CHECKS, checks_for
from sluice.engine.conformance.resumption import ROWS, Resume, resume_matrix
from sluice.engine.conformance.subject import Driver, Subject
from sluice.engine.errors import EngineBroken
from sluice.engine.null_model import NullTokenizer
from sluice.engine.request import FailureKind, FinishReason, Grammar, Request
from sluice.worker.engines.vllm.executor import VllmExecutor
from sluice.worker.engines.vllm.load import UNREAD
from sluice.worker.engines.vllm.orders import StepOrder
from sluice.worker.model.folders import SMALL_MODEL
from tests.engine.conformance.subjects import subject_of
from tests.oracles.adapters import save_adapter
from tests.worker.engines.vllm.fake_core import BAD_PROMPT, MAX_NUM_SEQS, FakeCore

NAMES = ("law", "poet", "cook")


def engine_over(core: FakeCore, catalogue: Catalogue = NO_ADAPTERS, *, max_loaded_adapters: int = 1) -> Subject:
    """Our engine over the executor over a core."""
    executor = VllmExecutor(
        core,
        catalogue,
        eos_token_ids=NullTokenizer.eos_token_ids,
        fingerprint="fake",
        max_num_seqs=MAX_NUM_SEQS,
        max_loaded_adapters=max_loaded_adapters,
    )
    return subject_of(executor, NullTokenizer(), refused_options=frozenset(UNREAD))


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    """Three adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        save_adapter(folder / name, SMALL_MODEL, seed=seed)
    return read_catalogue(folder)


@pytest.fixture(scope="module", params=[1, 3], ids=["one group of layers", "three groups"])
def driver(request: pytest.FixtureRequest, catalogue: Catalogue) -> Driver:
    """The engine over a core whose layers have one block table, or three, with adapters."""
    subject = engine_over(FakeCore(num_groups=request.param), catalogue)
    return Driver(replace(subject, adapter=NAMES[0]))


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
        computed = {*ROWS, "adapter"} - refused
        assert {name for name, cells in matrix.items() if set(cells) == {Resume.BITWISE}} == computed
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


class TestGivenSequencesOfSeveralAdapters:
    """Each of a prompt with the model alone, and with each of three adapters."""

    def requests(self, driver: Driver) -> list[Request]:
        prompt = driver.prompt()
        return [driver.request(prompt, adapter=name, max_tokens=20) for name in ("", *NAMES)]

    def texts(self, core: FakeCore, catalogue: Catalogue, *, at_once: bool, places: int = len(NAMES)) -> list[str]:
        driver = Driver(engine_over(core, catalogue, max_loaded_adapters=places))
        requests = self.requests(driver)
        if at_once:
            return [output.text for output in driver.run(*requests)]
        return [driver.run(request)[0].text for request in requests]

    @pytest.mark.parametrize("places", [1, 2, 3])
    def test_when_they_run_at_once_then_each_text_is_that_of_a_run_alone(
        self, catalogue: Catalogue, places: int
    ) -> None:
        core = FakeCore()

        texts = self.texts(core, catalogue, at_once=True, places=places)

        assert texts == self.texts(FakeCore(), catalogue, at_once=False)
        assert len(set(texts)) == len(texts)
        assert core.num_puts == len(NAMES)
        assert core.adapters.keys() == set(range(places))

    def test_when_a_step_amid_them_fails_then_texts_are_the_same_and_no_adapter_is_loaded_again(
        self, catalogue: Catalogue
    ) -> None:
        core = FakeCore()
        fails = iter([*[False] * 9, True])

        def before_step(_order: StepOrder) -> None:
            if next(fails, False):
                raise RuntimeError("the step fails")

        core.before_step = before_step

        assert self.texts(core, catalogue, at_once=True) == self.texts(FakeCore(), catalogue, at_once=False)
        assert core.num_puts == len(NAMES)

    def test_when_vllm_refuses_one_of_them_then_its_sequence_fails_alone(self, catalogue: Catalogue) -> None:
        core = FakeCore()
        core.refused_adapters = {"poet"}
        driver = Driver(engine_over(core, catalogue, max_loaded_adapters=3))

        outputs = driver.run(*self.requests(driver))

        ends = [output.finish for output in outputs]
        assert [end.reason for end in ends if end is not None] == [
            FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH,
        ]  # fmt: skip
        assert ends[2] is not None
        assert ends[2].failure is FailureKind.FILE
        assert "vLLM cannot use the adapter 'poet'" in str(ends[2].error)

    def test_when_the_files_of_one_have_changed_then_its_sequence_fails(self, tmp_path: Path) -> None:
        save_adapter(tmp_path / "law", SMALL_MODEL)
        subject = engine_over(FakeCore(), read_catalogue(tmp_path))
        driver = Driver(subject)
        config = tmp_path / "law" / "adapter_config.json"
        config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))

        [output] = driver.run(driver.request(adapter="law"))

        assert output.finish is not None
        assert "have changed since this worker started" in str(output.finish.error)

    def test_when_limits_are_read_then_each_adapter_has_its_own_fingerprint(self, catalogue: Catalogue) -> None:
        executor = VllmExecutor(
            FakeCore(), catalogue, eos_token_ids=frozenset(), fingerprint="fake", max_num_seqs=1, max_loaded_adapters=2
        )

        assert executor.limits.adapters.keys() == set(NAMES)
        assert len({executor.fingerprint, *executor.limits.adapters.values()}) == 4
        assert executor.limits.max_adapters == 2
