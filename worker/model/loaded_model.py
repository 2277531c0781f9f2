"""A model from its preparation to its use: its facts, how it reads text, and the engine that runs it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from sluice.engine.capabilities import Capabilities
from sluice.engine.executor import Executor, ModelLimits
from sluice.engine.interface import Engine
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.request import LAST_TOKEN, Embed, Request
from sluice.protocol.offers import Offer
from sluice.protocol.outputs.formats import PLAIN, OutputFormat
from sluice.protocol.sampling import Feature
from sluice.protocol.wire import JobOptions
from sluice.worker.model.chat_template import ChatTemplate
from sluice.worker.model.offered import features_of, lacking_features, offer_of
from sluice.worker.model.sampling_defaults import NOTHING_STATED
from sluice.worker.model.translate import (
    Encoder,
    PairEncoder,
    TextEncoder,
    Translator,
    bounded_encoder,
    bounded_pair_encoder,
)

if TYPE_CHECKING:
    from sluice.engine.execution.start.needs import ModelNeeds


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """How a model reads text, and when it ends."""

    tokenizer: TextEncoder
    template: ChatTemplate | None
    end_tokens: tuple[str, ...] = ()
    """The tokens that end an output, each with its sources."""

    defaults: JobOptions = NOTHING_STATED
    """Defaults of the model's generation config, for options that a request omits."""

    output_format: OutputFormat = PLAIN
    """How it marks calls of tools and its reasoning."""

    mark_ids: Mapping[str, int] = field(default_factory=dict[str, int])
    """The marks of that format that are special tokens, by their text."""

    embed: Embed | str = LAST_TOKEN
    """How its vectors are made, or why they cannot be."""

    encode_pair: PairEncoder | None = None
    """See `Translator`."""

    generates: bool = True
    """Whether the model has an output head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts about an engine once its weights are loaded."""

    limits: ModelLimits
    capabilities: Capabilities
    fingerprint: str
    kernels: str
    """The choice of kernels on a GPU; see `chain.description`."""

    stepped_down: Mapping[str, str]
    """The operations without their kernel, with the reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A loaded model, as the daemon and the translator use it."""

    name: str
    text: ModelText
    engine: Engine
    facts: EngineFacts

    @property
    def encode(self) -> Encoder:
        """The encoder of text, bounded by the model's context."""
        return bounded_encoder(self.text.tokenizer, self.facts.limits)

    @property
    def translator(self) -> Translator:
        """The translator of jobs into requests of this model."""
        return Translator(
            encode=self.encode,
            template=self.text.template,
            output_format=self.text.output_format,
            mark_ids=self.text.mark_ids,
            validate=self.validate,
            lacking=lacking_features(self.facts.capabilities),
            model=self.name,
            adapters=frozenset(self.facts.limits.adapters),
            defaults=self.text.defaults,
            end_token_ids=self.facts.limits.eos_token_ids,
            encode_pair=None
            if self.text.encode_pair is None
            else bounded_pair_encoder(self.text.encode_pair, self.text.tokenizer, self.facts.limits),
            generates=self.text.generates,
            embed=self.text.embed if isinstance(self.text.embed, Embed) else LAST_TOKEN,
            max_job_tokens=self.max_job_tokens,
        )

    @property
    def features(self) -> tuple[Feature, ...]:
        """The queue's features that jobs find here: those of the engine, and what the model's text allows."""
        return features_of(self.facts.capabilities, self.text.output_format)

    @property
    def offer(self) -> Offer:
        """What heartbeats publish."""
        return offer_of(self.facts.capabilities, self.text.output_format)

    def validate(self, request: Request) -> None:
        """Check that the engine implements what a request states, and can ever run it. Thread-safe.

        Raises:
            RequestRejected: it does not, or it cannot; the message is a sentence for its producer.
        """
        self.facts.capabilities.check(request)
        self.engine.validate(request)

    @property
    def max_job_tokens(self) -> int:
        """Maximum number of tokens of prompt and output together that this worker can run."""
        return self.engine.max_request_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel(LoadedModel):
    """A model that is loaded in this process."""

    engine: LLMEngine
    executor: Executor


LoadedT_co = TypeVar("LoadedT_co", bound=LoadedModel, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel(Generic[LoadedT_co]):
    """A model that fits the settings; its weights are not loaded yet."""

    name: str
    description: str
    text: ModelText
    max_job_tokens: int
    """Maximum number of tokens of a job. The memory that is found at loading may lower it."""

    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    """Options that its engine never has, each with the reason. A trial of the loaded model may refuse more."""

    needs: "Callable[[], ModelNeeds] | None" = None
    """Counts what the model takes; None if its engine cannot."""

    load: Callable[[], LoadedT_co]
    """Loads the weights.

    Raises:
        ConfigError: they are damaged, or the sizes in the settings do not fit this machine.
        WorkerBroken: memory or the device is unavailable now.
    """
