"""Limits of messages and defaults of queues. Limits are checked when a message is created and when it is read."""

MAX_PROMPT_BYTES = 4 * 1024 * 1024
"""Encoded prompt of one job, in bytes."""

MAX_MESSAGES = 10_000
"""Messages of a chat in a request in OpenAI's format."""

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_STRUCTURED_CHARS = 128 * 1024
"""Grammar of one job: a schema as JSON, or the text of another kind."""

MAX_TOOLS = 128
MAX_TOOL_NAME_CHARS = 64
MAX_LOGPROBS = 20
MAX_DIMENSIONS = 65_536
MAX_INPUTS = 2048
"""Texts in one request for embeddings, each of which is a job."""

MAX_CHOICES = 64
MAX_TOKENS = 1_000_000
DEFAULT_MAX_TOKENS = 256
"""Most tokens of a choice if neither the request nor the model states it."""

MAX_NUMBER = 2**53
"""Greatest number in a job's row or a lane's entry: times, counts and versions. Scripts compute with doubles."""

MAX_ROW_NUMBER = 2**48 - 2
"""Greatest number of tokens, bytes or milliseconds in a job's row."""

MAX_ROW_BYTES = 1_000_000
"""Longest row of a job."""

MAX_VERSION = 2**31 - 1
"""Version of a job in an event: it grows by one with each change of the job's state."""

MAX_MODEL_CHARS = 512
MAX_MODEL_BYTES = 4 * MAX_MODEL_CHARS
MAX_OFFER_BYTES = 1024
"""Length of the text in which a worker publishes what its engine can run."""

MAX_ADAPTERS = 256
"""Adapters that a worker's heartbeat names, and in `MAX_PARENTS` those of all workers, each with its model, that are
read together."""

MAX_PARENTS = 2048
MAX_OFFERS = 64
"""Different ones of a partition that scripts compare."""

MAX_BATCH_CHARS = 64
MAX_CUSTOM_ID_CHARS = 512
MAX_ENDPOINT_CHARS = 64
MAX_TRACEPARENT_CHARS = 128
MAX_SPEC_BYTES = 256 * 1024
"""Encoded options, metadata and addresses of one job."""

MAX_ENTRY_BYTES = 16 * 1024 * 1024
"""One channel entry; a step adds a few tokens, a replayed one may add many."""

MAX_EVENTS_BYTES = 32 * 1024 * 1024
"""One outbox entry: the events of one script call."""

MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
MAX_URL_CHARS = 2048
MAX_IDEMPOTENCY_KEY_CHARS = 256
MAX_QUEUE_NAME_CHARS = 64
MAX_TENANT_CHARS = 64
MAX_JOB_NAME_CHARS = 64
"""Last part of a job id; random, or chosen by the producer."""

MAX_INCARNATION_BYTES = 256
MAX_DIGEST_BYTES = 256
MAX_STAMP_BYTES = 128
"""Ids of two stream entries and a number."""

MAX_LANE_BYTES = 256
MAX_RESULT_BYTES = 64 * 1024 * 1024
MAX_TTL_S = 10**9
MAX_PRIORITY = 9
"""Priority classes are 0 (least urgent) to 9."""

MAX_JOBS_PER_CALL = 64
"""Jobs in one submit, or that one advance or worker returns: a call holds the server for a few milliseconds at most."""

MAX_UPDATES_PER_CALL = 256
"""Choices in one advance. At most `MAX_JOBS_PER_CALL` of them may bring more than tokens, such as an end."""

LANES_PER_COUNT = 256
"""Lanes that one call of the audit counts. A partition with fewer is counted at one instant."""

SETTINGS_PER_CALL = 256
"""Settings that one call reads or restores, about: weights and limits of tenants may be many."""

LOOKS_PER_CALL = 256
"""Lanes and entries that one purge examines, and tenants that a call reads at a time."""

MAX_CALL_BYTES = 1024 * 1024
"""Arguments of one submit or advance; a larger job is sent alone."""

SLICE_JOBS = 32
"""Jobs in one slice: a reclaim, cancel or firing of timers."""

PULL_JOBS = 128
"""Jobs that one pull takes. Each costs less than a job of another slice, and the pull itself as much as several."""

SLICE_CHANNELS = 128
"""Channels that a slice closes before it leaves its other jobs to the next slice: a job may have 64 choices."""

IDLE_FIRST_MS = 50
"""A full worker takes a job of a higher class only after the job has waited this long, so that idle workers are
preferred. If no other worker lives, it takes the job at once."""

SORTED_TIMERS = 1000
"""Due timers that one call lists by urgency, while more are due than it fires."""

TIMER_STEP_MS = 3_600_000
"""Among due timers, one of a higher class goes first unless the other has been due for this much longer per class."""

MAX_LANES_PER_PULL = 32
"""Lanes that one pull takes jobs from."""

MAX_LANES_LISTED = 64
"""Lanes of one class that one pull reads, at most."""

MAX_SKIPPED_PER_PULL = 32
"""Further lanes that one pull examines in vain; and returned jobs, up to `MAX_RETURNED_PER_PULL`, if the worker is
full."""

MAX_RETURNED_PER_PULL = 8
MAX_SPOILED_PER_LANE = 8
"""Entries of a lane without a job for this worker (consecutive foreign ones count as one) after which a pull continues
with other lanes. In all lanes: `SLICE_JOBS`."""

MAX_SUSPECTS_PER_PULL = 8
MAX_DEAD_PER_CALL = 4

BEAT_EVERY_S = 1.0
HEARTBEAT_LIFETIME_S = 4.0
"""A heartbeat expires after this long; then the worker counts as dead."""

BEATS_PER_LIFE = 3
"""Least number of heartbeats in a lifetime. One advances the clock of heartbeats by at most this part of it."""

LOOK_AGAIN_MS = 50
"""Shortest time until an idle worker checks again for an expired heartbeat."""

WORKER_KEPT_S = 3600.0
"""How long the fields of a heartbeat are kept after the last one."""

CHANNEL_TTL_S = 600.0
"""How long a channel is kept after its job has ended. Later readers use the result."""

EMPTY_CHANNEL_TTL_S = 60.0
"""How long a channel without tokens is kept: each takes 4 KB, and many jobs may be cancelled at once."""

RESULT_TTL_S = 86_400.0
IDEMPOTENCY_TTL_S = 86_400.0
"""How long an idempotency key is kept after its job has ended."""

DEAD_SET_MAX = 10_000
DEAD_TTL_S = 14 * 86_400.0
"""How long a failed job is kept in the dead set."""

BELL_MAXLEN = 64
GARBAGE_MAXLEN = 1000
"""Entries written by other programs that are kept for inspection."""

GARBAGE_ENTRY_BYTES = 1024

OUTBOX_KEPT = 1000
OUTBOX_KEPT_BYTES = 4 * 1024 * 1024
"""Newest entries of an outbox at its last possible id that the next script keeps, and the bytes after which it keeps no
more."""

DEFAULT_MAX_WAITING_JOBS = 1_000_000
DEFAULT_MAX_WAITING_TOKENS = 2_000_000_000
DEFAULT_MAX_WAITING_BYTES = 4 * 1024 * 1024 * 1024
DEFAULT_TENANT_SHARE_PERCENT = 50
"""Share of the bounds of a queue, without what other tenants use, that one tenant may use."""

TENANT_KEPT_MS = 86_400_000
"""How long a queue leaves room for a tenant without waiting jobs."""

TENANTS_KEPT = 1000
"""Tenants without waiting jobs above which they are forgotten sooner."""

DEFAULT_MAX_OUTBOX_ENTRIES = 1_000_000
DEFAULT_MAX_OUTBOX_BYTES = 4 * 1024 * 1024 * 1024
"""Events of the outbox, packed. One entry may hold those of 64 jobs with their prompts."""

DEFAULT_BYTES_PER_TOKEN = 4.0
DEFAULT_RESERVE_TOKENS = 256
"""Most output tokens of one choice that count towards the cost of a job."""

DEFAULT_MAX_FAILURES = 3
"""Retryable failures after which a job ends failed. Deaths of workers are counted separately."""

WORKERS_PER_PAGE = 100
"""Workers that one call lists, with all fields of their heartbeats. It may list twice as many in a small fleet."""

FIELDS_PER_PAGE = 500
"""Fields of heartbeats that one call lists, if it asks for particular fields."""

LANES_PER_PAGE = 1000
LIMITS_PER_PAGE = 100
"""Limits of tenants that one call lists: each costs a few commands."""

NEAREST_TIMERS = 100
"""Timers that an inspection reads at a time; `MOST_NEAREST_TIMERS` in all."""

MOST_NEAREST_TIMERS = 1000

ASIDE_MS = 200
"""Shortest time for which a pull sets a job aside that another worker may have: one of its model, or a larger one."""

ASIDE_EACH_MS = 2
"""Additional time for each delayed job, so that at most 500 of them are examined a second."""

ASIDE_MOST_MS = 60_000
"""Longest time for which such a job is set aside."""

FOREIGN_LANE_WAIT_S = 10.0
"""Delay of a job whose lane has a key of the wrong type."""

SERVED_KEPT = 1000
"""Tenants without waiting jobs whose virtual tokens are kept."""

SUSPECT_DEATHS = 2
"""From this number of deaths on, a job runs in isolation alone."""

SUSPECT_WAIT_S = 30.0
"""After a suspect has waited this long, the next worker that pulls is drained for it."""

MAX_DEATHS_ALONE = 6
"""Deaths while a job runs alone after which the job fails, even if other workers died in between."""

CHARGE_EVERY_TOKENS = 128
"""Tokens of a choice between two checks whether its tenant has been charged for them."""

MIN_WEIGHT = 0.001
MAX_WEIGHT = 1000.0
"""A tenant's weight in mode fair is in this range. Other values would overflow or reverse its virtual tokens."""

MAX_TENANT_LIMIT = 10**12
"""Greatest limit of a tenant, of running jobs or of tokens a minute."""

DEFAULT_AGE_STEP_S = 60.0
"""Waiting time that raises a lane by one priority class, among the classes below the highest that waits."""

LOWER_CLASSES_SHARE = 0.05
"""Share of the tokens that the classes below the highest one get while it waits."""

STEPS_WITHOUT_DEADLINE = 10
"""In mode deadline, a job without a deadline is due this many steps of ageing after its submit."""

STARTING = "starting"
"""Field of a queue's settings that a worker writes while it loads its model: `<server's time in ms> <host>`."""

STARTING_LIFE_MS = 15_000
"""How long `STARTING` is valid. The worker renews it in a third of this time."""

CAPACITY = "capacity"
"""Field of a queue's settings with the tokens/s of a full worker, kept for when no worker is left."""

CAPACITY_FIELD = "capacity_tokens_per_s"
"""Field of a worker's status report with its tokens/s when full; absent until it is measured."""

HELD_TOKENS_FIELD = "held_tokens"
"""Field of a worker's status report with the reserved tokens that its jobs have not used up."""
