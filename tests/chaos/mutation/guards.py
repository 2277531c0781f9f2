"""Every guard of the protocol, a mutation that breaks it, and the tests that must fail. Add a row for each new guard.

A mutation replaces text that occurs exactly once in its files. The mutated code must run: a test must fail because the
guard is missing, not because of a syntax error. `run.py` applies the mutations.
"""

from dataclasses import dataclass
from typing import NamedTuple

SCRIPTS = "protocol/scripts"
APPEND = "tests/protocol/test_append.py"
CONTROL = "tests/protocol/test_control.py"
COSTS = "tests/protocol/test_costs.py"
HEARTBEAT = "tests/protocol/test_heartbeat.py"
ORDER = "tests/protocol/test_order.py"
LISTENERS = "tests/worker/connection/test_listeners.py"
WAKING = "tests/protocol/readiness/test_wakeups.py"
PULL = "tests/protocol/test_pull.py"
FULL = "tests/protocol/readiness/test_full_workers.py"
CLASSES = "tests/integration/classes"
MODELS = "tests/protocol/settings/test_two_models.py"
ENGINES = "tests/protocol/settings/test_two_engines.py"
RUNNING = "tests/protocol/limits/test_running_jobs.py"
TOKENS = "tests/protocol/limits/test_tokens_a_minute.py"
LOST = "tests/protocol/limits/test_lost_limits.py"
RESTORED = "tests/protocol/settings/test_restored_settings.py"
REPORT = "tests/protocol/deaths/test_report_death.py"
STOPPED = "tests/protocol/deaths/test_stopped_jobs.py"
OVERDUE = "tests/producer/operations/test_overdue_jobs.py"
STEPS = "tests/protocol/deaths/test_clock_steps.py"
SHARE = "tests/protocol/test_tenant_share.py"
SUBMIT = "tests/protocol/test_submit.py"
SUSPECTS = "tests/protocol/deaths/test_suspects.py"
TURNS = "tests/integration/test_exchange_rounds.py"
RESUMES = "tests/integration/test_worker_resumes.py"
RECORDER = "tests/history/test_recorder.py"
WEBHOOKS = "tests/worker/callbacks/test_callbacks.py"
FROM_NOW = "tests/protocol/times/test_times_from_now.py"
SHARES = "tests/properties/test_fair_shares.py"
SAMPLING = "tests/oracles/test_seeded_sampling.py"
ENGINE = "tests/engine/test_llm_engine.py"
OVERLAPPED = "tests/engine/test_overlap.py"
MIGRATED = "tests/migration/test_migrate_queue.py"
KILLED = "tests/migration/test_killed_migration.py"
MACHINE = "tests/properties/test_engine_machine.py"


class Patch(NamedTuple):
    """Text that occurs once in all files of a pattern, and its replacement."""

    files: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A check in the code that keeps jobs from being lost or duplicated."""

    name: str
    """The fault that the mutation introduces."""

    patches: tuple[Patch, ...]
    tests: tuple[str, ...]
    """Node ids: the smallest set that must fail."""

    is_cheap: bool = False
    """Whether the fast suite applies the mutation too."""


def _script(name: str, old: str, new: str = "") -> tuple[Patch, ...]:
    """Patch a script. A library's text may be in any of the libraries."""
    files = "lib*.lua" if name.startswith("lib") else f"*{name}.lua"
    return (Patch(f"{SCRIPTS}/{files}", old, new),)


FLEET = (
    Guard(
        name="a heartbeat does not say which model is served",
        patches=_script("lib_models", "add_to(key, expiry, incarnation)", "false"),
        tests=(f"{MODELS}::TestGivenWorkersOfTwoModels::test_when_a_job_names_one_then_only_its_worker_takes_it",),
    ),
    Guard(
        name="a short heartbeat takes a longer one's model from the list",
        patches=_script("lib_models", "add_to(MODELS, 'GT', expiry", "add_to(MODELS, expiry"),
        tests=(f"{MODELS}::TestGivenWorkersOfTwoModels",),
    ),
    Guard(
        name="a worker that left serves its model until its heartbeat would have expired",
        patches=_script("lib_models", "if found[1] then try('ZREM', SERVING .. found[1], incarnation) end"),
        tests=(f"{MODELS}::TestGivenWorkersOfTwoModels",),
    ),
    Guard(
        name="what a dead worker offered is still taken at submit",
        patches=_script("lib_models", "call('ZREMRANGEBYSCORE', OFFERS, '-inf', now) > 0 or is_new", "is_new"),
        tests=(f"{ENGINES}::TestGivenAWorkerThatOffersLess",),
    ),
    Guard(
        name="only the first page of the workers is read",
        patches=_script("list_workers", "return { page[1], workers }", "return { '0', workers }"),
        tests=("tests/protocol/readiness/test_many_workers.py::TestGivenManyWorkers",),
    ),
)

KEPT = (
    Guard(
        name="a channel outlives its job",
        patches=_script(
            "lib_ends", "return math.min(job_ms, setting('channel_ttl_ms'", "return (setting('channel_ttl_ms'"
        ),
        tests=("tests/protocol/test_reused_ids.py",),
    ),
    Guard(
        name="a refused job is charged its estimate",
        patches=_script("lib_ends", "is_refused(job, lease, how) and 0 or job.prompt", "job.prompt"),
        tests=("tests/protocol/test_order.py::TestGivenModeFair",),
    ),
    Guard(
        name="an open batch forgets its counts with its results",
        patches=_script("lib_ends", "is_wanted or numbers.closed ~= '1'", "is_wanted"),
        tests=("tests/protocol/test_batches.py::TestGivenAnOpenBatch",),
    ),
    Guard(
        name="a clock that steps back delays retries",
        patches=_script("lib_recount", "if stepped then scan_on('stepped', stepped, DELAYED, shorten_wait) end"),
        tests=(f"{STEPS}::TestGivenAClockThatStepsBack",),
    ),
    Guard(
        name="a clock that steps back delays the end of a flagged job",
        patches=_script("lib_recount", "kind == 'stop' or kind == 'batch'", "kind == 'batch'"),
        tests=(f"{STEPS}::TestGivenAClockThatStepsBack",),
    ),
    Guard(
        name="a clock that steps back stops a batch amid its expiry",
        patches=_script("lib_timers", "due > NOW and about[2] ~= '1'", "due > NOW"),
        tests=(f"{STEPS}::TestGivenAClockThatStepsBack",),
    ),
    Guard(
        name="a clock that steps back delays suspects",
        patches=_script("lib_suspects", "since > NOW or NOW - since", "NOW - since"),
        tests=(f"{STEPS}::TestGivenAClockThatStepsBack",),
    ),
    Guard(
        name="a claim to drain for suspects outlasts a step back of the clock",
        patches=_script("lib_suspects", " and left_ms <= LIMITS.HEARTBEAT_LIFETIME_S * 1000 and who", " and who"),
        tests=(f"{STEPS}::TestGivenAClockThatStepsBack",),
    ),
    Guard(
        name="after a step back of the clock full workers wait for idle ones",
        patches=_script("lib_order", "ready_at <= NOW or at > NOW", "ready_at <= NOW"),
        tests=(f"{STEPS}::TestGivenAClockThatStepsBack",),
    ),
)

BOUNDS = (
    Guard(
        name="a tenant may fill the queue",
        patches=_script("submit", "full_of[job.tenant] or refusal_of_share(job)", "full_of[job.tenant]"),
        tests=(f"{SHARE}::TestGivenATenantAmongOthers",),
    ),
    Guard(
        name="a tenant that found the queue full is not known",
        patches=_script("submit", "if not is_memory_full then waiting_of(job.tenant).is_changed = true end"),
        tests=(f"{SHARE}::TestGivenATenantAlone",),
    ),
    Guard(
        name="what a tenant has waiting is not written",
        patches=_script("lib_places", "held.is_changed then\n      flat[", "false then\n      flat["),
        tests=(f"{SHARE}::TestGivenATenantAmongOthers",),
    ),
    Guard(
        name="a wrong number of a tenant stays in a short queue",
        patches=_script("lib_recount", "wanted.tokens, wanted.bytes, true", "wanted.tokens, wanted.bytes, nil"),
        tests=(
            "tests/security/test_what_remains.py::TestGivenASubmittingUser::"
            "test_when_it_claims_a_tenants_share_then_that_is_what_waits_at_most_and_is_counted_again",
        ),
    ),
    Guard(
        name="each partition takes the whole bound of its queue",
        patches=_script("submit", "math.floor(of_queue / NUM_PARTITIONS)", "of_queue"),
        tests=(f"{SHARE}::TestGivenSeveralPartitions",),
    ),
)

FENCE = (
    Guard(
        name="fence off: the epoch is not compared",
        patches=_script("advance", "lease.epoch ~= epoch or not lease[at]", "not lease[at]"),
        tests=(f"{APPEND}::TestGivenAZombie",),
    ),
    Guard(
        name="a new lease keeps the old epoch",
        patches=_script("lib_taking", "job.epoch = job.epoch + 1", "job.epoch = math.max(job.epoch, 1)"),
        tests=(f"{HEARTBEAT}::TestGivenADeadWorker::test_when_another_pulls_then_its_jobs_move_with_a_higher_epoch",),
    ),
    Guard(
        name="parts of a result are not fenced",
        patches=_script("put_result", "lease.epoch ~= epoch", "false"),
        tests=(f"{APPEND}::TestGivenAZombie",),
    ),
    Guard(
        name="a part of a result may leave a gap",
        patches=_script("put_result", "try('STRLEN', key) ~= offset", "false"),
        tests=(f"{APPEND}::TestGivenAnEnd",),
    ),
    Guard(
        name="give-back is not fenced",
        patches=_script("give_back", "lease.epoch ~= epoch", "false") + _script("give_back", "job.owner == me and "),
        tests=(f"{HEARTBEAT}::TestGivenADeregistration",),
    ),
)

APPENDS = (
    Guard(
        name="`from` is not checked",
        patches=_script("advance", "if from == offset then return nil end", "if from then return nil end"),
        tests=(f"{APPEND}",),
    ),
    Guard(
        name="a repeated end is not recognised",
        patches=_script("advance", "and 'already' or 'replaced'", "and 'replaced' or 'replaced'"),
        tests=(f"{APPEND}",),
    ),
    Guard(
        name="a choice that has ended may end again",
        patches=_script("advance", "if lease[at + 1] ~= 0 then return stop_word('already', lease) end"),
        tests=(f"{APPEND}::TestGivenSeveralChoices",),
        is_cheap=True,
    ),
    Guard(
        name="an end is published apart from its tokens",
        patches=(
            Patch(
                "worker/jobs/progress.py",
                "if choice.end is not None and choice.fits_an_entry:",
                "if choice.end is not None and choice.fits_an_entry and not choice.num_next_tokens:",
            ),
        ),
        tests=("tests/worker/jobs/test_results.py",),
    ),
    Guard(
        name="an end without an answer counts as lacking",
        patches=(Patch("worker/jobs/progress.py", "(choice.has_end or choice.may_have_end)", "choice.has_end"),),
        tests=("tests/worker/jobs/test_results.py",),
    ),
    Guard(
        name="tokens that Redis lost are not republished",
        patches=(
            Patch(
                "worker/jobs/held_job.py",
                "self.choices[choice].resend_from(offset)",
                "self.choices[choice].resend_from(max(offset, self.choices[choice].published))",
            ),
        ),
        tests=(f"{RESUMES}::TestGivenARedisThatLosesItsLastSeconds",),
    ),
    Guard(
        name="a job may say that it will be submitted",
        patches=_script("submit", "math.min(job.submitted or NOW, NOW)", "job.submitted or NOW"),
        tests=(
            "tests/protocol/test_submit.py::TestGivenAnEmptyQueue"
            "::test_when_a_lost_job_comes_again_then_it_has_its_submit_time_but_none_to_come",
        ),
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

WAKEUPS = (
    Guard(
        name="the notification stream is read from `$`",
        patches=(Patch("worker/connection/listeners.py", 'id="0", mkstream', 'id="$", mkstream'),),
        tests=(LISTENERS,),
    ),
    Guard(
        name="a notification wakes every idle worker",
        patches=(
            Patch(
                "worker/connection/listeners.py",
                '"XREADGROUP", "GROUP", GROUP, CONSUMER, "BLOCK", BLOCK_MS, "STREAMS", *streams)',
                '"XREAD", "BLOCK", BLOCK_MS, "STREAMS", *streams[: len(names)], *self._after.values())',
            ),
        ),
        tests=(LISTENERS,),
    ),
    Guard(
        name="a lost wake-up goes to no other worker",
        patches=(Patch("worker/connection/listeners.py", "self._read() or self._take_over()", "self._read()"),),
        tests=(f"{LISTENERS}::TestGivenTwoListeners", "tests/worker/connection/test_lost_wakeup.py"),
    ),
    Guard(
        name="a chain of wake-ups never ends",
        patches=(Patch("worker/connection/listeners.py", "chain.decode() if is_passed_on else own", "own"),),
        tests=(f"{LISTENERS}::TestGivenAListener",),
    ),
    Guard(
        name="a worker without room keeps its wake-up",
        patches=(
            Patch("worker/serve/pull_schedule.py", "turn.has_missed or turn.woken_by is not None", "turn.has_missed"),
        ),
        tests=("tests/worker/serve/test_pull_schedule.py",),
    ),
    Guard(
        name="a pull does not acknowledge what woke its worker",
        patches=_script("lib_wakeups", "if request.woken_by then try('XACK'", "if false then try('XACK'"),
        tests=(WAKING,),
    ),
    Guard(
        name="jobs left for want of room wake nobody",
        patches=_script("lib_wakeups", "if has_run_out() then", "if false then"),
        tests=(WAKING,),
    ),
    Guard(
        name="jobs that do not suit the woken worker wake no other",
        patches=_script("lib_wakeups", "elseif request.woken_by then", "elseif false then"),
        tests=(WAKING,),
    ),
)

PULLS = (
    Guard(
        name="a lane that cannot be read is deleted",
        patches=_script("lib_order", "      buffer.has_left = true\n", ""),
        tests=(f"{PULL}",),
    ),
    Guard(
        name="a lane is cut behind its new head",
        patches=_script(
            "lib_lanes", "call('XTRIM', lane.key, 'MINID', head[1])", "call('XTRIM', lane.key, 'MAXLEN', '0')"
        ),
        tests=(f"{PULL}",),
    ),
    Guard(
        name="a lane of foreign entries holds a pull",
        patches=_script("lib_order", "lane.num_spoiled < LIMITS.MAX_SPOILED_PER_LANE", "true"),
        tests=(f"{COSTS}::TestGivenALaneFullOfWhatIsNoJob", f"{COSTS}::TestGivenJobsWhosePromptsAreGone"),
    ),
    Guard(
        name="returned jobs of low classes hide others from full workers",
        patches=(
            *_script("lib_classes", "if class ~= RETURNED or not request.over then return", "if true then return"),
            *_script("lib_order", "if num_skipped <= LIMITS.MAX_SKIPPED_PER_PULL then num_lanes = num_lanes - 1 end"),
        ),
        tests=(f"{FULL}::TestGivenReturnedJobs",),
    ),
    Guard(
        name="each pull of a full worker looks at the same returned jobs",
        patches=_script("lib_order", "(request.number - 1) * LIMITS.MAX_RETURNED_PER_PULL % num_lanes", "0"),
        tests=(f"{FULL}::TestGivenReturnedJobs",),
    ),
    Guard(
        name="a slice ends any number of choices",
        patches=_script("lib_ends", "slice.num_channels >= LIMITS.SLICE_CHANNELS", "false"),
        tests=(f"{COSTS}::TestGivenJobsWithManyChoices",),
    ),
    Guard(
        name="the end of an unstarted job wakes the readers of its first choice alone",
        patches=(Patch("producer/operations/follow.py", "any(key in unstarted for key, _ in rows)", "False"),),
        tests=("tests/producer/test_control.py::TestGivenAnUnstartedJobWithChoicesThatIsCancelled",),
    ),
    Guard(
        name="a pull's number is not stored",
        patches=_script("lib_taking", "request.number, num_taken(), mark", "0, num_taken(), mark"),
        tests=(f"{PULL}::TestGivenALostReply",),
    ),
    Guard(
        name="a repeated pull returns no jobs",
        patches=_script("pull", "if request.number == last then\n    resend_reply()", "if request.number == last then"),
        tests=(f"{PULL}::TestGivenALostReply",),
    ),
    Guard(
        name="a late duplicate of an older pull takes jobs",
        patches=_script("pull", "request.number < last or not is_registered()", "not is_registered()"),
        tests=(f"{PULL}::TestGivenALostReply",),
    ),
    Guard(
        name="an expired incarnation takes jobs",
        patches=_script("pull", "request.number < last or not is_registered()", "request.number < last"),
        tests=(f"{PULL}::TestGivenAnIncarnationPastItsLifetime",),
    ),
    Guard(
        name="an older lease has a newer one's request id",
        patches=(Patch("worker/jobs/held_job.py", '{leased.epoch}.{next(_numbers)}"', '{leased.epoch}"'),),
        tests=("tests/worker/jobs/test_leases.py::TestGivenAJobThatComesBack",),
    ),
)

FULL_WORKERS = (
    Guard(
        name="a full worker takes what idle ones had no time for",
        patches=_script(
            "lib_order",
            "if ready_at <= NOW or at > NOW then return false end",
            "if ready_at then return false end",
        ),
        tests=(FULL,),
    ),
    Guard(
        name="a full worker waits for others where none lives",
        patches=_script("lib_order", "if request.num_alive < 2 then return false end", ""),
        tests=(FULL,),
    ),
    Guard(
        name="a full worker takes jobs of the class that it runs",
        patches=_script("lib_order", "highest <= request.over then", "highest < request.over then"),
        tests=(FULL,),
    ),
    Guard(
        name="a full worker takes returned jobs of every class",
        patches=_script("lib_order", "then return job.class <= request.over end", "then return false end"),
        tests=(FULL,),
    ),
    Guard(
        name="the share of the lower classes interrupts",
        patches=_script("lib_order", "not request.over and is_due(lower, cost_of_head)", "is_due(lower, cost_of_head)"),
        tests=(FULL,),
    ),
    Guard(
        name="a full worker pulls as if its room were free",
        patches=(Patch("worker/serve/offered_room.py", "over_class=stated.over_class", "over_class=None"),),
        tests=(f"{CLASSES}/test_interactive_first.py",),
    ),
    Guard(
        name="a preempted job returns with tokens unpublished",
        patches=(Patch("worker/jobs/held_job.py", "if with_output and self.has_updates:", "if False:"),),
        tests=("tests/worker/jobs/test_held_job.py::TestGivenATransition",),
    ),
)

LIVES = (
    Guard(
        name="a heartbeat does not renew the lifetime",
        patches=_script(
            "beat",
            "call('ZADD', ALIVE, now + expires_in, me)",
            "call('ZADD', ALIVE, 'NX', NOW + math.max(expires_in, 4000), me)",
        ),
        tests=(f"{HEARTBEAT}::TestGivenAWorkerThatBeats",),
    ),
    Guard(
        name="a heartbeat has no pull number",
        patches=_script("beat", "not is_listed[id] and lease.number <= processed", "not is_listed[id]"),
        tests=(f"{HEARTBEAT}::TestGivenAWorkerThatBeats",),
    ),
    Guard(
        name="jobs leased by a lost reply are never returned",
        patches=_script("beat", "\ngive_back_orphans()\n", "\n"),
        tests=(f"{HEARTBEAT}::TestGivenAWorkerThatBeats",),
    ),
    Guard(
        name="a hung loop keeps sending heartbeats",
        patches=(
            Patch(
                "worker/serve/heartbeat.py",
                "        if self._watchdog.is_overdue:\n            self._stay_silent()",
                "        if False:\n            self._stay_silent()",
            ),
        ),
        tests=("tests/end_to_end/test_worker_breaks.py::TestGivenAStepThatHangs",),
    ),
    Guard(
        name="a heartbeat after deregistration revives the incarnation",
        patches=_script("beat", "call('HGET', worker_key(me), 'farewell') == '1'", "false"),
        tests=(f"{HEARTBEAT}::TestGivenADeregistration",),
    ),
    Guard(
        name="a deregistration without jobs is not stored",
        patches=_script("give_back", "call('HSET', worker_key(me), 'farewell', 1)"),
        tests=(f"{HEARTBEAT}::TestGivenADeregistration",),
    ),
    Guard(
        name="a job that ended during a heartbeat counts as lost",
        patches=_script("beat", "elseif not was_ended_by_me(id)", "elseif true"),
        tests=(f"{HEARTBEAT}::TestGivenAWorkerThatBeats",),
    ),
    Guard(
        name="a worker that was quieted stays the isolator",
        patches=_script(
            "lib_suspects",
            "return who and left_ms > 0 and left_ms <= LIMITS.HEARTBEAT_LIFETIME_S * 1000 and who or nil",
            "return who",
        ),
        tests=(f"{SUSPECTS}::TestGivenASuspectThatWaits",),
    ),
)

RECLAIMS = (
    Guard(
        name="the lease is deleted at give-back",
        patches=_script("lib_places", "job.published = offsets_of(lease)\n  lease.owner", "lease.owner"),
        tests=(f"{HEARTBEAT}::TestGivenADeregistration", f"{APPEND}::TestGivenSeveralChoices"),
    ),
    Guard(
        name="reclaim right after a restart of the server",
        patches=_script("lib_reclaim", "has_been_up_for(expires_in + LIMITS.BEAT_EVERY_S * 1000)", "true"),
        tests=(f"{HEARTBEAT}::TestGivenARedisThatWasAway",),
    ),
    Guard(
        name="a job of a dead owner that must stop waits until another worker may reclaim it",
        patches=_script("lib_ends", "if is_sound and is_gone(owner, life, until_ms) then", "if false then"),
        tests=(f"{STOPPED}::TestGivenAJobOfADeadOwner",),
    ),
    Guard(
        name="nobody looks again at a job that its owner was asked to stop",
        patches=_script(
            "lib_ends",
            "  add_timer('stop', job, math.max(until_ms + 1, NOW + LIMITS.BEAT_EVERY_S * 1000))\n",
        ),
        tests=(f"{STOPPED}::TestGivenAJobThatWasAskedToStop",),
    ),
    Guard(
        name="a job that must stop ends without its owner right after a restart of the server",
        patches=_script(
            "lib_ends",
            "return has_expired and has_been_up_for(life + LIMITS.BEAT_EVERY_S * 1000)",
            "return has_expired",
        ),
        tests=(f"{STOPPED}::TestGivenARedisThatWasAway",),
    ),
    Guard(
        name="reclaim of all that seem dead by a worker that was cut off itself",
        patches=_script("lib_reclaim", "return may_declare and has_been_up_for", "return has_been_up_for"),
        tests=(f"{HEARTBEAT}::TestGivenADeadWorker", f"{REPORT}::TestGivenWorkersThatMayNotReclaim"),
    ),
    Guard(
        name="a reported death waits as if it could be an error",
        patches=_script("lib_reclaim", "if about[1] == '1' or about[2] == '1' then return true end"),
        tests=(f"{REPORT}::TestGivenWorkersThatMayNotReclaim",),
    ),
    Guard(
        name="a heartbeat in flight revives an incarnation whose process has ended",
        patches=_script("beat", "call('HGET', worker_key(me), 'reported') == '1'", "false"),
        tests=(f"{REPORT}::TestGivenAWorkerThatHoldsAJob",),
    ),
    Guard(
        name="a death is reported of an incarnation that is not registered",
        patches=_script("report_death", "if not expiry then return 0 end", "expiry = expiry or NOW + 1"),
        tests=(f"{REPORT}::TestGivenAWorkerThatHoldsAJob",),
    ),
    Guard(
        name="reclaim by a call that waited for a stalled Redis",
        patches=_script("maintain", "ARGV[4] == '1' and NOW <= (tonumber(until_ms) or NOW)", "ARGV[4] == '1'"),
        tests=(f"{HEARTBEAT}::TestGivenADeadWorker",),
    ),
    Guard(
        name="reclaim within a lifetime of the worker's own stall",
        patches=(
            Patch("worker/serve/pull.py", "may_declare_dead=undisturbed_s > beat.life_s", "may_declare_dead=True"),
        ),
        tests=(f"{TURNS}::TestGivenARedisThatStandsStill",),
    ),
    Guard(
        name="an older request is published after a pull returned its job",
        patches=(Patch("worker/serve/exchange.py", "if not job.is_active:", "if False:"),),
        tests=(f"{TURNS}::TestGivenARoundTripUnderWay",),
    ),
    Guard(
        name="the poison-job rule is off",
        patches=_script("lib_reclaim", "if is_settled_by_death(job, lease, death) then return end"),
        tests=(f"{SUSPECTS}::TestGivenASecondDeathWithoutProgress",),
    ),
    Guard(
        name="progress does not reset deaths",
        patches=_script("advance", "if lease.deaths == 1 then", "if false then"),
        tests=(f"{SUSPECTS}::TestGivenAFirstDeath",),
    ),
    Guard(
        name="deaths without the job are not counted",
        patches=_script("lib_reclaim", "(alone > num_elsewhere(deaths) or alone >= LIMITS.MAX_DEATHS_ALONE)", "true"),
        tests=(f"{SUSPECTS}::TestGivenASecondDeathWithoutProgress",),
    ),
    Guard(
        name="a death is recorded more than once",
        patches=_script("lib_reclaim", "if one.incarnation == death.incarnation then return deaths end"),
        tests=(f"{SUSPECTS}::TestGivenAFirstDeath",),
    ),
    Guard(
        name="a deregistration counts as a death",
        patches=_script("lib_reclaim", "if death.is_deregistered then return false end"),
        tests=(f"{HEARTBEAT}::TestGivenADeregistration",),
    ),
    Guard(
        name="a job waits for its model with a worker of another one",
        patches=_script("lib_taking", "began_with and not is_own(began_with) and", "false and"),
        tests=(f"{PULL}::TestGivenAJobThatAnotherModelBegan",),
    ),
    Guard(
        name="a worker takes a job that names the model of another live worker",
        patches=_script("lib_taking", "return not is_adapter and is_served(model)", "return false"),
        tests=(f"{MODELS}::TestGivenWorkersOfTwoModels",),
    ),
    Guard(
        name="a worker takes a job again that its engine has declined",
        patches=_script("lib_taking", "offers.is_declined_by(job, ME) and offers.has_other(job)", "false"),
        tests=(f"{ENGINES}::TestGivenAJobThatOneEngineDeclines",),
    ),
    Guard(
        name="a job that every engine declines waits for ever",
        patches=_script("give_back", "if not offers.has_other(job) then return 2 end"),
        tests=(f"{ENGINES}::TestGivenAJobThatOneEngineDeclines",),
    ),
    Guard(
        name="a job whose model nobody serves waits for ever",
        patches=_script("lib_taking", "return not is_adapter and is_served(model)", "return not is_adapter"),
        tests=(f"{MODELS}::TestGivenWorkersOfTwoModels",),
    ),
    Guard(
        name="jobs of another model are looked at again and again",
        patches=_script("lib_taking", "LIMITS.ASIDE_EACH_MS * call('ZCARD', DELAYED)", "0"),
        tests=(f"{MODELS}::TestGivenWorkersOfTwoModels",),
    ),
    Guard(
        name="a job that was set aside goes before higher classes",
        patches=_script("lib_timers", "if job.attempt == 0 then make_due_first(job) else", "if false then else"),
        tests=(f"{MODELS}::TestGivenWorkersOfTwoModels",),
    ),
)

CONTROLS = (
    Guard(
        name="a client that waits for an overdue job leaves its timer to workers",
        patches=(Patch("producer/operations/control.py", "            yield from self._fire(overdue)\n", ""),),
        tests=(f"{OVERDUE}::TestGivenAQueueWithoutWorkers", f"{OVERDUE}::TestGivenAJobWhoseOnlyWorkerDied"),
    ),
    Guard(
        name="an overdue job that a client names waits behind all other timers",
        patches=_script("lib_timers", "    if not slice.is_spent() then end_overdue(id) end\n"),
        tests=("tests/protocol/times/test_overdue_jobs.py",),
    ),
    Guard(
        name="an advance does not return the stop flag",
        patches=_script("advance", "lease.flag ~= '' and word .. ' ' .. lease.flag or word", "word"),
        tests=(f"{APPEND}::TestGivenAFlaggedJob",),
    ),
    Guard(
        name="a heartbeat does not return the stop flag",
        patches=_script("beat", "if lease.flag ~= '' then stops", "if false then stops"),
        tests=(f"{HEARTBEAT}::TestGivenAWorkerThatBeats",),
    ),
    Guard(
        name="the stop flag is lost between advance and heartbeat",
        patches=_script(
            "advance", "    lease[at] = from + tokens\n", "    lease[at], lease.flag = from + tokens, ''\n"
        ),
        tests=(f"{APPEND}::TestGivenAFlaggedJob",),
    ),
    Guard(
        name="the stop flag is lost when the owner dies",
        patches=_script(
            "lib_reclaim",
            "if lease.flag ~= '' then return end_without_worker(job, lease, lease.flag, END_REASONS[lease.flag]) end",
        ),
        tests=("tests/protocol/deaths/test_stopped_jobs.py::TestGivenAJobThatWasAskedToStop",),
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
        name="a timer that its effect rescheduled is removed",
        patches=_script("lib_timers", "if again and again <= NOW then", "if again then"),
        tests=("tests/protocol/hostile/test_foreign_timers.py",),
    ),
    Guard(
        name="an urgent timer waits for all that are due before it",
        patches=_script("lib_timers", "local has_more = #due > LIMITS.SLICE_JOBS", "local has_more = false"),
        tests=("tests/protocol/readiness/test_due_timers.py",),
    ),
    Guard(
        name="more urgent timers starve the others",
        patches=_script("lib_timers", "* LIMITS.TIMER_STEP_MS", "* 1e11"),
        tests=("tests/protocol/readiness/test_due_timers.py",),
    ),
    Guard(
        name="the digest of a known id or key is ignored",
        patches=(
            *_script("submit", "if seen.digest ~= job.digest then return { 'conflict', job.id } end"),
            *_script("submit", "if digest ~= job.digest then return { 'conflict', id or '' } end"),
        ),
        tests=(f"{SUBMIT}::TestGivenAJobThatWasSubmitted",),
    ),
    Guard(
        name="an idempotency key expires when its job ends",
        patches=_script(
            "lib_ends",
            "call('SET', idem_key(job), value, 'PX',",
            "call('SET', idem_key(job), value, 'PX', 1 + 0 *",
        ),
        tests=(f"{SUBMIT}::TestGivenAJobThatWasSubmitted",),
    ),
    Guard(
        name="the client retries scripts automatically",
        patches=(
            Patch(
                "protocol/redis/execution.py",
                "return Retry(NoBackoff(), 0)",
                "return Retry(NoBackoff(), 3)",
            ),
        ),
        tests=("tests/worker/connection/test_clients.py",),
    ),
    Guard(
        name="a requeue takes an idempotency key from a newer job",
        patches=_script("requeue", "or has_lost_key(job) then", "then"),
        tests=(f"{CONTROL}::TestGivenTheDeadSet",),
    ),
    Guard(
        name="a rejected job takes a place in the dead set",
        patches=_script("lib_ends", "how.state == 'failed' and not how.is_rejected", "how.state == 'failed'"),
        tests=(f"{CONTROL}::TestGivenTheDeadSet",),
    ),
    Guard(
        name="an ended job's options are lost",
        patches=_script("lib_ends", "  forget_wait(job)\n", "  forget_wait(job)\n  job.spec = 'x'\n"),
        tests=(f"{APPEND}::TestGivenAnEndedJob",),
    ),
)

HISTORY = (
    Guard(
        name="the outbox is acknowledged before SQL has the rows",
        patches=(
            Patch(
                "worker/recorder/recorder.py",
                "            if not self._write(source, entries):\n                break\n"
                '            source.stream.acknowledge_counted(entries, source.keys.key("counters"))\n',
                '            source.stream.acknowledge_counted(entries, source.keys.key("counters"))\n'
                "            if not self._write(source, entries):\n                break\n",
            ),
        ),
        tests=(f"{RECORDER}::TestGivenADatabaseThatGoesAway",),
    ),
    Guard(
        name="an older event overwrites a newer row",
        patches=(
            Patch(
                "history/upserts.py",
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
                "worker/connection/stream_group.py",
                'self._has_group, self._own_cursor = False, b"0"',
                "self._has_group, self._own_cursor = False, None",
            ),
        ),
        tests=(f"{RECORDER}::TestGivenARecorderThatDied",),
    ),
    Guard(
        name="the outbox is read from `$`",
        patches=(
            Patch("worker/connection/stream_group.py", 'self._group, "0", "MKSTREAM"', 'self._group, "$", "MKSTREAM"'),
        ),
        tests=(f"{RECORDER}::TestGivenEventsInTheOutbox",),
    ),
    Guard(
        name="a recorder's name is forgotten with what it has pending",
        patches=(Patch("worker/connection/stream_group.py", "about.name ~= ARGV[2] and about.pending == 0", "true"),),
        tests=(f"{RECORDER}::TestGivenRecordersThatNeverComeBack",),
    ),
    Guard(
        name="the outbox's bound counts entries only",
        patches=_script("submit", "OUTBOX_LENGTH > 0 and OUTBOX_BYTES >= OUTBOX_BYTES_BOUND", "false"),
        tests=(f"{SUBMIT}::TestGivenBounds",),
    ),
    Guard(
        name="the bytes of recorded events stay counted",
        patches=(Patch("worker/connection/stream_group.py", "before - num_bytes", "before"),),
        tests=(f"{RECORDER}::TestGivenAnOutboxWhoseBytesAreCounted",),
    ),
)

CALLBACKS = (
    Guard(
        name="a callback is acknowledged before rq has it",
        patches=(
            Patch(
                "worker/callbacks/mover.py",
                "        for entry in entries:\n            self._move(source.keys, entry)\n",
                "        if entries:\n"
                "            source.stream.acknowledge([entry_id for entry_id, _ in entries])\n"
                "        for entry in entries:\n            self._move(source.keys, entry)\n",
            ),
        ),
        tests=("tests/worker/callbacks/test_callback_crash.py::TestGivenAnRqThatIsAwayWhileTheQueueIsThere",),
    ),
    Guard(
        name="an end gets a new event id each time it is read",
        patches=(
            Patch("worker/callbacks/events.py", "sha256(of_what.encode())", "sha256(__import__('os').urandom(16))"),
        ),
        tests=(f"{WEBHOOKS}::TestGivenAJobThatWantsAWebhook",),
    ),
    Guard(
        name="the body of a callback is not signed",
        patches=(Patch("protocol/webhooks.py", '.{timestamp_s}.".encode() + body', '.{timestamp_s}.".encode()'),),
        tests=("tests/worker/callbacks/test_webhooks.py",),
    ),
)

RESUME = (
    Guard(
        name="resume replays without penalty counts",
        patches=(
            Patch(
                "engine/execution/sampling/seen_tokens.py",
                "slot.num_counted = slot.num_prompt_tokens",
                "slot.num_counted = len(slot.token_ids)",
            ),
        ),
        tests=(f"{SAMPLING}::TestGivenSeeds::test_when_an_earlier_attempt_stopped_then_tokens_resume_there",),
    ),
    Guard(
        name="resume draws the noise of another position",
        patches=(
            Patch(
                "engine/sequence.py",
                "self.num_prompt_tokens,\n            tuple(table",
                "self.num_prompt_tokens + self.num_resumed_tokens,\n            tuple(table",
            ),
        ),
        tests=(f"{SAMPLING}::TestGivenSeeds::test_when_an_earlier_attempt_stopped_then_tokens_resume_there",),
    ),
    Guard(
        name="choices share their noise",
        patches=(Patch("engine/execution/sampling/row_options.py", "counter_2(slot.choice)", "counter_2(0)"),),
        tests=(f"{SAMPLING}::TestGivenSeeds::test_when_choices_or_seeds_differ_then_so_do_their_tokens",),
    ),
    Guard(
        name="resume restarts the count of min_tokens",
        patches=(
            Patch(
                "engine/text/output.py",
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
                "engine/text/output.py",
                "        self.num_tokens = len(token_ids)\n",
                "        self.num_tokens = len(token_ids)\n"
                "        if self._matcher:\n            self._matcher.release()\n",
            ),
        ),
        tests=("tests/properties/test_text_is_a_function_of_tokens.py::test_a_replay_goes_on_where_the_text_was",),
    ),
    Guard(
        name="an end found by the replay is not reported",
        patches=(
            Patch(
                "engine/llm_engine.py",
                "if finish := rejected or output.finish:",
                "if finish := rejected:",
            ),
        ),
        tests=(f"{ENGINE}::TestGivenARequestThatWasRunningElsewhere",),
    ),
)

OVERLAP = (
    Guard(
        name="a late stop releases blocks while its row is in flight",
        patches=(
            Patch(
                "engine/scheduling/scheduler.py",
                "if not sequence.num_launched_tokens:\n                self._release(sequence)\n            elif",
                "if True:\n                self._release(sequence)\n            elif",
            ),
        ),
        tests=(f"{OVERLAPPED}::TestGivenALateStop", MACHINE),
    ),
    Guard(
        name="a preemption in flight releases blocks at once",
        patches=(
            Patch(
                "engine/scheduling/scheduler.py",
                "        if victim.num_launched_tokens:\n",
                "        if False:\n",
            ),
        ),
        tests=(f"{OVERLAPPED}::TestGivenAPreemptionInFlight", MACHINE),
    ),
    Guard(
        name="a discarded row is read",
        patches=(Patch("engine/execution/isolation.py", "        if unwanted:\n", "        if False:\n"),),
        tests=(f"{OVERLAPPED}::TestGivenALateStop",),
    ),
    Guard(
        name="a step launched on top of a failed step counts",
        patches=(Patch("engine/llm_engine.py", "if outcome.has_failed and self._in_flight is not None:", "if False:"),),
        tests=(f"{OVERLAPPED}::TestGivenAStepThatFailsInFlight",),
    ),
    Guard(
        name="a step is planned past a sequence's last token",
        patches=(
            Patch(
                "engine/sequence.py",
                "num_tokens > self.most_ahead_tokens",
                "num_tokens > self.most_ahead_tokens + 2",
            ),
        ),
        tests=(f"{OVERLAPPED}::TestGivenADeviceThatLags",),
    ),
    Guard(
        name="penalties do not count the token in flight",
        patches=(
            Patch(
                "engine/execution/sampling/edited_rows.py",
                "if len(rows.slots[number].token_ids) < ends[number]:",
                "if False:",
            ),
        ),
        tests=(f"{SAMPLING}::TestGivenSeeds::test_when_requests_run_in_any_batch_then_tokens_are_the_same",),
    ),
    Guard(
        name="a token is fed from another sequence's batch row",
        patches=(Patch("engine/execution/layout.py", "-1 - drawn_rows[sequence_id]", "-1"),),
        tests=(
            "tests/engine/execution/test_layout.py",
            f"{SAMPLING}::TestGivenSeeds::test_when_requests_run_in_any_batch_then_tokens_are_the_same",
        ),
    ),
    Guard(
        name="a prompt in flight is recomputed by sequences that share it",
        patches=(
            Patch(
                "engine/scheduling/continuous.py",
                "for sequence in self.running if sequence.num_launched_tokens > 1]",
                "for sequence in self.running if False]",
            ),
        ),
        tests=(f"{OVERLAPPED}::TestGivenADeviceThatLags",),
    ),
)

LIMITED = (
    Guard(
        name="a tenant starts jobs above its limit in one pull",
        patches=_script("lib_order", "if limits and not limits.may_start(lane.tenant) then", "if false then"),
        tests=(f"{RUNNING}::TestGivenATenantThatMayRunTwoJobs",),
    ),
    Guard(
        name="a tenant at its limit that is listed starts a job",
        patches=_script("lib_classes", "  if limits then leave_out_limited(listing) end\n"),
        tests=(f"{LOST}::TestGivenATenantAtItsLimit",),
    ),
    Guard(
        name="each partition allows the limit of the whole queue",
        patches=_script("lib_limits", "limit > 0 and part_of(limit) or 0", "limit"),
        tests=(f"{RUNNING}::TestGivenAQueueOfThreePartitions",),
    ),
    Guard(
        name="a pull meets a tenant at its limit again and again",
        patches=_script(
            "lib_limits", "if at and (limit.is_met or not was_parked) then", "if at and not was_parked then"
        ),
        tests=(f"{LOST}::TestGivenATenantAtItsLimit",),
    ),
    Guard(
        name="leases of before a limit do not count",
        patches=_script("lib_limits", "ipairs(leases_of_tenants[limit.tenant] or {})", "ipairs({})"),
        tests=(f"{RUNNING}::TestGivenATenantThatRunsFourJobs",),
    ),
    Guard(
        name="a parked tenant is listed by its next submit",
        patches=_script("lib_lanes", "if limits and limits.is_parked(lane.tenant) then return end", ""),
        tests=(f"{RUNNING}::TestGivenATenantThatMayRunTwoJobs",),
    ),
    Guard(
        name="a parked tenant is forgotten",
        patches=_script("lib_limits", "    if was_parked and not at then list_again(tenant) end\n"),
        tests=(f"{RUNNING}::TestGivenATenantThatMayRunTwoJobs",),
    ),
    Guard(
        name="a job that returns keeps its place",
        patches=_script(
            "lib_places", "(job, lease)\n  count_running(job.id, -1)", "(job, lease)\n  count('running_jobs', -1)"
        ),
        tests=(f"{RUNNING}::TestGivenATenantThatMayRunTwoJobs",),
    ),
    Guard(
        name="tokens that a job did not use are lost",
        patches=_script("lib_limits", "tokens_of(limit) - tokens)", "tokens_of(limit) - math.max(0, tokens))"),
        tests=(f"{TOKENS}::TestGivenATenantThatMayTake60TokensAMinute",),
    ),
    Guard(
        name="a tenant saves up tokens for more than a minute",
        patches=_script("lib_limits", "math.min(limit.per_minute, tokens + math.max", "(tokens + math.max"),
        tests=(f"{TOKENS}::TestGivenATenantThatMayTake60TokensAMinute",),
    ),
    Guard(
        name="tokens do not flow back after a step back of the clock",
        patches=_script("lib_limits", "  if at > NOW then limit.is_changed = true end\n"),
        tests=(f"{TOKENS}::TestGivenATenantThatMayTake60TokensAMinute",),
    ),
    Guard(
        name="nobody says when a parked tenant may start again",
        patches=_script("lib_time", "if first and not failed(first) then", "if false then"),
        tests=(f"{TOKENS}::TestGivenATenantThatMayTake60TokensAMinute",),
    ),
    Guard(
        name="a job that counts as running without a lease does so for ever",
        patches=_script("lib_limits", "    if tenant then forget_ended(tenant) end\n"),
        tests=(f"{LOST}::TestGivenATenantAtItsLimit",),
    ),
    Guard(
        name="leases that a server has lost from the count are not counted again",
        patches=_script("lib_limits", "ipairs(call('HKEYS', held_key(incarnation)))", "ipairs({})"),
        tests=(f"{LOST}::TestGivenATenantAtItsLimit",),
    ),
    Guard(
        name="a tenant that is parked without a limit is forgotten",
        patches=_script("lib_recount", "if not limits and call('EXISTS', PARKED) == 1 then", "if false then"),
        tests=(f"{LOST}::TestGivenATenantAtItsLimit",),
    ),
    Guard(
        name="the waiting jobs of parked tenants are not counted again",
        patches=_script("lib_recount", "  if limits and ids then add_parked() end\n"),
        tests=(f"{LOST}::TestGivenATenantAtItsLimit",),
    ),
    Guard(
        name="the audit reports the lanes of parked tenants",
        patches=_script("lib_counts", "  if limits and limits.is_parked(tenant) then return true end\n"),
        tests=(f"{LOST}::TestGivenATenantAtItsLimit",),
    ),
    Guard(
        name="a bucket that another program wrote is used",
        patches=_script("lib_limits", "if not is_sound then tokens", "if not tokens then tokens"),
        tests=(f"{LOST}::TestGivenForeignValues",),
    ),
    Guard(
        name="a purge leaves the jobs of parked tenants",
        patches=_script("purge", "if limits and only == '' and not is_spent() then purge_parked() end\n"),
        tests=(f"{RUNNING}::TestGivenATenantThatMayRunTwoJobs",),
    ),
)

ORDERS = (
    Guard(
        name="a long output is charged only at its end",
        patches=_script("lib_advance", "if due <= job.charged then return end", "if true then return end"),
        tests=(f"{SHARES}::TestGivenOutputsFarBeyondTheReserve",),
    ),
    Guard(
        name="a stream of new tenants starves a tenant that is ahead",
        patches=_script("lib_lanes", "math.max(least, math.min(greatest + 1, served_of(':' .. class)))", "least"),
        tests=(f"{SHARES}::TestGivenATenantThatIsAheadAndNewcomersWithoutEnd",),
    ),
    Guard(
        name="jobs with deadlines starve jobs without",
        patches=_script("lib_lanes", "return step > 0 and at", "return false and at"),
        tests=(f"{SHARES}::TestGivenJobsWithDeadlinesWithoutEnd",),
    ),
    Guard(
        name="a weight of any value is accepted",
        patches=_script("lib_settings", "not weight_in(value) and 'a number", "false and 'a number"),
        tests=(f"{ORDER}::TestGivenModeFair",),
    ),
    Guard(
        name="a weight that another program wrote is used",
        patches=_script("lib_lanes", "weight and weight >= LIMITS.MIN_WEIGHT and", "weight and"),
        tests=(f"{ORDER}::TestGivenModeFair",),
    ),
    Guard(
        name="ageing lifts a job above the second-highest class",
        patches=_script(
            "lib_order",
            "not request.over and is_due(lower, cost_of_head)",
            "not request.over and (is_due(lower, cost_of_head) or NOW - oldest_of(listings[lower]) > 9 * AGE_STEP)",
        ),
        tests=(f"{ORDER}::TestGivenClasses",),
    ),
    Guard(
        name="the highest class starves the lower ones",
        patches=_script(
            "lib_order", "    if not request.over and is_due(lower, cost_of_head) then class, share = lower, -1 end\n"
        ),
        tests=(f"{ORDER}::TestGivenClasses",),
    ),
    Guard(
        name="lower classes take more than their share",
        patches=_script("lib_order", "return share >= due_at", "return true"),
        tests=(f"{ORDER}::TestGivenClasses",),
    ),
    Guard(
        name="requeued jobs go before all classes",
        patches=_script("requeue", "enqueue(job, job.class, NOW, lease)", "enqueue_again(job, lease)"),
        tests=(f"{CONTROL}::TestGivenTheDeadSet",),
    ),
    Guard(
        name="requeued jobs age from their submit",
        patches=_script(
            "requeue", "enqueue(job, job.class, NOW, lease)", "enqueue(job, job.class, job.submitted, lease)"
        ),
        tests=(f"{CONTROL}::TestGivenTheDeadSet",),
    ),
    Guard(
        name="the start of a requeued job is not charged",
        patches=_script("lib_order", "if job.charged and job.charged >= job.cost then", "if job.charged then"),
        tests=(f"{CONTROL}::TestGivenTheDeadSet",),
    ),
    Guard(
        name="a tenant that came once is kept for ever",
        patches=_script("lib_lanes", "num_behind > 0 and num_behind or math.floor(#idle / 2)", "num_behind"),
        tests=(f"{ORDER}::TestGivenModeFair",),
    ),
    Guard(
        name="the virtual tokens of a waiting tenant are forgotten",
        patches=_script("lib_lanes", "is_tenant(tenant) and not waits(tenant)", "is_tenant(tenant)"),
        tests=(f"{ORDER}::TestGivenModeFair::test_when_many_tenants_have_come_and_gone_then_they_are_forgotten",),
    ),
)

HOSTILE = "tests/protocol/hostile/test_damaged_jobs.py"
OWN_LANE = "tests/protocol/hostile/test_own_lane.py"
ARGUMENTS = "tests/protocol/hostile/test_arguments.py"
HOSTILES = (
    Guard(
        name="numbers in a job's row are not checked",
        patches=_script("lib", "and type(value) == 'number' and whole(value, most)", ""),
        tests=(
            f"{HOSTILE}::TestGivenADamagedJobOnItsLane"
            "::test_when_workers_pull_then_others_run_and_it_is_named[retry--1]",
        ),
    ),
    Guard(
        name="heartbeats expire by the server's clock",
        patches=_script("lib", "if not at or not read then return NOW end", "if true then return NOW end"),
        tests=("tests/protocol/deaths/test_clock_steps.py",),
    ),
    Guard(
        name="the clock of heartbeats advances by any step",
        patches=_script("lib", "math.max(0, math.min(NOW - read, most", "math.max(0, math.max(NOW - read, most"),
        tests=("tests/protocol/deaths/test_clock_steps.py",),
    ),
    Guard(
        name="a stream at its last id stays as it is",
        patches=_script("lib", "if failed(try('UNLINK', key)) then return end", "if true then return end"),
        tests=("tests/protocol/hostile/test_shared_keys.py::TestGivenASharedStreamAtItsLastId",),
    ),
    Guard(
        name="an outbox at its last id is read whole",
        patches=_script("lib", "key == OUTBOX and LIMITS.OUTBOX_KEPT or 0", "2 ^ 20"),
        tests=("tests/protocol/hostile/test_shared_keys.py::TestGivenALongOutboxAtItsLastId",),
    ),
    Guard(
        name="dead workers that may not be declared dead hide the reported ones",
        patches=_script("lib_reclaim", "and number * LIMITS.SLICE_JOBS % num_expired or 0", "and 0 or 0"),
        tests=(f"{REPORT}::TestGivenWorkersThatMayNotReclaim",),
    ),
    Guard(
        name="returned jobs too large for a survivor hide those behind them",
        patches=_script("lib_order", "if lane.class ~= RETURNED then return skip", "if true then return skip"),
        tests=("tests/protocol/deaths/test_large_jobs.py",),
    ),
    Guard(
        name="a worker does not end what it runs at its deadline",
        patches=(
            Patch("worker/serve/heartbeat.py", "if deadline_ms is not None and deadline_ms <= now_ms", "if False"),
        ),
        tests=("tests/integration/test_worker_deadlines.py",),
    ),
    Guard(
        name="a time from now is read as a point in time",
        patches=_script("submit", "from_now(job.deadline_in) or", "job.deadline_in or"),
        tests=(FROM_NOW,),
    ),
    Guard(
        name="a time from now that is no number is accepted",
        patches=_script("submit", ", 'not_before_in', 'deadline_in' }", " }"),
        tests=(FROM_NOW,),
    ),
    Guard(
        name="a time too far from now makes a job that cannot be read",
        patches=_script("lib", "ms and math.min(NOW + ms, LIMITS.MAX_NUMBER)", "ms and NOW + ms"),
        tests=(FROM_NOW,),
    ),
    Guard(
        name="a timer of another user takes effect before the job's own time",
        patches=_script("lib_timers", "if due and due > NOW then", "if false then"),
        tests=("tests/protocol/hostile/test_foreign_timers.py",),
    ),
    Guard(
        name="an entry of changing types stops the recorder",
        patches=(
            Patch("history/rows.py", "value if type(value) is int and abs(value) < 2**63 else None", "value"),
            Patch("worker/recorder/recorder.py", "if self._is_sound(outbox, entry)]", "if entry]"),
        ),
        tests=(f"{RECORDER}::TestGivenEventsInTheOutbox",),
    ),
    Guard(
        name="a lane at its last id is never emptied",
        patches=_script("lib_lanes", "    list_lane(lane, NOW, score_of(lane, NOW))\n"),
        tests=(f"{OWN_LANE}::TestGivenAnEntryAtTheLastIdOfALane",),
    ),
    Guard(
        name="forged counters refuse submits until an audit",
        patches=_script("lib_recount", "    write(sums)\n"),
        tests=("tests/protocol/hostile/test_shared_keys.py::TestGivenCountersThatClaimAFullQueue",),
    ),
    Guard(
        name="a timer that another user moved stays there",
        patches=_script("lib_recount", "if job[kind] then call('ZADD'", "if false then call('ZADD'"),
        tests=("tests/security/test_what_remains.py",),
    ),
    Guard(
        name="the audit believes a timer that another user moved",
        patches=_script("lib_counts", "if score and score <= at then", "if score then"),
        tests=("tests/security/test_what_remains.py",),
    ),
    Guard(
        name="a channel ahead of its lease fails the job",
        patches=_script("advance", "if catch_up(id, lease, choice, from + tokens) then return", "if false then return"),
        tests=(f"{APPEND}::TestGivenAChannelAheadOfItsLease",),
    ),
    Guard(
        name="virtual tokens leave the numbers",
        patches=_script("lib_lanes", "math.max(0, math.min(tokens, LIMITS.MAX_NUMBER))", "math.max(0, tokens)"),
        tests=("tests/protocol/hostile/test_shared_keys.py::TestGivenPositionsThatNoTenantHas",),
    ),
    Guard(
        name="a forged version keeps the real end out of the history",
        patches=(Patch("worker/audit/repair.py", "if self._history is not None and forged:", "if False:"),),
        tests=("tests/worker/audit/test_audit_history.py::TestGivenAQueueThatWentBack",),
    ),
    Guard(
        name="settings are written unchecked",
        patches=_script(
            "configure", "if wanted then return redis.error_reply", "if false then return redis.error_reply"
        ),
        tests=(f"{ARGUMENTS}::TestGivenASettingOutOfItsRange",),
    ),
    Guard(
        name="a setting that does not exist is written",
        patches=_script(
            "lib_settings",
            "if not (is_weight or limit or WORDS[name] or NUMBERS[name]) then",
            "if not is_weight and false then",
        ),
        tests=(f"{ARGUMENTS}::TestGivenASettingOutOfItsRange",),
    ),
    Guard(
        name="a worker's memory is written over a newer setting",
        patches=_script("restore_settings", "not is_known(name) and value ~= ''", "value ~= ''"),
        tests=(f"{RESTORED}::TestGivenSettingsThatAreLost",),
    ),
    Guard(
        name="a worker's memory is written though the settings are not lost",
        patches=_script("restore_settings", "known_began == began and known_number <= number", "false"),
        tests=(f"{RESTORED}::TestGivenSettingsThatAWorkerHasRead",),
    ),
    Guard(
        name="a worker that read fewer changes before the loss decides",
        patches=_script("restore_settings", " and known_number <= number", ""),
        tests=(f"{RESTORED}::TestGivenSettingsThatAreLost",),
    ),
    Guard(
        name="a worker's memory is written unchecked",
        patches=_script("restore_settings", "and not refusal_of(name, value)", ""),
        tests=(f"{RESTORED}::TestGivenSettingsThatAreLost",),
    ),
    Guard(
        name="a change of the settings has no new stamp",
        patches=_script("lib_settings", "if not has_more then stamp_change(pairs) end"),
        tests=(f"{RESTORED}::TestGivenSettingsThatAWorkerHasRead", f"{RESTORED}::TestGivenSettingsThatAreLost"),
    ),
    Guard(
        name="a job of another partition is accepted",
        patches=_script("lib_base", "local JOB_ID = '^' .. PARTITION ..", "local JOB_ID = '^%d+' .."),
        tests=(f"{ARGUMENTS}::TestGivenArgumentsThatNoClientSends",),
    ),
    Guard(
        name="an end is written before it is checked",
        patches=_script("lib_advance", "}, ENDS[letter] and at", "}, at"),
        tests=(f"{ARGUMENTS}::TestGivenArgumentsThatNoClientSends",),
    ),
    Guard(
        name="tokens without an entry are taken of a job that goes on",
        patches=_script("advance", "if not at or tokens > 0 and entry == ''", "if not at or false and entry == ''"),
        tests=(f"{ARGUMENTS}::TestGivenArgumentsThatNoClientSends",),
    ),
    Guard(
        name="a silent end leaves what a failed call began on its channel",
        patches=_script("lib_ends", "    deleted[#deleted + 1] = channel_key(job, 0)\n    return\n", "    return\n"),
        tests=("tests/protocol/test_append.py::TestGivenAJobWhoseWorkerNeedsNoChannel",),
    ),
    Guard(
        name="a count of many lanes does not see that a delayed job became due",
        patches=_script(
            "lib_counts",
            "last_id(OUTBOX) .. '/' .. last_id(NOTIFICATIONS) .. '/' .. num_off_lanes()",
            "last_id(OUTBOX)",
        ),
        tests=("tests/worker/audit/test_many_lanes.py",),
    ),
    Guard(
        name="sums of an earlier state are written",
        patches=_script("repair_counters", "ARGV[3] == stamp()", "true"),
        tests=("tests/worker/audit/test_many_lanes.py",),
    ),
    Guard(
        name="a recount is written before it is checked",
        patches=_script("repair_counters", "if not is_sound() then", "if false then"),
        tests=(f"{ARGUMENTS}::TestGivenArgumentsThatNoClientSends",),
    ),
    Guard(
        name="a batch is closed before its arguments are checked",
        patches=_script("close_batch", "if not is_sound then", "if false then"),
        tests=(f"{ARGUMENTS}::TestGivenArgumentsThatNoClientSends",),
    ),
    Guard(
        name="a row whose seed is foreign reaches the engine",
        patches=(Patch("protocol/calls/leasing.py", 'row.spec if seed < 2**64 else b""', "row.spec"),),
        tests=(f"{HOSTILE}::TestGivenADamagedJobOnItsLane",),
    ),
)

MIGRATIONS: tuple[Guard, ...] = (
    Guard(
        name="a job that a living worker of the earlier format runs is moved",
        patches=_script(
            "lib_migration",
            "return job.state == 'running' and lease and lease.owner ~= '' and",
            "return false and",
        ),
        tests=(f"{MIGRATED}::TestGivenAQueueOfFormat1",),
    ),
    Guard(
        name="a job that both formats have is moved over the other",
        patches=_script("lib_migration", "if call('EXISTS', row_key(job)) == 1 then", "if false then"),
        tests=(f"{MIGRATED}::TestGivenJobsThatBothFormatsHave",),
    ),
    Guard(
        name="a job is deleted before it is moved",
        patches=_script(
            "lib_format_1",
            "  leaving[#leaving + 1] = {",
            "  call('DEL', key('job', job.suffix))\n  leaving[#leaving + 1] = {",
        ),
        tests=(f"{KILLED}::TestGivenACommandThatFails",),
    ),
    Guard(
        name="an earlier format with a living worker is ended",
        patches=_script("finish_format_1", "or living + unread > 0 then", "or unread > 0 then"),
        tests=(f"{MIGRATED}::TestGivenAQueueOfFormat1",),
    ),
    Guard(
        name="a foreign field of an earlier hash becomes a row",
        patches=_script("lib_format_1", "if string.find(fields.seed, '%D') then return nil, 'seed' end", ""),
        tests=(f"{MIGRATED}::TestGivenForeignValuesInFormat1",),
    ),
    Guard(
        name="a migration leaves the earlier format open to submits",
        patches=_script("close_format_1", "call('HSET', from, 'durability', ARGV[1], 'max_waiting_jobs', 0)", ""),
        tests=(f"{MIGRATED}::TestGivenAQueueOfFormat1",),
    ),
    Guard(
        name="an idempotency key of another job is replaced",
        patches=_script(
            "lib_migration", "call('SET', idem_key(job), known, 'NX')", "call('SET', idem_key(job), known)"
        ),
        tests=(f"{MIGRATED}::TestGivenJobsThatBothFormatsHave",),
    ),
    Guard(
        name="a migration goes on after a command that fails",
        patches=_script("lib_format_1", "if not string.find(reply.err, 'WRONGTYPE', 1, true) then", "if false then"),
        tests=("tests/migration/test_killed_migration.py::TestGivenACommandThatFails",),
    ),
)

GUARDS: tuple[Guard, ...] = (
    *FENCE,
    *FLEET,
    *KEPT,
    *BOUNDS,
    *APPENDS,
    *WAKEUPS,
    *PULLS,
    *FULL_WORKERS,
    *LIVES,
    *RECLAIMS,
    *CONTROLS,
    *HISTORY,
    *CALLBACKS,
    *RESUME,
    *OVERLAP,
    *ORDERS,
    *LIMITED,
    *HOSTILES,
    *MIGRATIONS,
)
