"""The gateway's copy of the keys while their database is away."""

from collections.abc import Generator
from pathlib import Path

import pytest

from sluice.producer.errors import HistoryUnavailable
from sluice.producer.gateway import keyring as module
from sluice.producer.gateway.errors import HttpError
from sluice.producer.gateway.keyring import Keyring
from tests.producer.gateway.gateway_process import delete_all, new_key, revoke

NEW: dict[str, dict[str, int]] = {"revoked": {}, "expiring": {"expires_ms": 1}, "kept": {"expires_ms": 2**52}}


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
