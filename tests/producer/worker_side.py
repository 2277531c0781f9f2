"""What a worker does to a queue, by hand: so that a test of the client decides when each token comes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any

from sluice.protocol.calls import (
    Beat,
    EndCall,
    LeasedJob,
    Ok,
    Progress,
    PullRequest,
    Returned,
    advance,
    beat,
    give_back,
    pull,
)
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run
from sluice.protocol.states import JobState
from sluice.protocol.wire import (
    ChoiceResult,
    End,
    JobRecord,
    JobResult,
    TokenLogprobs,
    Usage,
    encode_entry,
    encode_record,
    encode_result,
)

PROMPT_TOKENS = 5


@dataclass(slots=True, eq=False)
class Output:
    """What a choice has said so far."""

    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])


@dataclass(slots=True, eq=False)
class HandWorker:
    """One incarnation, moved by hand. Changes with every call."""

    client: Any  # redis-py's clients share no typed base
    keys: QueueKeys = field(default_factory=lambda: QueueKeys("default"))
    incarnation: str = "hand"
    pulls: int = 0
    outputs: dict[tuple[str, int], Output] = field(default_factory=dict[tuple[str, int], Output])

    def beat(self) -> None:
        """Live on."""
        run(
            self.client,
            beat(self.keys, Beat(incarnation=self.incarnation, held=(), processed_pull=0, expiry_ms=60_000)),
        )

    def pull(self, count: int = 100) -> list[LeasedJob]:
        """Take what waits."""
        self.pulls += 1
        self.beat_once()
        request = PullRequest(
            incarnation=self.incarnation, number=self.pulls, kv_tokens=10**7, prefill_tokens=10**7, sequences=count,
            cache_tokens=10**7, is_empty=True,
        )  # fmt: skip
        return list(run(self.client, pull(self.keys, request)).jobs)

    def beat_once(self) -> None:
        """Be known to the queue before the first pull."""
        if self.pulls == 1:
            self.beat()

    def say(
        self,
        job: LeasedJob,
        token_ids: Sequence[int],
        text: str,
        *,
        choice: int = 0,
        end: JobState | None = None,
        error: str | None = None,
        code: str | None = None,
        released: str = "",
        has_logprobs: bool = False,
    ) -> None:
        """Publish tokens of a choice, and its end (with the text that only the end releases)."""
        output = self.outputs.setdefault((job.id, choice), Output())
        start = len(output.token_ids)
        logprobs = tuple(TokenLogprobs(chosen=-0.5) for _ in token_ids) if has_logprobs else None
        output.token_ids += token_ids
        output.text += text + released
        output.logprobs += logprobs or ()
        now_ms = int(time() * 1000)
        entry = encode_entry(start=start, token_ids=token_ids, text=text, logprobs=logprobs, time_ms=now_ms)
        progress = Progress(
            job_id=job.id, epoch=job.epoch, choice=choice, start=start, num_tokens=len(token_ids),
            entry=entry if token_ids else b"", first_scheduled_ms=now_ms if start == 0 else None,
            first_token_ms=now_ms if start == 0 else None, prompt_tokens=PROMPT_TOKENS if start == 0 else None,
            end=None if end is None else self._end(job, choice, end, error, code, released),
        )  # fmt: skip
        [answer] = run(self.client, advance(self.keys, self.incarnation, [progress]))
        assert isinstance(answer, Ok), answer

    def _end(
        self, job: LeasedJob, choice: int, state: JobState, error: str | None, code: str | None, released: str
    ) -> EndCall:
        reason = "stop" if state is JobState.DONE else None
        outputs = [self.outputs.get((job.id, choice), Output()) for choice in range(job.choices)]
        tokens = sum(len(output.token_ids) for output in outputs)
        usage = Usage(prompt_tokens=PROMPT_TOKENS, output_tokens=tokens)
        choices = tuple(
            ChoiceResult(
                text=output.text, token_ids=tuple(output.token_ids), finish_reason=reason,
                logprobs=tuple(output.logprobs) or None,
            )
            for output in outputs
        )  # fmt: skip
        end = End(state=state, finish_reason=reason, error=error, error_code=code, usage=usage)
        offset = len(outputs[choice].token_ids)
        entry = encode_entry(start=offset, token_ids=(), text=released, time_ms=int(time() * 1000), end=end)
        return EndCall(
            state=state, reason=reason, error=error, error_code=code,
            result=encode_result(JobResult(choices=choices, usage=usage, model="toy")),
            record=encode_record(JobRecord(output_tokens=tokens)), output_tokens=tokens, entry=entry,
        )  # fmt: skip

    def generate(self, job: LeasedJob, num_tokens: int = 3) -> None:
        """Say the same every time, from the first token to the end."""
        for choice in range(job.choices):
            for i in range(num_tokens):
                self.say(job, [100 + i], f"w{i} ", choice=choice)
            self.say(job, [], "", choice=choice, end=JobState.DONE)

    def end_silently(self, job: LeasedJob, token_ids: Sequence[int], text: str) -> None:
        """End a job of one choice that needs no channel."""
        self.outputs[job.id, 0] = Output(list(token_ids), text)
        end = self._end(job, 0, JobState.DONE, None, None, "")._replace(entry=b"")
        progress = Progress(job.id, job.epoch, 0, 0, len(token_ids), b"", end=end)
        [answer] = run(self.client, advance(self.keys, self.incarnation, [progress]))
        assert isinstance(answer, Ok), answer

    def deregister(self, jobs: Sequence[LeasedJob]) -> None:
        """Give jobs back and go."""
        returned = [Returned(job_id=job.id, epoch=job.epoch) for job in jobs]
        run(self.client, give_back(self.keys, self.incarnation, returned, deregister=True))
