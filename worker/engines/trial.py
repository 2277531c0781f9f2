"""The trial of an engine that is not Sluice's own: what it offers must work in its release, or is refused by name."""

from dataclasses import replace

from sluice.engine.capabilities import Capabilities
from sluice.engine.conformance.subject import Subject, TimedOut, Violation
from sluice.engine.conformance.trial import failed_options
from sluice.engine.executor import ModelLimits
from sluice.engine.interface import Engine
from sluice.worker.errors import ConfigError, WorkerBroken
from sluice.worker.model.offered import features_without


def tried(engine: Engine, limits: ModelLimits, offered: Capabilities) -> Capabilities:
    """Return what an idle engine offers, without the options that fail when they are tried.

    Raises:
        ConfigError: it cannot be used at all.
        WorkerBroken: the trial does not end.
    """
    release = f"{offered.engine} {offered.version}"
    subject = Subject(engine=engine, vocab_size=limits.vocab_size, eos_token_ids=limits.eos_token_ids)
    try:
        failed = failed_options(subject)
    except TimedOut as error:
        raise WorkerBroken(f"the trial of {release} at start does not end: {error}") from error
    except Violation as error:
        raise ConfigError([f"SLUICE_ENGINE: {release} cannot be used: {error}"]) from error
    refused = {name: f"a trial at start failed with {release}: {why}" for name, why in failed.items()}
    refused = {**offered.refused, **refused}
    return replace(offered, features=features_without(refused), refused=refused)
