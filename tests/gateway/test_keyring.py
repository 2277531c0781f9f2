"""The gateway's copy of the keys, also while their database is away or damaged."""

import logging
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from sluice.gateway import keyring as module
from sluice.gateway.api_keys.key import split_key
from sluice.gateway.errors import HttpError
from sluice.gateway.keyring import Keyring
from sluice.history.tables import api_keys
from sluice.producer.errors import HistoryUnavailable
from tests.gateway.gateway_process import delete_all, new_key, revoke, write

NEW: dict[str, dict[str, int]] = {"revoked": {}, "expiring": {"expires_ms": 1}, "kept": {"expires_ms": 2**42}}


class TestGivenADatabaseThatGoesAway:
    @pytest.fixture
    def key(self, sqlite_url: str) -> str:
        """The key that was there."""
        return new_key(sqlite_url, "acme")

    @pytest.fixture
    def keyring(self, key: str, sqlite_url: str) -> Keyring:
        """Keys that were read before it went."""
        assert key
        made = Keyring(sqlite_url)
        made.read()
        path = Path(sqlite_url.removeprefix("sqlite:///"))
        path.rename(path.with_suffix(".away"))
        return made

    def test_when_it_is_read_again_then_the_known_keys_stay(self, keyring: Keyring, key: str) -> None:
        with pytest.raises(HistoryUnavailable):
            keyring.read()

        found = keyring.key_of(key)
        assert found is not None
        assert found.tenant == "acme"
        assert keyring.key_of("none") is None
        assert keyring.key_of(f"{key[:-1]}\u00e4\ud800") is None

    def test_when_it_is_away_for_long_then_every_key_is_answered_with_503(
        self, keyring: Keyring, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "MAX_AGE_S", 0.0)

        for text in (key, "none"):
            with pytest.raises(HttpError) as raised:
                keyring.key_of(text)
            assert (raised.value.status, raised.value.code) == (503, "keys_unavailable")


class TestGivenEitherDatabase:
    @pytest.fixture
    def keyring(self, history_url: str) -> Generator[Keyring]:
        """Its keys; the thread records their use at the end, and disconnects."""
        made = Keyring(history_url)
        yield made
        made.start()
        made.close()

    def test_when_a_key_is_revoked_or_expires_then_the_next_read_refuses_it(
        self, keyring: Keyring, history_url: str
    ) -> None:
        revoked, expiring, kept = (new_key(history_url, f"ring-{name}", **fields) for name, fields in NEW.items())
        keyring.read()
        assert keyring.key_of(revoked) is not None

        revoke(history_url, revoked)
        keyring.read()

        assert [keyring.key_of(text) is not None for text in (revoked, expiring, kept)] == [False, False, True]


class TestGivenNoDatabase:
    def test_when_it_is_read_then_there_are_no_keys_and_no_file(self, tmp_path: Path) -> None:
        keyring = Keyring(f"sqlite:///{tmp_path}/none.db")

        keyring.read()

        assert not keyring.is_required
        assert list(tmp_path.iterdir()) == []

    def test_when_keys_are_required_then_they_are_without_any(self, tmp_path: Path) -> None:
        keyring = Keyring(f"sqlite:///{tmp_path}/none.db", is_required=True)

        keyring.read()

        assert keyring.is_required
        assert keyring.key_of("none") is None


class TestGivenAKeyThatWasFound:
    def test_when_the_table_is_emptied_then_keys_are_still_required(self, sqlite_url: str) -> None:
        key = new_key(sqlite_url, "acme")
        keyring = Keyring(sqlite_url)
        keyring.read()

        delete_all(sqlite_url)
        keyring.read()

        assert keyring.is_required
        assert keyring.key_of(key) is None


class TestGivenARowThatIsNoKey:
    @pytest.fixture
    def bad(self, sqlite_url: str) -> str:
        """A key with a scope of a newer version."""
        key = new_key(sqlite_url, "acme")
        write(sqlite_url, api_keys.update().values(scopes="submit,future"))
        return key

    def test_when_keys_are_read_then_the_others_are_accepted_and_it_is_logged_once(
        self, bad: str, sqlite_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        good, keyring = new_key(sqlite_url, "acme"), Keyring(sqlite_url)

        keyring.read()
        keyring.read()

        assert keyring.key_of(good) is not None
        assert keyring.key_of(bad) is None
        [line] = caplog.messages
        assert split_key(bad)[0] in line
        assert "unknown scope 'future'" in line

    def test_when_it_is_the_only_one_then_keys_are_required(self, bad: str, sqlite_url: str) -> None:
        keyring = Keyring(sqlite_url)

        keyring.read()

        assert keyring.is_required
        assert keyring.key_of(bad) is None


class TestGivenAThreadWhoseDatabaseGoesAway:
    def test_when_it_comes_back_then_both_are_logged_once(
        self, sqlite_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(module, "READ_EVERY_S", 0.01)
        caplog.set_level(logging.INFO)
        new_key(sqlite_url, "acme")
        keyring, path = Keyring(sqlite_url), Path(sqlite_url.removeprefix("sqlite:///"))
        keyring.read()
        keyring.start()

        path.rename(path.with_suffix(".away"))
        wait_for(lambda: len(caplog.messages) == 1)
        path.with_suffix(".away").rename(path)
        wait_for(lambda: len(caplog.messages) == 2)
        keyring.close()

        failed, again = caplog.messages
        assert failed.startswith("The API keys cannot be read: there is no database at")
        assert again == "The API keys can be read again."


def wait_for(is_so: Callable[[], bool]) -> None:
    """Wait for a condition."""
    deadline_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
