"""Every bound of a message, in one place. Checked where a message is made and again where it is read."""

MAX_PROMPT_BYTES = 4 * 1024 * 1024
"""Encoded prompt of one job."""

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_CHOICES = 64
MAX_TOKENS = 1_000_000
MAX_MODEL_CHARS = 512
MAX_BATCH_CHARS = 64
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
"""Last part of a job id; drawn, or chosen by the producer."""
MAX_ERROR_CHARS = 2000
MAX_RESULT_BYTES = 64 * 1024 * 1024
MAX_PRIORITY = 9
"""Priority classes are 0 (least urgent) to 9."""

MAX_JOBS_PER_CALL = 256
"""Jobs in one submit or advance."""

MAX_CALL_BYTES = 1024 * 1024
"""Arguments of one submit or advance; a single larger job travels alone."""

MAX_BITE = 32
"""Jobs in one pull, reclaim, timers or cancel."""

MAX_LANES_PER_PULL = 16
MAX_SUSPECTS_PER_PULL = 8
MAX_DEAD_PER_PULL = 4

BEAT_EVERY_S = 1.0
LIFE_S = 4.0
WORKER_KEPT_S = 3600.0
"""What an incarnation said about itself is kept this long after its last beat."""

CHANNEL_TTL_S = 600.0
"""A channel is kept this long after its job ended; then readers get the rest from the result."""

EMPTY_CHANNEL_TTL_S = 60.0
"""A channel without tokens is kept this long: many jobs may be cancelled at once, and each channel takes 4 KB."""

RESULT_TTL_S = 86_400.0
IDEMPOTENCY_TTL_S = 86_400.0
"""An idempotency key is kept this long after its job ended."""

DEAD_SET_MAX = 10_000
DEAD_TTL_S = 14 * 86_400.0
"""A failed job is kept whole this long, for a person to look at and requeue."""

BELL_MAXLEN = 64
GARBAGE_MAXLEN = 1000
"""Foreign entries kept for a person to look at."""

GARBAGE_ENTRY_BYTES = 1024

DEFAULT_MAX_WAITING_JOBS = 1_000_000
DEFAULT_MAX_WAITING_TOKENS = 2_000_000_000
DEFAULT_MAX_WAITING_BYTES = 4 * 1024 * 1024 * 1024
DEFAULT_MAX_OUTBOX_ENTRIES = 1_000_000
DEFAULT_BYTES_PER_TOKEN = 4.0
DEFAULT_RESERVE_TOKENS = 256
"""Most output tokens of one choice that are counted in a job's cost."""

DEFAULT_MAX_FAILURES = 3
"""A job that fails with a retryable error this often ends failed; deaths of workers are not counted here."""

FOREIGN_LANE_WAIT_S = 10.0
"""A job whose lane's key is another program's tries again after this long."""

SERVED_KEPT = 1000
"""Tenants whose virtual tokens are kept though they neither wait nor are ahead of others."""

SUSPECT_WAIT_S = 30.0
"""A suspect that has waited this long makes the next worker that pulls drain for it."""

MAX_DEATHS_ALONE = 6
"""A job with which this many workers died while it ran alone is given up, however many others died meanwhile."""

CHARGE_EVERY_TOKENS = 128
"""A choice that has written so many more tokens is looked at: has its tenant been charged for them?"""

DEFAULT_AGE_STEP_S = 60.0
"""Waiting this long lifts a lane by one priority class."""

STEPS_WITHOUT_DEADLINE = 10
"""In the order of deadlines, a job without one is due so many steps of ageing after it came."""
