"""The trial at start: an engine that behaves passes, and options that one with a fault gets wrong are refused."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from sluice.engine.interface import Engine
from sluice.engine.null_model import NullTokenizer
from sluice.engine.request import ChoiceProgress, Request, Sampling
from sluice.worker.engines.vllm.orders import Refused
from sluice.worker.engines.vllm.trial import refused_after_trial
from tests.worker.engines.vllm.fake_core import FakeCore
from tests.worker.engines.vllm.test_executor import engine_over

PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
FILTERS = ("top_k", "top_p", "min_p")


class Without:
    """An engine that ignores sampling options, always or when it resumes."""

    def __init__(self, engine: Engine, *names: str, only_resumed: bool = False) -> None:
        self._engine, self._names, self._only_resumed = engine, names, only_resumed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, requests: Iterable[Request]) -> None:
        plain = {name: getattr(Sampling(), name) for name in self._names}
        for request in requests:
            ignores = not self._only_resumed or any(choice.token_ids for choice in request.progress)
            sampling = replace(request.sampling, **plain) if ignores else request.sampling
            self._engine.add([replace(request, sampling=sampling)])


class LosesChoices:
    """An engine that resumes each choice with the progress of the first one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            progress = (request.progress or (ChoiceProgress(),))[:1] * len(request.progress)
            self._engine.add([replace(request, progress=progress)])


def unchanged(engine: Engine) -> Engine:
    """The engine itself."""
    return engine


def refused(wrap: Callable[[Engine], Any] = unchanged) -> set[str]:  # Any: engines by delegation
    """The options that are refused of an engine over the fake."""
    core = FakeCore()
    return set(refused_after_trial(wrap(engine_over(core).engine), core.facts, NullTokenizer.eos_token_ids))


class TestGivenAnEngineThatBehaves:
    def test_when_it_is_tried_then_nothing_is_refused(self) -> None:
        assert refused() == set()


class TestGivenAnEngineThatIgnoresAnOption:
    @pytest.mark.parametrize(
        ("names", "only_resumed", "expected"),
        [
            (("min_tokens",), False, {"logit_bias", "min_tokens"}),
            (("logit_bias",), False, {"logit_bias", "min_tokens", *PENALTIES, *FILTERS}),
            (("logprobs",), False, {"logprobs", *PENALTIES}),
            *((PENALTIES, only_resumed, set(PENALTIES)) for only_resumed in (False, True)),
            *(((name,), False, {name}) for name in (*PENALTIES, *FILTERS)),
        ],
    )
    def test_when_it_is_tried_then_the_option_is_refused(
        self, names: tuple[str, ...], only_resumed: bool, expected: set[str]
    ) -> None:
        assert refused(lambda engine: Without(engine, *names, only_resumed=only_resumed)) == expected

    @pytest.mark.parametrize("only_resumed", [False, True])
    def test_when_it_ignores_seeds_then_it_is_not_run_at_all(self, only_resumed: bool) -> None:
        with pytest.raises(Refused, match="its tokens are not those of the seed"):
            refused(lambda engine: Without(engine, "seed", only_resumed=only_resumed))

    def test_when_it_mixes_up_choices_then_several_are_refused(self) -> None:
        assert "num_choices" in refused(LosesChoices)
