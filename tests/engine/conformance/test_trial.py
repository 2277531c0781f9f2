"""The trial at start: an engine that behaves passes, and options that one with a fault gets wrong are found."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from sluice.engine.conformance.subject import Subject, Violation
from sluice.engine.conformance.trial import failed_options
from sluice.engine.interface import Engine
from sluice.engine.request import ChoiceProgress, Request, Sampling
from tests.engine.conformance.subjects import small_model

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


@pytest.fixture(scope="module")
def subject() -> Subject:
    """Our engine over the small model."""
    return small_model()


def failed(subject: Subject, wrap: Callable[[Engine], Any]) -> set[str]:  # Any: engines by delegation
    """The options that a trial finds not to work, of an engine with a fault."""
    return set(failed_options(replace(subject, engine=wrap(subject.engine))))


class TestGivenAnEngineThatBehaves:
    def test_when_it_is_tried_then_all_options_work(self, subject: Subject) -> None:
        assert failed_options(subject) == {}


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
    def test_when_it_is_tried_then_the_option_fails(
        self, subject: Subject, names: tuple[str, ...], only_resumed: bool, expected: set[str]
    ) -> None:
        assert failed(subject, lambda engine: Without(engine, *names, only_resumed=only_resumed)) == expected

    @pytest.mark.parametrize("only_resumed", [False, True])
    def test_when_it_ignores_seeds_then_nothing_else_is_tried(self, subject: Subject, only_resumed: bool) -> None:
        with pytest.raises(Violation, match="its tokens are not those of the seed"):
            failed(subject, lambda engine: Without(engine, "seed", only_resumed=only_resumed))

    def test_when_it_mixes_up_choices_then_several_of_them_fail(self, subject: Subject) -> None:
        assert "num_choices" in failed(subject, LosesChoices)
