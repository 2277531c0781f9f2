"""What a worker offers: the queue's features that its engine has, and its capabilities as heartbeats publish them."""

from collections.abc import Collection, Mapping
from importlib.util import find_spec

from sluice.engine.capabilities import GRAMMAR, NAMES_FOR_PRODUCERS, Capabilities, Exactness
from sluice.protocol.offers import Offer
from sluice.protocol.outputs.formats import OutputFormat
from sluice.protocol.sampling import FEATURES, OPTIONS, Feature
from sluice.version import installed_version

OF_ENGINES: tuple[Feature, ...] = tuple(feature for feature in FEATURES if feature != "tools")
"""The features that an engine has or lacks. Tools need a model that can write calls."""

PLAIN = "plain"
"""The form of weights of a model's files, without quantization."""

WEIGHTS = (PLAIN, "int8", "int4")
"""The forms of weights of our own engine."""


def features_without(refused: Collection[str]) -> tuple[Feature, ...]:
    """Return the features of an engine that refuses these options: those of which it implements every option."""
    gone = {OPTIONS[name].feature for name in map(_name_for_producers, refused)}
    return tuple(feature for feature in OF_ENGINES if feature not in gone)


def features_of(capabilities: Capabilities, output_format: OutputFormat) -> tuple[Feature, ...]:
    """Return the features that jobs find at a worker with such an engine, and a model that writes in this format."""
    has = {*capabilities.features, *(("tools",) if output_format.calls else ())}
    return tuple(feature for feature in FEATURES if feature in has)


def lacking_features(capabilities: Capabilities) -> frozenset[str]:
    """Return the features that an engine does not have."""
    return frozenset(OF_ENGINES) - frozenset(capabilities.features)


def own_capabilities(
    families: Collection[str],
    weights: tuple[str, ...],
    *,
    is_bitwise: bool,
    refused: Mapping[str, str] | None = None,
) -> Capabilities:
    """Return what Sluice's own engine can run, without the options that it refuses with a model."""
    refused = dict(refused or {})
    if find_spec("llguidance") is None:
        refused[GRAMMAR] = "the package llguidance is not installed"
    return Capabilities(
        engine="sluice",
        version=installed_version(),
        families=tuple(sorted(families)),
        weights=weights,
        features=features_without(refused),
        exactness=Exactness.BITWISE if is_bitwise else Exactness.SAME_TOKENS,
        refused=refused,
    )


def offer_of(capabilities: Capabilities, output_format: OutputFormat) -> Offer:
    """Return what heartbeats publish: an engine's capabilities, and how the model writes."""
    return Offer(
        engine=f"{capabilities.engine} {capabilities.version}",
        exactness=capabilities.exactness.value,
        families=capabilities.families,
        weights=capabilities.weights,
        features=features_of(capabilities, output_format),
        formats=tuple(filter(None, (output_format.calls, output_format.reasoning))),
        refused=tuple(sorted(map(_name_for_producers, capabilities.refused))),
    )


def _name_for_producers(option: str) -> str:
    return NAMES_FOR_PRODUCERS.get(option, option)
