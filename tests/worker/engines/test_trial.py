"""The trial of an engine at start: what fails is refused by name, and an engine that cannot be used ends the start."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from sluice.engine.capabilities import EMBED, Capabilities, Exactness
from sluice.engine.config import EngineConfig
from sluice.engine.conformance import subject
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModel, NullTokenizer
from sluice.engine.request import Request, TokenDelta
from sluice.worker.engines.trial import tried
from sluice.worker.errors import ConfigError, WorkerBroken
from sluice.worker.model.offered import OF_ENGINES, PLAIN

MODEL = NullModel()
OFFERED = Capabilities(
    engine="other",
    version="7",
    families=(),
    weights=(PLAIN,),
    features=OF_ENGINES,
    exactness=Exactness.SAME_TOKENS,
    refused={EMBED: "it has none"},
)


def engine() -> LLMEngine:
    """The null model's: its tokens depend on the seed, and on no bias or penalty."""
    return LLMEngine(MODEL, NullTokenizer(), EngineConfig())


class WithoutSeeds:
    """An engine that ignores the seed of a request."""

    def __init__(self) -> None:
        self._engine = engine()

    def __getattr__(self, name: str) -> Any:  # Any: by delegation
        return getattr(self._engine, name)

    def add(self, requests: Iterable[Request]) -> None:
        self._engine.add([replace(one, sampling=replace(one.sampling, seed=0)) for one in requests])


class WithoutSteps(WithoutSeeds):
    """An engine that never returns a token."""

    def advance(self) -> list[TokenDelta]:
        return []


class TestGivenAnEngineThatIgnoresSomeOptions:
    def test_when_it_is_tried_then_these_are_refused_too_and_their_features_are_gone(self) -> None:
        offer = tried(engine(), MODEL.limits, OFFERED)

        assert offer.refused[EMBED] == "it has none"
        assert offer.refused["logit_bias"].startswith("a trial at start failed with other 7: an output does not end")
        assert "temperature" not in offer.refused
        assert "logit_bias" not in offer.features
        assert "choices" in offer.features
        assert replace(offer, features=OFFERED.features, refused=OFFERED.refused) == OFFERED


class TestGivenAnEngineThatIgnoresTheSeed:
    def test_when_it_is_tried_then_the_setting_that_names_it_is_wrong(self) -> None:
        with pytest.raises(ConfigError, match="SLUICE_ENGINE: other 7 cannot be used: its tokens are not those of the"):
            tried(WithoutSeeds(), MODEL.limits, OFFERED)  # pyright: ignore[reportArgumentType]  # by delegation


class TestGivenAnEngineThatReturnsNothing:
    def test_when_it_is_tried_then_the_worker_is_broken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(subject, "PATIENCE_S", 0.05)

        with pytest.raises(WorkerBroken, match=r"the trial of other 7 at start does not end: after 0\.05 s"):
            tried(WithoutSteps(), MODEL.limits, OFFERED)  # pyright: ignore[reportArgumentType]  # by delegation
