"""Factories of the engines that the conformance suite is run on here."""

from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

from sluice.engine.batch import Batch
from sluice.engine.config import EngineConfig
from sluice.engine.conformance.subject import Subject
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.executor import Executor, Launched, ModelLimits, TextDecoder
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModel, NullModelConfig, NullTokenizer
from sluice.engine.text.tokenizer import load_tokenizer
from sluice.worker.model.folders import SMALL_MODEL
from tests.oracles.adapters import save_adapter

CONFIG = EngineConfig(max_num_seqs=6, max_num_batched_tokens=64)
NOT_COMPUTED = frozenset(
    {
        "logit_bias",
        "min_tokens",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "top_k",
        "top_p",
        "adapter",
    }
)
"""Options that mean nothing to a model whose tokens are a hash."""


class BreakingExecutor:
    """An `Executor` whose steps raise while they have a row of a broken request."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._requests: dict[int, str] = {}
        self.broken: set[str] = set()

    @property
    def limits(self) -> ModelLimits:
        return self._executor.limits

    @property
    def fingerprint(self) -> str:
        return self._executor.fingerprint

    @property
    def lag(self) -> int:
        return self._executor.lag

    def launch(self, batch: Batch) -> Launched:
        self._requests |= {admission.slot: admission.request_id for admission in batch.admissions}
        if any(self._requests[row.slot] in self.broken for row in batch.rows):
            raise RuntimeError("this request's steps raise")
        return self._executor.launch(batch)


def null_engine() -> Subject:
    """The engine over the null model."""
    model = NullModel(NullModelConfig(max_model_len=256, num_blocks=256, block_size=4))
    return subject_of(model, NullTokenizer(), refused_options=NOT_COMPUTED)


def small_model() -> Subject:
    """The engine over the small model on the CPU, with an adapter."""
    adapters = Path(mkdtemp(prefix="sluice-adapters-"))
    save_adapter(adapters / "one", SMALL_MODEL)
    options = ModelOptions(
        path=SMALL_MODEL, num_blocks=96, max_model_len=256, max_num_seqs=CONFIG.max_num_seqs, adapters=adapters
    )
    return replace(subject_of(load_model_runner(options), load_tokenizer(SMALL_MODEL)), adapter="one")


def subject_of(
    executor: Executor,
    decoder: TextDecoder,
    config: EngineConfig = CONFIG,
    *,
    refused_options: frozenset[str] = frozenset(),
) -> Subject:
    """An engine over an executor, whose steps can be made to raise."""
    breaking = BreakingExecutor(executor)
    return Subject(
        engine=LLMEngine(breaking, decoder, config),
        vocab_size=executor.limits.vocab_size,
        eos_token_ids=executor.limits.eos_token_ids,
        refused_options=refused_options,
        break_steps_of=breaking.broken.add,
    )
