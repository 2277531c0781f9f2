"""Choose a GPU's kernels at load: try them beside the loading of the weights, and step down those that do not work."""

import logging
import traceback
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Literal

import torch

from sluice.engine.errors import EngineError, KernelsUnavailable
from sluice.engine.execution.cgroups import num_usable_cores
from sluice.engine.execution.device_errors import loss_of
from sluice.engine.execution.memory import free_memory_bytes
from sluice.engine.execution.options import ModelOptions
from sluice.engine.models.config import DecoderConfig
from sluice.kernels import chain
from sluice.kernels.decoder_shape import DecoderShape
from sluice.kernels.linear.words import WordForm
from sluice.kernels.trial.runner import KernelTrial, Verdict, tasks_of
from sluice.kernels.trial.sizes import ModelSizes

Kernels = Literal["auto", "triton", "torch"]

MAX_PROCESSES = 8
PROCESS_BYTES = 4 * 2**30
"""Memory of the device that one process may take: its context, and tensors as large as the largest weight."""

log = logging.getLogger(__name__)


def allowed_kernels(options: ModelOptions) -> Kernels:
    """Return which kernels may be used: torch's operators depend on the batch."""
    return "triton" if options.is_deterministic else options.kernels


def num_processes(weight_files: Iterable[Path], device: torch.device) -> int:
    """Return how many processes may try kernels while the weights are loaded."""
    if device.type != "cuda":
        return 1
    spare_bytes = free_memory_bytes(device) - sum(path.stat().st_size for path in weight_files)
    # Workers of other GPUs may start at the same time.
    num_cores = num_usable_cores() // torch.cuda.device_count()
    return max(1, min(MAX_PROCESSES, num_cores, spare_bytes // PROCESS_BYTES))


def sizes_of(
    config: DecoderConfig,
    dtype: torch.dtype,
    options: ModelOptions,
    max_model_len: int,
    *,
    adapter_rank: int = 0,
    word_forms: Iterable[WordForm] = (),
) -> ModelSizes:
    """Return the sizes and options that a model's kernels depend on.

    `adapter_rank` is the largest of its adapters, and `word_forms` are those of its packed weights. Matrices of several
    bits that are stacked are rounded to 8.
    """
    forms = set(word_forms)
    if len({form.num_bits for form in forms}) > 1:
        forms.add(WordForm.of_groups(8))
    shape = {field.name: getattr(config, field.name) for field in fields(DecoderShape)}
    return ModelSizes(
        **shape,
        dtype=str(dtype).removeprefix("torch."),
        rotary_size=config.rope.rotary_size,
        block_size=options.block_size,
        max_model_len=max_model_len,
        sliding_windows=tuple(sorted(set(config.sliding_windows))),
        is_int8=options.quantization == "int8",
        cache="fp8" if options.kv_cache_dtype == "fp8" else "model",
        adapter_rank=adapter_rank,
        word_forms=tuple(sorted(forms)),
        is_deterministic=options.is_deterministic,
    )


@contextmanager
def kernels_tried(sizes: ModelSizes, device: str, kernels: Kernels, processes: int) -> Generator[None]:
    """Try the kernels in other processes while the body runs, and choose when it has ended; with 0, without a trial.

    On a CPU only whether the process is deterministic is chosen.

    Raises:
        KernelsUnavailable: one does not work, and only Triton's may be used.
    """
    chain.step_down({})
    chain.set_deterministic(sizes.is_deterministic)
    if torch.device(device).type == "cpu":
        yield
        return
    if kernels == "torch":
        chain.step_down(dict.fromkeys(chain.OPERATIONS, "asked for"))
        yield
        return
    if processes == 0:
        yield
        return
    with ThreadPoolExecutor(1, thread_name_prefix="trial") as background:
        trial = KernelTrial(sizes, device, tasks_of(sizes, device))
        verdict = background.submit(trial.run, processes)
        try:
            yield
        except BaseException:
            # Loading has failed: its error must not wait for kernels that are being compiled.
            trial.stop()
            raise
        choose(verdict.result(), kernels)


def choose(verdict: Verdict, kernels: Kernels) -> None:
    """Step down the operations that failed a trial.

    Raises:
        KernelsUnavailable: one did, and only Triton's may be used.
    """
    for operation, reason in verdict.untried.items():
        log.warning("a kernel could not be tried and is used as it is: %s: %s", operation, reason)
    for operation, reason in sorted(verdict.problems.items()):
        _step_down(operation, reason, kernels)


def step_down_if_it_fails(compute: Callable[[], object], kernels: Kernels) -> None:
    """Run `compute`; repeat it for each operation whose kernel fails, with torch's operators in its place.

    Raises:
        KernelsUnavailable: a kernel fails, and only Triton's may be used.
        Exception: one that does not come from a kernel, or that loses the device.
    """
    while True:
        try:
            compute()
        except EngineError:
            raise
        except Exception as error:
            operation = operation_of(error)
            if loss_of(error) is not None or operation is None or operation in chain.stepped_down():
                raise
            _step_down(operation, f"{type(error).__name__}: {error}".splitlines()[0], kernels)
        else:
            return


def operation_of(error: Exception) -> str | None:
    """Return the operation whose code raised `error`; None if none did."""
    files = [Path(frame.filename) for frame in reversed(traceback.extract_tb(error.__traceback__))]
    if any(file.parts[-2:] == ("paged_attention", "hopper.py") for file in files):
        return chain.HOPPER_PREFILL
    folders = (file.parent for file in files)
    return next((f.name for f in folders if f.name in chain.OPERATIONS and f.parent.name == "kernels"), None)


def _step_down(operation: str, reason: str, kernels: Kernels) -> None:
    # Below the kernel for Hopper is another one in Triton.
    if kernels == "triton" and operation != chain.HOPPER_PREFILL:
        remedy = "Turn deterministic off" if chain.is_deterministic() else "Allow kernels=auto, or torch"
        raise KernelsUnavailable(f"the Triton kernel of {operation} does not work on this machine: {reason}. {remedy}.")
    successor = chain.successor_of(operation)
    log.warning("a kernel does not work here, and %s replace it: %s: %s", successor, operation, reason)
    chain.step_down(chain.stepped_down() | {operation: reason})
