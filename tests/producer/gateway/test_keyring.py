"""The gateway's copy of the keys while their database is away."""

from pathlib import Path

import pytest

from sluice.producer.errors import HistoryUnavailable
from sluice.producer.gateway import keyring as module
from sluice.producer.gateway.errors import HttpError
from sluice.producer.gateway.keyring import Keyring
from tests.producer.gateway.gateway_process import new_key


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


class TestGivenNoDatabase:
    def test_when_it_is_read_then_there_are_no_keys_and_no_file(self, tmp_path: Path) -> None:
        keyring = Keyring(f"sqlite:///{tmp_path}/none.db")

        keyring.read()

        assert not keyring.has_keys
        assert list(tmp_path.iterdir()) == []
