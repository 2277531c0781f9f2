"""What an engine can run, as data, which it reports once its model is loaded. Knows no queue and no wire format."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum

from sluice.engine.errors import OptionRefused
from sluice.engine.request import Request
from sluice.engine.sampling import SamplingFields

NUM_CHOICES, GRAMMAR, EMBED, CLASSIFY = "num_choices", "grammar", "embed", "classify"
"""The options of a request that are not among its sampling options."""

NAMES_FOR_PRODUCERS: Mapping[str, str] = {NUM_CHOICES: "n", GRAMMAR: "structured", EMBED: EMBED, CLASSIFY: CLASSIFY}
"""Other options have the same name there."""

_DEFAULTS: Mapping[str, object] = {
    option.name: option.default if option.default_factory is MISSING else option.default_factory()
    for option in fields(SamplingFields)
}


class Exactness(StrEnum):
    """How exactly an engine continues a request that an earlier attempt began."""

    BITWISE = "bitwise"
    """The same logits to the last bit, in any batch and on an equal machine."""

    SAME_TOKENS = "same tokens"
    """With the same random numbers. Sums in another order may round differently, so tokens differ only where two logits
    nearly tie."""

    GREEDY_ONLY = "greedy only"
    """The same tokens if it is greedy; a sampled request continues with other random numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can run.

    Raises:
        ValueError: `refused` names what is not an option of a request.
    """

    engine: str
    """Its name, and in `version` its release."""

    version: str
    families: tuple[str, ...]
    """The model types that it loads, as their configs name them."""

    weights: tuple[str, ...]
    """The forms of weights that it computes with: `plain` is that of the model's files."""

    features: tuple[str, ...]
    """The optional features that it has. Their names are its caller's."""

    exactness: Exactness
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    """The options, of `Sampling`, `num_choices`, `grammar`, `embed` or `classify`, that it does not implement, each
    with the reason. A request may have their defaults."""

    def __post_init__(self) -> None:
        if unknown := set(self.refused) - {*NAMES_FOR_PRODUCERS, *_DEFAULTS}:
            raise ValueError(f"refused names {', '.join(sorted(unknown))}, which no request has")

    def check(self, request: Request) -> None:
        """Check that a request states no option that the engine refuses.

        Raises:
            OptionRefused: it does; the message names the option and the reason.
        """
        for option, reason in self.refused.items():
            if _states(request, option):
                name = NAMES_FOR_PRODUCERS.get(option, option)
                raise OptionRefused(f"the engine {self.engine} {self.version} refuses {name}: {reason}")


def _states(request: Request, option: str) -> bool:
    if option == NUM_CHOICES:
        return request.num_choices != 1
    if option == GRAMMAR:
        return request.grammar is not None
    if option in (EMBED, CLASSIFY):
        return request.embed is not None and request.embed.is_classified == (option == CLASSIFY)
    return getattr(request.sampling, option) != _DEFAULTS[option]
