"""`LLM`: generate in this process, with the service's engine and without a queue."""

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, cast

from sluice.protocol.errors import did_you_mean
from sluice.protocol.jobs import PromptLike
from sluice.protocol.messages import JobSpec, Message
from sluice.protocol.tools import stored_choice, stored_tools
from sluice.worker.config import SETTINGS, WorkerConfig, load_config
from sluice.worker.errors import ConfigError
from sluice.worker.model.load import load
from sluice.worker.offline.outputs import RequestOutput, StreamOutput
from sluice.worker.offline.progress import progress_bar
from sluice.worker.offline.runs import OfflinePrompt, Runs
from sluice.worker.offline.sampling import SamplingParams

Prompts: TypeAlias = PromptLike | Message | Mapping[str, object] | Iterable[PromptLike]
"""One prompt (text, token ids, a chat or its only message) or any number of them."""

_SETTINGS = {
    leaf.name: leaf
    for leaf in SETTINGS
    if leaf.section in ("model", "batching") and leaf.name not in ("path", "processes")
}

_PLAIN_TEXT = JobSpec()


class LLM:
    """A loaded model. Use it from one thread; as a context manager it is closed at the end."""

    def __init__(self, model: str | Path | None = None, **settings: object) -> None:
        """Load a model.

        Args:
            model: Its folder or its Hugging Face name. Default: the small model that ships with Sluice.
            **settings: Settings of `worker start` about model and batching, by their names in its configuration file,
                such as `device="cuda:0"`, `dtype="float32"` or `max_num_seqs=32` (docs/reference/settings.md).

        Raises:
            ConfigError: the settings, the model's files or the device do not allow it.
            WorkerBroken: memory or the device is unavailable now.
        """
        config = _config(model, settings)
        self._device = config.model.device
        self._runs: Runs | None = Runs(load(config), max_num_seqs=config.step_limits.max_num_seqs)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; return their outputs in the order of the prompts.

        A prompt that fails has an `error` in its output and does not affect the others.

        Args:
            prompts: One prompt or several. An iterator is read as there is room.
            sampling_params: For all prompts, or one for each. Default: `SamplingParams()`.
            progress: Whether to show a progress bar on standard error. Default: if that is a terminal.

        Raises:
            ValueError: not as many sampling parameters as prompts.
            EngineBroken: the device is lost.
        """
        return self._outputs(_listed(prompts), sampling_params, progress)

    def chat(
        self,
        messages: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, object]] = (),
        tool_choice: str | Mapping[str, object] | None = None,
        parallel_tool_calls: bool = True,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one chat or several, as `generate`; a text is one message of a user.

        The `parsed` of an output has its `content`, `reasoning` and `calls`.

        Args:
            messages: One message with `role` and `content`, a list of them, or several such lists.
            sampling_params: As in `generate`.
            tools: The functions that the model may call, as OpenAI's APIs take them (docs/guide/tools.md).
            tool_choice: Whether it must call one: `auto` (the default), `none`, `required`, or a function.
            parallel_tool_calls: Whether an answer may have several calls.
            progress: As in `generate`.

        Raises:
            ValueError: not as many sampling parameters as chats; tools that are wrong.
            EngineBroken: the device is lost.
        """
        shared = JobSpec(
            as_chat=True,
            tools=stored_tools(tools),
            tool_choice=stored_choice(tool_choice),
            parallel_tool_calls=parallel_tool_calls,
        )
        return self._outputs(_listed(messages), sampling_params, progress, shared)

    def embed(
        self, texts: Prompts, *, dimensions: int | None = None, progress: bool | None = None
    ) -> list[RequestOutput]:
        """Return outputs whose `embedding` has the vector of each text, in the order of the texts.

        Args:
            texts: One text (or list of token ids) or several.
            dimensions: The first ones only, scaled to length 1 again. Default: None, all.
            progress: As in `generate`.

        Raises:
            EngineBroken: the device is lost.
        """
        params = SamplingParams(embed=True, dimensions=dimensions)
        return self._outputs(_listed(texts), params, progress)

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        as_chat: bool = False,
    ) -> Iterator[StreamOutput]:
        """Yield the output of one prompt or several as it is generated.

        Steps run while the caller iterates. Leaving the loop drops unfinished prompts.

        Args:
            prompts: As in `generate`.
            sampling_params: As in `generate`.
            as_chat: Whether a text is one message of a user.

        Raises:
            ValueError: not as many sampling parameters as prompts.
            EngineBroken: the device is lost.
        """
        return self._stream(_listed(prompts), sampling_params, JobSpec(as_chat=as_chat))

    def close(self) -> None:
        """Free the model's memory. May be called twice."""
        if self._runs is not None:
            self._runs = None
            gc.collect()  # engine and executor are parts of cycles
            if self._device != "cpu":
                # The next model measures what the driver has free, without torch's cache.
                import torch

                torch.cuda.empty_cache()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _stream(
        self,
        prompts: Iterable[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        spec: JobSpec,
    ) -> Iterator[StreamOutput]:
        if self._runs is None:
            raise ValueError("this LLM is closed")
        return self._runs.run(_jobs(prompts, sampling_params, spec))

    def _outputs(
        self,
        prompts: Iterable[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool | None,
        shared: JobSpec = _PLAIN_TEXT,
    ) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        total = len(prompts) if isinstance(prompts, Sized) else None
        with progress_bar(total, is_shown=progress) as ended:
            for piece in self._stream(prompts, sampling_params, shared):
                if piece.request_output is not None:
                    outputs[piece.prompt_index] = piece.request_output
                    ended(piece.request_output)
        return [outputs[index] for index in range(len(outputs))]


def _config(model: str | Path | None, settings: Mapping[str, object]) -> WorkerConfig:
    if unknown := settings.keys() - _SETTINGS.keys():
        hint = did_you_mean(min(unknown), _SETTINGS)
        raise ConfigError([f"{min(unknown)}: not a setting of model or batching{hint}"])
    flags = {_SETTINGS[name].key: value for name, value in settings.items() if value is not None}
    if model is not None:
        flags["model.path"] = str(model)
    return load_config({}, flags=flags, named=lambda leaf: leaf.name)


def _listed(prompts: Prompts) -> Iterable[PromptLike]:
    """Return several prompts as they are, and one as a list."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (Mapping, Message)):
        return [[cast("Message | Mapping[str, object]", prompts)]]
    if isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], (int, Mapping, Message)):
        return [cast("PromptLike", prompts)]
    return cast("Iterable[PromptLike]", prompts)


def _jobs(
    prompts: Iterable[PromptLike], sampling_params: SamplingParams | Sequence[SamplingParams] | None, shared: JobSpec
) -> Iterator[OfflinePrompt]:
    if isinstance(sampling_params, Sequence):
        prompts = list(prompts)
        if len(prompts) != len(sampling_params):
            raise ValueError(f"{len(prompts)} prompts need as many sampling_params, got {len(sampling_params)}")
        asked: Iterable[tuple[JobSpec, int | None]] = [_asked(shared, sampling) for sampling in sampling_params]
        pairs = zip(prompts, asked, strict=True)
    else:
        one = _asked(shared, sampling_params or SamplingParams())
        pairs = ((prompt, one) for prompt in prompts)
    return (
        OfflinePrompt(index=index, prompt=prompt, spec=spec, seed=seed)
        for index, (prompt, (spec, seed)) in enumerate(pairs)
    )


def _asked(shared: JobSpec, sampling: SamplingParams) -> tuple[JobSpec, int | None]:
    return replace(shared, options=sampling.options), sampling.seed
