"""The API keys that a gateway accepts: a copy of the table, refreshed twice a second on a thread of its own.

Requests read only the copy, so a slow database or many requests with wrong keys do not delay them.
"""

import logging
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from time import monotonic

from sluice.gateway.api_keys.key import ApiKey, is_secret_of, split_key
from sluice.gateway.api_keys.store import KeyStore, NoKeyTable
from sluice.gateway.errors import SERVER, HttpError
from sluice.gateway.threads import SQL_LIMIT_S
from sluice.producer.errors import ProducerError
from sluice.protocol.clock import wall_ms

READ_EVERY_S = 0.5
"""Time between refreshes. A revoked key is refused after at most this time and that of one query."""

MAX_AGE_S = 60.0
"""How long keys are accepted while the database is unreachable."""

NOTE_EVERY_S = 5.0
"""Time between updates of when keys were last used."""

CLOSE_S = 1.0
NO_DIGEST = "0" * 64
LOG = logging.getLogger(__name__)


class Keyring:
    """The keys of one database. Changes at each refresh; requests record the keys that they use.

    Args:
        url: `sqlite:///FILE` or `postgresql://…`.
        is_required: Whether requests need a key even while no key exists.
    """

    def __init__(self, url: str, *, is_required: bool = False) -> None:
        self._store = KeyStore(url, patience_s=SQL_LIMIT_S)
        self._is_required = is_required
        self._keys: Mapping[str, ApiKey] = {}
        self._read_s = float("-inf")
        self._used_ms: dict[str, int] = {}
        self._using = threading.Lock()
        self._failing: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keyring", daemon=True)

    @property
    def is_required(self) -> bool:
        """Whether requests need a key. Once a key was found, they do until the process ends."""
        return self._is_required

    @property
    def has_active_keys(self) -> bool:
        """Whether any key is neither revoked nor expired."""
        return any(key.is_active(wall_ms()) for key in self._keys.values())

    def read(self) -> None:
        """Refresh the copy.

        Raises:
            HistoryUnavailable: the database cannot be used.
        """
        began_s = monotonic()
        try:
            keys = self._store.keys()
        except NoKeyTable:
            if self._keys:
                raise
            keys = []
        # Set before the keys: a request in between must not pass without a key.
        self._is_required = self._is_required or bool(keys) or self._store.has_unreadable
        self._keys, self._read_s = {key.id: key for key in keys}, began_s

    def check(self) -> None:
        """Check that the copy is recent enough.

        Raises:
            HttpError: 503, the database has been unreachable for too long.
        """
        if monotonic() - self._read_s > MAX_AGE_S:
            raise HttpError(
                503, SERVER, "the API keys cannot be read", "keys_unavailable", headers={"retry-after": "1"}
            )

    def key_of(self, text: str) -> ApiKey | None:
        """Return the active key with this text, and record its use; None if it does not exist or is not active.

        Raises:
            HttpError: as `check`.
        """
        self.check()
        key_id, secret = split_key(text)
        key = self._keys.get(key_id)
        # Computed for an unknown id, too, so that the response takes as long.
        is_right = is_secret_of(secret, NO_DIGEST if key is None else key.digest)
        now_ms = wall_ms()
        if key is None or not is_right or not key.is_active(now_ms):
            return None
        with self._using:
            self._used_ms[key.id] = now_ms
        return key

    def active_key(self, key_id: str) -> ApiKey | None:
        """Return the active key with this id, for a session that began with it; None if it is not active.

        Raises:
            HttpError: as `check`.
        """
        self.check()
        key, now_ms = self._keys.get(key_id), wall_ms()
        if key is None or not key.is_active(now_ms):
            return None
        with self._using:
            self._used_ms[key.id] = now_ms
        return key

    def active_keys_of(self, tenant: str) -> list[ApiKey]:
        """Return the active keys of a tenant."""
        now_ms = wall_ms()
        return [key for key in self._keys.values() if key.tenant == tenant and key.is_active(now_ms)]

    # ------------------------------------------------------------ the thread

    def start(self) -> None:
        """Start to refresh the copy."""
        self._thread.start()

    def close(self) -> None:
        """Record the last uses, and stop."""
        self._stopping.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        noted_s = monotonic()
        with self._store:
            while not self._stopping.wait(READ_EVERY_S):
                with self._logged("The API keys", "be read"):
                    self.read()
                if monotonic() - noted_s > NOTE_EVERY_S:
                    noted_s = monotonic()
                    self._note_use()
            self._note_use()

    @contextmanager
    def _logged(self, subject: str, task: str) -> Generator[None]:
        """Log when a task starts to fail, and when it works again."""
        try:
            yield
        except ProducerError as error:
            if subject not in self._failing:
                LOG.warning("%s cannot %s: %s", subject, task, error)
                self._failing.add(subject)
        else:
            if subject in self._failing:
                LOG.warning("%s can %s again.", subject, task)
                self._failing.remove(subject)

    def _note_use(self) -> None:
        with self._using:
            used_ms, self._used_ms = self._used_ms, {}
        if not used_ms:
            return
        with self._logged("The last uses of API keys", "be recorded"):
            self._store.note_use(used_ms)
