"""Every guard of the protocol, how to break it, and the tests that should notice. Each new guard adds its row.

A guard is broken by replacing text that occurs exactly once in its files. The replacement must run: what is shown is
that the tests miss the guard, not that they notice a mistake. Run by `teeth.py`.
"""

from dataclasses import dataclass
from typing import NamedTuple

SCRIPTS = "producer/contract/scripts"
APPEND = "tests/contract/test_append.py"
CONTROL = "tests/contract/test_control.py"
LIFE = "tests/contract/test_life.py"
PULL = "tests/contract/test_pull.py"
SUBMIT = "tests/contract/test_submit.py"
SUSPECTS = "tests/contract/test_suspects.py"
TURNS = "tests/integration/test_exchange_turns.py"
RESUMES = "tests/integration/test_worker_resumes.py"
RECORDER = "tests/history/test_recorder.py"
WEBHOOKS = "tests/history/test_callbacks.py"
SHARES = "tests/properties/test_fair_shares.py"
SAMPLING = "tests/oracles/test_seeded_sampling.py"
ENGINE = "tests/engine/test_llm_engine.py"
OVERLAPPED = "tests/engine/test_overlap.py"
MACHINE = "tests/properties/test_engine_machine.py"


class Patch(NamedTuple):
    """Text that occurs once in all the files of a pattern, and what stands there when the guard is broken."""

    files: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """One thing that keeps jobs from being lost or doubled."""

    name: str
    """What is wrong when it is broken, in a few words."""

    patches: tuple[Patch, ...]
    tests: tuple[str, ...]
    """Node ids: the smallest set that should notice."""

    is_cheap: bool = False
    """Its tests take a moment: the fast suite breaks it too."""


def _script(name: str, old: str, new: str = "") -> tuple[Patch, ...]:
    """A patch of a script. What several share may move among their libraries."""
    files = "lib*.lua" if name.startswith("lib") else f"*{name}.lua"
    return (Patch(f"{SCRIPTS}/{files}", old, new),)


FENCE = (
    Guard(
        name="fence off: owner and epoch are not compared",
        patches=_script(
            "advance", "lease[OWNER] ~= incarnation or lease[EPOCH] ~= epoch or not lease[at]", "not lease[at]"
        ),
        tests=(f"{APPEND}::TestGivenAZombie",),
        is_cheap=True,
    ),
    Guard(
        name="epoch without incarnation",
        patches=_script("advance", "lease[OWNER] ~= incarnation or lease[EPOCH] ~= epoch", "lease[EPOCH] ~= epoch"),
        tests=(f"{APPEND}::TestGivenAZombie",),
    ),
    Guard(
        name="incarnation without epoch",
        patches=_script(
            "advance", "lease[OWNER] ~= incarnation or lease[EPOCH] ~= epoch", "lease[OWNER] ~= incarnation"
        ),
        tests=(f"{APPEND}::TestGivenAZombie",),
    ),
    Guard(
        name="a new lease keeps the old epoch",
        patches=_script("lib_taking", "job.epoch = job.epoch + 1", "job.epoch = math.max(job.epoch, 1)"),
        tests=(f"{LIFE}::TestGivenADeadWorker::test_when_another_pulls_then_its_jobs_move_with_a_higher_epoch",),
    ),
    Guard(
        name="parts of a result are not fenced",
        patches=_script("put_result", "lease[OWNER] ~= me or lease[EPOCH] ~= epoch", "false"),
        tests=(f"{APPEND}::TestGivenAZombie",),
    ),
    Guard(
        name="what is given back need not be the caller's",
        patches=_script("give_back", "lease[OWNER] ~= me or lease[EPOCH] ~= epoch", "false"),
        tests=(f"{LIFE}::TestGivenAFarewell",),
    ),
)

APPENDS = (
    Guard(
        name="`from` is not checked",
        patches=_script("advance", "if from == offset then return nil end", "if from then return nil end"),
        tests=(f"{APPEND}",),
    ),
    Guard(
        name="an end that was sent again is not known",
        patches=_script("advance", "and 'already' or 'replaced'", "and 'replaced' or 'replaced'"),
        tests=(f"{APPEND}",),
    ),
    Guard(
        name="a choice that has ended may end again",
        patches=_script("advance", "if lease[at + 1] ~= 0 then return stop_word('already', lease) end"),
        tests=(f"{APPEND}::TestGivenSeveralChoices",),
    ),
    Guard(
        name="the end travels apart from its tokens",
        patches=(
            Patch(
                "worker/advance.py",
                "if choice.end is not None and choice.fits_an_entry:",
                "if choice.end is not None and choice.fits_an_entry and not entry.token_ids:",
            ),
        ),
        tests=("tests/worker/test_results.py",),
        is_cheap=True,
    ),
    Guard(
        name="tokens that Redis lost are not sent again",
        patches=(
            Patch(
                "worker/exchange.py",
                "        choice.acknowledge(offset, has_end=False)",
                "        choice.acknowledge(max(offset, choice.published), has_end=False)",
            ),
        ),
        tests=(f"{RESUMES}::TestGivenARedisThatLosesItsLastSeconds",),
    ),
    Guard(
        name="a terminal state may be overwritten",
        patches=(
            *_script("cancel", "if job.state ~= 'queued' and job.state ~= 'running' then return job.state end"),
            *_script(
                "lib",
                "if not string.find(TRANSITIONS, ' ' .. job.state .. '>' .. state .. ' ', 1, true) then",
                "if false then",
            ),
        ),
        tests=(f"{CONTROL}::TestGivenACancel",),
    ),
)

PULLS = (
    Guard(
        name="a bell that is read from `$`",
        patches=(Patch("worker/bell.py", 'keys.key("bell"): last for keys', 'keys.key("bell"): "$" for keys'),),
        tests=("tests/worker/test_bell.py",),
    ),
    Guard(
        name="a pull's number is not remembered",
        patches=_script("lib_taking", "request.number .. mark", "0 .. mark"),
        tests=(f"{PULL}::TestGivenALostReply",),
    ),
    Guard(
        name="a repeated pull gives nothing",
        patches=_script("pull", "if request.number == last then\n    tell_again()", "if request.number == last then"),
        tests=(f"{PULL}::TestGivenALostReply",),
    ),
    Guard(
        name="a late double of an older pull takes jobs",
        patches=_script("pull", "request.number < last or not lives()", "not lives()"),
        tests=(f"{PULL}::TestGivenALostReply",),
    ),
    Guard(
        name="an incarnation past its life takes jobs",
        patches=_script("pull", "request.number < last or not lives()", "request.number < last"),
        tests=(f"{PULL}::TestGivenAnIncarnationPastItsLife",),
    ),
    Guard(
        name="an older lease speaks for a newer one",
        patches=(Patch("worker/leases.py", '{self.leased.epoch}.{next(_numbers)}"', '{self.leased.epoch}"'),),
        tests=("tests/worker/test_leases.py::TestGivenAJobThatComesBack",),
    ),
)

LIVES = (
    Guard(
        name="life is not renewed",
        patches=_script(
            "beat", "call('ZADD', ALIVE, NOW + life, me)", "call('ZADD', ALIVE, 'NX', NOW + math.max(life, 4000), me)"
        ),
        tests=(f"{LIFE}::TestGivenAWorkerThatBeats",),
    ),
    Guard(
        name="a beat without the number of its pull",
        patches=_script("beat", "not is_listed[id] and number and number <= processed", "not is_listed[id]"),
        tests=(f"{LIFE}::TestGivenAWorkerThatBeats",),
    ),
    Guard(
        name="what a lost reply leased is never given back",
        patches=_script("beat", "fire_timers()\nfinish()", "finish()")
        + _script("beat", "\ngive_back_orphans()\n", "\n"),
        tests=(f"{LIFE}::TestGivenAWorkerThatBeats",),
    ),
    Guard(
        name="a hung loop goes on beating",
        patches=(
            Patch(
                "worker/life.py",
                "        if self.watch.is_overdue:\n            self._fall_silent()",
                "        if False:\n            self._fall_silent()",
            ),
        ),
        tests=("tests/end_to_end/test_worker_breaks.py::TestGivenAStepThatHangs",),
    ),
    Guard(
        name="a beat after the farewell brings the incarnation back",
        patches=_script("beat", "call('HGET', worker_key(me), 'farewell') == '1'", "false"),
        tests=(f"{LIFE}::TestGivenAFarewell",),
    ),
    Guard(
        name="a farewell is forgotten when nothing was held",
        patches=_script("give_back", "call('HSET', worker_key(me), 'farewell', 1)"),
        tests=(f"{LIFE}::TestGivenAFarewell",),
    ),
    Guard(
        name="a job whose end crossed the beat counts as lost",
        patches=_script("beat", "lease or not was_ended_by_me(id)", "true"),
        tests=(f"{LIFE}::TestGivenAWorkerThatBeats",),
    ),
)

RECLAIMS = (
    Guard(
        name="the lease is deleted at give-back",
        patches=_script("lib_places", "'', ''\n  write_lease(job.id, lease)", "'', ''\n  call('HDEL', LEASES, job.id)"),
        tests=(f"{LIFE}::TestGivenAFarewell", f"{APPEND}::TestGivenSeveralChoices"),
    ),
    Guard(
        name="reclaim right after a restart of the server",
        patches=_script("lib_reclaim", "if not has_been_up_for(life + LIMITS.BEAT_EVERY_S * 1000) then return 0 end"),
        tests=(f"{LIFE}::TestGivenARedisThatWasAway",),
    ),
    Guard(
        name="reclaim by a pull that waited for a Redis that stood still",
        patches=_script("lib_taking", "ARGV[9] == '1' and NOW <= (tonumber(ARGV[11]) or NOW)", "ARGV[9] == '1'"),
        tests=(f"{LIFE}::TestGivenADeadWorker",),
    ),
    Guard(
        name="reclaim within a life of one's own stall",
        patches=(Patch("worker/pulling.py", "may_reclaim=undisturbed_s > beat.life_s", "may_reclaim=True"),),
        tests=(f"{TURNS}::TestGivenARedisThatStandsStill",),
    ),
    Guard(
        name="an older request is still told of when a pull has brought its job again",
        patches=(Patch("worker/exchange.py", "self._leases.of_request(job.request_id) is not job", "False"),),
        tests=(f"{TURNS}::TestGivenARoundTripUnderWay",),
    ),
    Guard(
        name="the rule of suspects is off",
        patches=_script("lib_reclaim", "if is_settled_by_death(job, lease, death) then return end"),
        tests=(f"{SUSPECTS}::TestGivenASecondDeathWithoutProgress",),
    ),
    Guard(
        name="progress forgives no death",
        patches=_script("advance", "if lease[DEATHS] == 1 then", "if false then"),
        tests=(f"{SUSPECTS}::TestGivenAFirstDeath",),
    ),
    Guard(
        name="deaths without the job are not weighed",
        patches=_script("lib_reclaim", "(alone > num_elsewhere(deaths) or alone >= LIMITS.MAX_DEATHS_ALONE)", "true"),
        tests=(f"{SUSPECTS}::TestGivenASecondDeathWithoutProgress",),
    ),
    Guard(
        name="a death is listed each time the job is looked at",
        patches=_script("lib_reclaim", "if one.incarnation == death.incarnation then return deaths end"),
        tests=(f"{SUSPECTS}::TestGivenAFirstDeath",),
    ),
    Guard(
        name="a farewell counts as a death",
        patches=_script("lib_reclaim", "if death.is_farewell then return false end"),
        tests=(f"{LIFE}::TestGivenAFarewell",),
    ),
)

CONTROLS = (
    Guard(
        name="an advance does not tell of the flag",
        patches=_script("advance", "lease[FLAG] ~= '' and word .. ' ' .. lease[FLAG] or word", "word"),
        tests=(f"{APPEND}::TestGivenAFlaggedJob",),
    ),
    Guard(
        name="a beat does not tell of the flag",
        patches=_script("beat", "if lease[FLAG] ~= '' then stops", "if false then stops"),
        tests=(f"{LIFE}::TestGivenAWorkerThatBeats",),
    ),
    Guard(
        name="the flag is lost between advance and beat",
        patches=_script(
            "advance", "    lease[at] = from + tokens\n", "    lease[at], lease[FLAG] = from + tokens, ''\n"
        ),
        tests=(f"{APPEND}::TestGivenAFlaggedJob",),
    ),
    Guard(
        name="the flag is lost when the owner dies",
        patches=_script(
            "lib_reclaim",
            "if lease[FLAG] ~= '' then return end_unheard(job, lease, lease[FLAG], SAID[lease[FLAG]]) end",
        ),
        tests=(f"{LIFE}::TestGivenADeadWorker",),
    ),
    Guard(
        name="due timers are removed before their effect",
        patches=_script(
            "lib_timers",
            "  for _, member in ipairs(due) do",
            "  call('ZREMRANGEBYSCORE', TIMERS, '-inf', NOW)\n  for _, member in ipairs(due) do",
        ),
        tests=(f"{CONTROL}::TestGivenTimers",),
    ),
    Guard(
        name="a timer that its effect set anew is removed",
        patches=_script("lib_timers", "if again and again <= NOW then", "if again then"),
        tests=(f"{LIFE}::TestGivenAFarewell", f"{CONTROL}::TestGivenTimers"),
    ),
    Guard(
        name="the digest of a known id or key is ignored",
        patches=(
            *_script("submit", "if seen[1] ~= job.digest then return { 'conflict', job.id } end"),
            *_script("submit", "if digest ~= job.digest then return { 'conflict', id or '' } end"),
        ),
        tests=(f"{SUBMIT}::TestGivenAJobThatWasSubmitted",),
    ),
    Guard(
        name="a key is forgotten when its job ends",
        patches=_script(
            "lib_ends",
            "call('SET', idem_key(job), value, 'PX',",
            "call('SET', idem_key(job), value, 'PX', 1 + 0 *",
        ),
        tests=(f"{SUBMIT}::TestGivenAJobThatWasSubmitted",),
    ),
    Guard(
        name="a client that repeats scripts by itself",
        patches=(Patch("worker/connections.py", '"retry": Retry(NoBackoff(), 0)', '"retry": Retry(NoBackoff(), 3)'),),
        tests=("tests/worker/test_connections.py",),
    ),
)

HISTORY = (
    Guard(
        name="the outbox is acknowledged before SQL has the rows",
        patches=(
            Patch(
                "worker/recorder.py",
                "        is_written = bool(entries) and self._write(outbox, entries)\n        if is_written:\n",
                "        is_written = bool(entries)\n        if is_written:\n",
            ),
            Patch(
                "worker/recorder.py",
                "acknowledge([entry_id for entry_id, _ in entries])\n",
                "acknowledge([entry_id for entry_id, _ in entries])\n"
                "            is_written = self._write(outbox, entries)\n",
            ),
        ),
        tests=(f"{RECORDER}::TestGivenADatabaseThatGoesAway",),
    ),
    Guard(
        name="an older event overwrites a newer row",
        patches=(
            Patch(
                "worker/history/upserts.py",
                'is_newer = new["version"] > old["version"]',
                'is_newer = new["version"] > 0',
            ),
        ),
        tests=(f"{RECORDER}::TestGivenEventsInTheOutbox",),
    ),
    Guard(
        name="a recorder does not read its own pending events again",
        patches=(
            Patch(
                "worker/stream_group.py",
                'self._has_group, self._own_cursor = False, b"0"',
                "self._has_group, self._own_cursor = False, None",
            ),
        ),
        tests=(f"{RECORDER}::TestGivenARecorderThatDied",),
    ),
    Guard(
        name="the outbox is read from `$`",
        patches=(Patch("worker/stream_group.py", 'self._group, "0", "MKSTREAM"', 'self._group, "$", "MKSTREAM"'),),
        tests=(f"{RECORDER}::TestGivenEventsInTheOutbox",),
    ),
)

CALLBACKS = (
    Guard(
        name="a callback is acknowledged before rq has it",
        patches=(
            Patch(
                "worker/callbacks.py",
                "        for entry in entries:\n            self._move(ends.keys, entry)\n",
                "        if entries:\n"
                "            ends.stream.acknowledge([entry_id for entry_id, _ in entries])\n"
                "        for entry in entries:\n            self._move(ends.keys, entry)\n",
            ),
        ),
        tests=("tests/history/test_callback_crash.py::TestGivenAnRqThatIsAwayWhileTheQueueIsThere",),
    ),
    Guard(
        name="an end is another event each time it is read",
        patches=(Patch("worker/callbacks.py", "sha256(of_what.encode())", "sha256(os.urandom(16))"),),
        tests=(f"{WEBHOOKS}::TestGivenAJobThatWantsAWebhook",),
    ),
    Guard(
        name="the body of a callback is not signed",
        patches=(
            Patch("producer/contract/webhooks.py", '.{timestamp_s}.".encode() + body', '.{timestamp_s}.".encode()'),
        ),
        tests=("tests/history/test_webhooks.py",),
    ),
)

RESUME = (
    Guard(
        name="resume replays without penalty counts",
        patches=(
            Patch(
                "engine/sampler.py",
                "self.counts[at] += position >= sequence.num_prompt_tokens",
                "self.counts[at] += position >= sequence.num_prompt_tokens + sequence.num_resumed_tokens",
            ),
        ),
        tests=(f"{SAMPLING}::test_tokens_go_on_where_an_earlier_attempt_stopped",),
    ),
    Guard(
        name="resume draws the noise of another position",
        patches=(
            Patch(
                "engine/sampler.py",
                "[start + num_tokens - s.num_prompt_tokens for s, start, num_tokens, _ in scheduled]",
                "[start + num_tokens - s.num_prompt_tokens - s.num_resumed_tokens "
                "for s, start, num_tokens, _ in scheduled]",
            ),
        ),
        tests=(f"{SAMPLING}::test_tokens_go_on_where_an_earlier_attempt_stopped",),
    ),
    Guard(
        name="choices share their noise",
        patches=(Patch("engine/sampler.py", "counter_2(s.choice)", "counter_2(0)"),),
        tests=(f"{SAMPLING}::test_choices_and_seeds_draw_different_tokens",),
    ),
    Guard(
        name="resume counts min_tokens anew",
        patches=(
            Patch(
                "engine/output.py",
                "        self.num_tokens = len(token_ids)\n",
                "        self.num_tokens = len(token_ids)\n        self._min_tokens += len(token_ids)\n",
            ),
        ),
        tests=("tests/properties/test_text_is_a_function_of_tokens.py::test_a_replay_goes_on_where_the_text_was",),
    ),
    Guard(
        name="resume loses what a stop string held back",
        patches=(
            Patch(
                "engine/output.py",
                "        self.num_tokens = len(token_ids)\n",
                "        self.num_tokens = len(token_ids)\n"
                "        if self._matcher:\n            self._matcher.release()\n",
            ),
        ),
        tests=("tests/properties/test_text_is_a_function_of_tokens.py::test_a_replay_goes_on_where_the_text_was",),
    ),
    Guard(
        name="an end that the replay finds is not said",
        patches=(
            Patch(
                "engine/llm_engine.py",
                "if output.finish is not None:\n                self._ended.append",
                "if False:\n                self._ended.append",
            ),
        ),
        tests=(f"{ENGINE}::TestGivenARequestThatWasRunningElsewhere",),
    ),
)

OVERLAP = (
    Guard(
        name="a late stop gives its blocks back while a row of it is in flight",
        patches=(
            Patch(
                "engine/scheduler.py",
                "if not sequence.num_launched_tokens:\n                self.blocks.release(sequence)\n            elif",
                "if True:\n                self.blocks.release(sequence)\n            elif",
            ),
        ),
        tests=(f"{OVERLAPPED}::TestGivenALateStop", MACHINE),
    ),
    Guard(
        name="one that is preempted in flight gives its blocks back at once",
        patches=(
            Patch(
                "engine/scheduler.py",
                "        if victim.num_launched_tokens:\n",
                "        if False:\n",
            ),
        ),
        tests=(f"{OVERLAPPED}::TestGivenAPreemptionInFlight", MACHINE),
    ),
    Guard(
        name="a row that nobody wants any more is read",
        patches=(Patch("engine/isolation.py", "        if unwanted:\n", "        if False:\n"),),
        tests=(f"{OVERLAPPED}::TestGivenALateStop",),
    ),
    Guard(
        name="what was launched on top of a step that failed counts",
        patches=(Patch("engine/llm_engine.py", "if outcome.has_failed and self._in_flight is not None:", "if False:"),),
        tests=(f"{OVERLAPPED}::TestGivenAStepThatFailsInFlight",),
    ),
    Guard(
        name="a step is planned past a sequence's last token",
        patches=(
            Patch(
                "engine/scheduler.py",
                "self._max_model_len) - 1\n",
                "self._max_model_len) + 1\n",
            ),
        ),
        tests=(f"{OVERLAPPED}::TestGivenADeviceThatLags",),
    ),
    Guard(
        name="penalties do not wait for the token in flight",
        patches=(Patch("engine/scheduler.py", "        if sequence.sampling.has_penalties:\n", "        if False:\n"),),
        tests=(f"{SAMPLING}::test_tokens_are_the_same_in_any_company",),
    ),
    Guard(
        name="a token is fed from the batch row that another sequence had",
        patches=(Patch("engine/batch_tensors.py", "-1 - drawn_rows[sequence.id]", "-1"),),
        tests=("tests/engine/test_batch_tensors.py", f"{SAMPLING}::test_tokens_are_the_same_in_any_company"),
    ),
    Guard(
        name="a prompt in flight is computed again by those who share it",
        patches=(
            Patch(
                "engine/scheduler.py",
                "for sequence in self.running if sequence.num_launched_tokens > 1]",
                "for sequence in self.running if False]",
            ),
        ),
        tests=(f"{OVERLAPPED}::TestGivenADeviceThatLags",),
    ),
)

ORDERS = (
    Guard(
        name="a long output is charged at its end alone",
        patches=_script("lib_advance", "if due <= job.charged then return end", "if true then return end"),
        tests=(f"{SHARES}::TestGivenOutputsFarBeyondTheReserve",),
    ),
    Guard(
        name="newcomers without end hold back who is ahead",
        patches=_script("lib_lanes", "math.max(least, math.min(greatest + 1, served_of(':' .. class)))", "least"),
        tests=(f"{SHARES}::TestGivenATenantThatIsAheadAndNewcomersWithoutEnd",),
    ),
    Guard(
        name="jobs with deadlines hold back those without",
        patches=_script("lib_lanes", "return step > 0 and at", "return false and at"),
        tests=(f"{SHARES}::TestGivenJobsWithDeadlinesWithoutEnd",),
    ),
)

GUARDS: tuple[Guard, ...] = (
    *FENCE,
    *APPENDS,
    *PULLS,
    *LIVES,
    *RECLAIMS,
    *CONTROLS,
    *HISTORY,
    *CALLBACKS,
    *RESUME,
    *OVERLAP,
    *ORDERS,
)
