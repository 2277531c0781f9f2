"""What the engine of a living worker can run, as a heartbeat publishes it: one short text.

`engine=sluice 1.0; exactness=bitwise; features=logprobs,tools; formats=hermes; refused=; families=llama; weights=plain`

Scripts read `features`, and compare whole texts.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from sluice.protocol.limits import MAX_OFFER_BYTES

FIELD = "offer"
"""The field of a heartbeat that has the text."""

MORE = "…"
"""In the place of names for which there is no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What an engine can run. Its text has the fields in this order."""

    engine: str
    """Its name and its release."""

    exactness: str
    """How exactly it continues a job that another attempt began: `bitwise`, `same tokens` or `greedy only`."""

    features: tuple[str, ...]
    """The features, by the names in `QueueSettings.features`, that it has."""

    formats: tuple[str, ...] = ()
    """How its model writes calls of tools, and its reasoning (`sluice.protocol.outputs`)."""

    refused: tuple[str, ...]
    """The options that it refuses."""

    families: tuple[str, ...]
    """The model types that it loads."""

    weights: tuple[str, ...]
    """The forms of weights that it computes with."""

    def __str__(self) -> str:
        """Return the text, of at most `MAX_OFFER_BYTES` unless other fields are that long: it may lack families."""
        families = list(map(_plain, self.families))
        text = self._with(families)
        while len(text.encode()) > MAX_OFFER_BYTES and families:
            families.pop()
            text = self._with([*families, MORE])
        return text

    def _with(self, families: Iterable[str]) -> str:
        values = {
            "engine": _plain(self.engine),
            "exactness": _plain(self.exactness),
            "features": _listed(self.features),
            "formats": _listed(self.formats),
            "refused": _listed(self.refused),
            "families": ",".join(families),
            "weights": _listed(self.weights),
        }
        return "; ".join(f"{name}={value}" for name, value in values.items())

    @classmethod
    def read(cls, text: str) -> "Offer":
        """Read a text, which anyone with a worker's rights may have written: what it does not say is empty."""
        said = dict(part.split("=", 1) for part in text[:MAX_OFFER_BYTES].split("; ") if "=" in part)
        return cls(
            engine=said.get("engine", ""),
            exactness=said.get("exactness", ""),
            **{name: _names(said.get(name, "")) for name in _LISTS},
        )

    @classmethod
    def of(cls, about: Mapping[str, str]) -> "Offer | None":
        """Return the offer of a heartbeat; None if it has none."""
        return cls.read(about[FIELD]) if about.get(FIELD) else None

    @property
    def sentence(self) -> str:
        """The offer for people."""
        parts = {
            "has": self.features,
            "writes": self.formats,
            "refuses": self.refused,
            "loads": self.families,
            "weights": self.weights,
        }
        said = "; ".join(f"{name} {', '.join(values)}" for name, values in parts.items() if values)
        return f"{self.engine}: resumes {self.exactness}; {said}"


_LISTS = tuple(field.name for field in fields(Offer) if field.name not in ("engine", "exactness"))


def _listed(names: Iterable[str]) -> str:
    return ",".join(map(_plain, names))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _plain(name: str) -> str:
    """Return a name without the characters that separate names."""
    return re.sub(r"[\s,;=]+", " ", name).strip()
