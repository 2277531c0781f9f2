"""Compute steps with a model on a device: lay out, forward, sample. Knows no scheduler."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sluice.engine.adapters.table import AdapterTable
from sluice.engine.batch import MAX_DRAFTS, NO_DRAFTS, Batch, Drafts, Masks, Sampled, ScheduledRow
from sluice.engine.errors import OutOfMemory
from sluice.engine.execution.device_errors import guarded
from sluice.engine.execution.host_blocks import HostBlocks
from sluice.engine.execution.kept_rows import draws, kept_rows
from sluice.engine.execution.kv_cache import cache_dtype, make_grouped_caches
from sluice.engine.execution.layout import BatchLayout, columns_of
from sluice.engine.execution.memory import give_memory_back
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.reading import PromptReader, launched_reads
from sluice.engine.execution.recordings.buckets import Bucket, Buckets, nothing, pad
from sluice.engine.execution.recordings.cuda_graphs import CudaGraphRecorder, GraphedDecoder, record_eagerly
from sluice.engine.execution.recordings.inputs import RecordedInputs
from sluice.engine.execution.sampling.edited_rows import NO_TOKENS, LastTokens, first_rows
from sluice.engine.execution.sampling.sampler import PreparedRows, Sampler, with_drafts
from sluice.engine.execution.slots import Slots
from sluice.engine.execution.transfers import PendingCopy, to_device
from sluice.engine.executor import Launched, ModelLimits
from sluice.engine.models.decoder import Decoder
from sluice.engine.speculation.verification import verified_rows
from sluice.kernels import chain
from sluice.kernels.copy_blocks import block_runs, copy_blocks
from sluice.kernels.decoder_step import StepInputs


class LaunchedStep(NamedTuple):
    """A launched step that translates late errors, most of which surface here, and keeps the tokens that it sampled."""

    launched: Launched
    sampling: list[ScheduledRow]
    slots: Slots
    drafts: Drafts

    def collect(self) -> list[Sampled]:
        """See `Launched.collect`."""
        sampled = guarded(self.launched.collect)
        if self.drafts:
            sampled = verified_rows(self.sampling, self.drafts, sampled)
        self.slots.add_tokens(self.sampling, sampled)
        return sampled


class LaterStep:
    """A step that is computed, and drawn once its masks are known: a `DrawnLater`. Its logits hold until the next."""

    def __init__(self, draw: Callable[[Masks], Launched]) -> None:
        self._draw = draw
        self._launched: Launched | None = None

    @torch.inference_mode()
    def draw(self, masks: Masks) -> None:
        """See `DrawnLater.draw`."""
        self._launched = guarded(lambda: self._draw(masks))

    def collect(self) -> list[Sampled]:
        """See `Launched.collect`."""
        if self._launched is None:
            raise RuntimeError("the rows of a step were not drawn before it was collected")
        return self._launched.collect()


class Undrawn(NamedTuple):
    """A step that samples nothing.

    Collecting it still waits for the device, so that the host cannot run ahead without limit.
    """

    pending_copy: PendingCopy

    def collect(self) -> list[Sampled]:
        """See `Launched.collect`."""
        self.pending_copy.wait()
        return []


class ModelRunner:
    """A model on a device as the engine's executor. One thread at a time."""

    def __init__(
        self,
        decoder: Decoder,
        options: ModelOptions,
        limits: ModelLimits,
        fingerprint: str,
        adapters: AdapterTable | None = None,
    ) -> None:
        weights = decoder.weights
        self._decoder, self._adapters = decoder, adapters
        self._limits, self._fingerprint = limits, fingerprint
        dtype = cache_dtype(options, weights.dtype)
        parts, self._caches = make_grouped_caches(decoder.config, limits, dtype=dtype, device=weights.device)
        self._runs = block_runs(parts)
        self._host = HostBlocks(parts, limits.num_host_blocks)
        max_blocks_per_seq = columns_of(limits.max_model_len, limits.block_size, is_aligned=limits.window_groups > 0)
        self._lag = options.lag if options.lag is not None else int(weights.device.type != "cpu")
        # A slot of a step in flight is not used again before the step has landed.
        num_slots = options.max_num_seqs * (1 + self._lag)
        self._slots = Slots(num_slots, max_blocks_per_seq, window_groups=limits.window_groups)
        self._layout = BatchLayout(
            self._slots,
            max_num_seqs=options.max_num_seqs,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            device=weights.device,
        )
        self._last = NO_TOKENS
        """What the step launched last has drawn."""

        self._buckets = Buckets(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
        )
        self._sampler = Sampler(
            vocab_size=limits.vocab_size,
            eos_token_ids=limits.eos_token_ids,
            # A recorded step may have a row of padding.
            max_rows=options.max_num_seqs + max(1, MAX_DRAFTS),
            max_sequences=options.max_num_seqs,
            device=weights.device,
        )
        self._reader = PromptReader(decoder, self._slots, weights.device)
        self._graphs = self._recordings(options, weights.device)

    @property
    def limits(self) -> ModelLimits:
        """Limits of the model and its cache for the scheduler."""
        return self._limits

    @property
    def fingerprint(self) -> str:
        """See `Executor.fingerprint`."""
        return self._fingerprint

    @property
    def lag(self) -> int:
        """Steps that may be launched ahead of their results."""
        return self._lag

    @property
    def decoder(self) -> Decoder:
        """The model, for measurements and checks."""
        return self._decoder

    def launch(self, batch: Batch) -> Launched:
        """Start computing every scheduled token and sampling a new one for each sequence that samples.

        Raises:
            OutOfMemory: the device lacks memory for this step now.
            EngineBroken: the device is lost.
        """
        try:
            return guarded(lambda: self._launch(batch))
        except OutOfMemory:
            # Releasing torch's cached pieces may yield a contiguous one.
            give_memory_back(self._device)
            raise

    @torch.inference_mode()
    def _launch(self, batch: Batch) -> Launched:
        if self._adapters is not None:
            self._adapters.load(batch.admissions)
        self._slots.write(batch)
        self._host.save(batch.saves)
        self._host.load(batch.loads)
        if batch.copies:
            # Before the recorded part, and not in it: the step's tokens attend to what is copied.
            copy_blocks(self._runs, [(copy.source, copy.destination) for copy in batch.copies])
        self._reader.forget(batch.unread)
        sampling = [row for row in batch.rows if row.samples]
        if batch.reads:
            return self._launch_reading(batch, [row for row in sampling if draws(self._slots[row])])
        prepared = self._prepared(sampling, batch) if sampling else None
        logits, tokens = self._computed(batch)
        return self._drawn(batch, sampling, prepared, logits, tokens)

    def _launch_reading(self, batch: Batch, drawing: list[ScheduledRow]) -> Launched:
        """Launch a step whose hidden states are needed. Of its rows, those in `drawing` draw."""
        prepared = self._prepared(drawing, batch) if drawing else None
        kept = kept_rows(batch, self._slots)
        hidden = self._decoder.hidden(self._lay_out(batch), self._caches)
        # Another product may overwrite them.
        states = hidden[to_device(np.array(kept.drawn, dtype=np.int64), self._device)] if drawing else hidden
        self._reader.take(hidden, kept)
        launched = self._drawn(batch, drawing, prepared, self._decoder.project(states) if drawing else states)
        return launched_reads(self._reader, launched, batch, self._slots, self._device)

    def _drawn(
        self,
        batch: Batch,
        sampling: list[ScheduledRow],
        prepared: PreparedRows | None,
        logits: Tensor,
        tokens: Tensor | None = None,
    ) -> "LaunchedStep | LaterStep":
        """Draw the tokens of rows that are prepared, from logits or, if the step has drawn them, as it did."""
        if prepared is None:
            self._last = NO_TOKENS
            return LaunchedStep(Undrawn(PendingCopy((), self._device)), sampling, self._slots, NO_DRAFTS)
        if batch.draws_later:
            return LaterStep(
                lambda masks: self._drawn(
                    replace(batch, masks=masks, draws_later=False), sampling, prepared, logits, tokens
                )
            )
        # The rows of padding follow theirs.
        count = len(prepared.slots)
        tokens = tokens[:count] if tokens is not None else None
        rows = first_rows(sampling, batch.drafts) if self._lag or batch.masks else {}
        masks = _by_row(batch.masks, rows, batch.drafts) if batch.masks else None
        drawn = self._sampler.sample(logits[:count], prepared, last=self._last, drawn=tokens, masks=masks)
        if self._lag:
            self._last = LastTokens(rows, drawn.token_ids)
        return LaunchedStep(drawn, sampling, self._slots, batch.drafts)

    def _prepared(self, sampling: list[ScheduledRow], batch: Batch) -> PreparedRows:
        slots = [self._slots[row] for row in sampling]
        positions = [
            row.start + row.num_tokens - slot.num_prompt_tokens for row, slot in zip(sampling, slots, strict=True)
        ]
        drafts = batch.drafts
        if drafts:
            guesses = [drafts.get(row.sequence_id, ()) for row in sampling]
            return self._sampler.prepare(*with_drafts(slots, positions, guesses))
        return self._sampler.prepare(slots, positions)

    def _computed(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the logits `[R, V]` of the rows of `batch` that sample, then of padding.

        If the step is recorded, it is replayed, and the second tensor `[R]` has the tokens that it drew.
        """
        bucket = self._buckets.of(batch) if self._graphs is not None else None
        if self._graphs is None or bucket is None or self._has_adapters(batch):
            return self.forward(self._lay_out(batch)), None
        is_due = not self._graphs.has(bucket) and self._graphs.note_use(bucket)
        if is_due or self._graphs.has(bucket):
            self._fill(self._graphs.inputs, pad(batch, bucket), bucket)
            if not is_due or self._graphs.record(bucket):
                logits = self._graphs.forward(bucket)
                # The next step reads them, after it may have recorded another step, which draws to the same place.
                return logits, self._sampler.options.drawn.clone()
        return self.forward(self._lay_out(batch)), None

    def _has_adapters(self, batch: Batch) -> bool:
        """Return whether a row of a step has an adapter: what is recorded has none."""
        return self._adapters is not None and any(self._slots[row].adapter_place >= 0 for row in batch.rows)

    def _recordings(self, options: ModelOptions, device: torch.device) -> GraphedDecoder | None:
        if not records_steps(options, device):
            return None
        max_rows = options.max_num_seqs + 1
        inputs = RecordedInputs(
            self._limits,
            max_tokens=self._buckets.most_tokens,
            max_rows=max_rows,
            max_drawn=len(self._sampler.options.drawn),
            device=device,
        )
        record = CudaGraphRecorder(device).record if device.type == "cuda" else record_eagerly
        return GraphedDecoder(self.forward, self._sampler.options.draw, record, inputs, max_rows=max_rows)

    @property
    def graphs(self) -> GraphedDecoder | None:
        """Recorded steps, for measurements and checks; None if steps are not recorded."""
        return self._graphs

    @property
    def has_preparations(self) -> bool:
        """Whether idle time can be used: see `prepare`."""
        return self._graphs is not None and self._graphs.most_used is not None

    def prepare(self) -> None:
        """Record the most wanted step that is not recorded yet, if there is memory for it.

        Raises:
            EngineBroken: the device is lost.
        """
        if self._graphs is None or (bucket := self._graphs.most_used) is None:
            return
        try:
            guarded(lambda: self._record(bucket))
        except OutOfMemory:
            # Steps work without it. It may be wanted again.
            self._graphs.forget_uses(bucket)
            give_memory_back(self._device)

    def prepare_first(self) -> None:
        """Record the buckets of the start, and copy a block to the unused one, which compiles that kernel too.

        Raises:
            EngineBroken: the device is lost.
        """
        guarded(lambda: copy_blocks(self._runs, [(0, self._limits.num_blocks)]))
        for bucket in self._buckets.first if self._graphs is not None else []:
            guarded(lambda bucket=bucket: self._record(bucket))

    @torch.inference_mode()
    def _record(self, bucket: Bucket) -> None:
        # Padding only: it reads any block and writes to none that a sequence uses.
        if self._graphs is not None:
            self._fill(self._graphs.inputs, nothing(bucket), bucket)
            self._graphs.record(bucket)

    def lay_out(self, batch: Batch) -> StepInputs:
        """Run the first part of `launch`: return the model's inputs, valid until the next call."""
        self._slots.write(batch)
        return self._lay_out(batch)

    def _lay_out(self, batch: Batch) -> StepInputs:
        return self._layout.lay_out(batch, self._last.rows, self._last.token_ids)

    def _fill(self, inputs: RecordedInputs, batch: Batch, bucket: Bucket) -> None:
        """Lay out a batch with the sizes of a bucket as the inputs of its recording."""
        plan = self._layout.plan(batch, self._last.rows, num_columns=inputs.sent_columns(bucket))
        inputs.fill(plan, bucket, self._last.token_ids)

    def forward(self, tensors: StepInputs) -> Tensor:
        """Run the second part of `launch`: return the logits `[R, V]`, valid until the next call."""
        return self._decoder.forward(tensors, self._caches)

    def time_phases(self, tensors: StepInputs) -> dict[str, float]:
        """Return seconds per phase of a native step, which is run; for measurements."""
        return self._decoder.time_phases(tensors, self._caches)

    @property
    def _device(self) -> torch.device:
        return self._decoder.weights.device


def _by_row(masks: Masks, rows: Mapping[int, int], drafts: Drafts) -> dict[int, bytes]:
    """Return masks by row of the logits; `rows` are the first ones of each sequence."""
    return {
        rows[sequence_id] + number: mask
        for sequence_id, of_sequence in masks.items()
        if sequence_id in rows
        for number, mask in enumerate(of_sequence[: 1 + len(drafts.get(sequence_id, ()))])
    }


def records_steps(options: ModelOptions, device: torch.device) -> bool:
    """Return whether the steps of a model with these options are recorded (CUDA graphs)."""
    if device.type == "cuda" and not chain.can_record():
        return False
    return device.type == "cuda" if options.graphs is None else options.graphs
