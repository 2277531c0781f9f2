"""`producer keys`: what it prints, what the database keeps, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from sluice.gateway.api_keys.key import is_secret_of, new_secret, split_key
from sluice.gateway.api_keys.store import KeyStore, NoKeyTable
from sluice.history.database import open_database
from sluice.history.tables import api_keys
from sluice.producer.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(history_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `producer keys` on a database; returns its exit code, output and messages."""
    monkeypatch.setenv("SLUICE_DATABASE_URL", history_url)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["keys", *arguments])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def listed(run: Run, tenant: str) -> list[dict[str, Any]]:
    """The keys of a tenant, as JSON."""
    return json.loads(run("list", "--tenant", tenant, "--json")[1])


def rows_in(url: str) -> str:
    """The whole table of keys, as text."""
    engine = open_database(url)
    with engine.connect() as connection:
        found = repr(connection.execute(sa.select(api_keys)).all())
    engine.dispose()
    return found


class TestGivenADatabase:
    def test_when_a_key_is_created_if_there_is_none_then_only_the_first_time(
        self, run: Run, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SLUICE_DATABASE_URL", sqlite_url)

        first, second = (run("create", "--tenant", "acme", "--if-none") for _ in range(2))

        assert split_key(first[1].strip())[0] == listed(run, "acme")[0]["id"]
        assert (second[0], second[1]) == (0, "")
        assert "none was created" in second[2]
        assert len(listed(run, "acme")) == 1


class TestGivenANewKey:
    def test_when_it_is_created_then_its_secret_is_shown_once_and_kept_hashed(self, run: Run, history_url: str) -> None:
        code, out, err = run("create", "--tenant", "acme-new", "--rpm", "600", "--tpm", "200000", "--expires", "90d")

        key_id, secret = split_key(out.strip())
        assert code == 0
        assert len(secret) >= 43
        assert secret not in err
        assert secret not in rows_in(history_url)
        assert secret not in run("list")[1]
        [key] = listed(run, "acme-new")
        assert (key["id"], key["rpm"], key["tpm"], key["state"]) == (key_id, 600, 200_000, "active")
        assert key["scopes"] == "submit,read"
        with KeyStore(history_url) as store:
            [kept] = store.keys(tenant="acme-new")
        assert is_secret_of(secret, kept.digest)
        assert kept.expires_ms is not None
        assert kept.expires_ms - kept.created_ms == 90 * 86_400_000

    def test_when_it_is_revoked_then_the_list_says_so_and_the_first_time_stays(self, run: Run) -> None:
        key = json.loads(run("create", "--tenant", "acme-revoked", "--json")[1])

        assert run("revoke", key["id"])[:2] == (0, f"{key['id']}\trevoked\n")

        [once] = listed(run, "acme-revoked")
        assert once["state"] == "revoked"
        assert run("revoke", key["id"])[0] == 0
        assert listed(run, "acme-revoked") == [once]

    def test_when_its_use_is_recorded_then_only_a_later_time_counts(self, run: Run, history_url: str) -> None:
        key = json.loads(run("create", "--tenant", "acme-used", "--json")[1])

        with KeyStore(history_url) as store:
            store.note_use({key["id"]: 2000})
            store.note_use({key["id"]: 1000})
            [kept] = store.keys(tenant="acme-used")

        assert kept.last_used_ms == 2000


class TestGivenAWrongCommand:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--tenant", "Acme"), "tenant must be"),
            (("--tenant", "acme", "--scopes", "submit,root"), "unknown scope 'root'"),
            (("--tenant", "acme", "--rpm", "0"), "rpm must be in"),
            (("--tenant", "acme", "--expires", "soon"), "expected a time such as 90d"),
            (("--tenant", "acme", "--expires", "90"), "expected a time with its unit, such as 90d"),
            (("--tenant", "acme", "--scopes", " ,"), "--scopes names no scope"),
        ],
    )
    def test_when_a_key_is_created_then_it_is_misuse(self, run: Run, arguments: tuple[str, ...], message: str) -> None:
        code, out, err = run("create", *arguments)

        assert (code, out) == (2, "")
        assert message in err

    def test_when_a_whole_key_is_revoked_by_mistake_then_it_is_not_printed(self, run: Run) -> None:
        text, _, _ = new_secret()

        code, out, err = run("revoke", text)

        assert (code, out) == (1, "")
        assert text not in err

    def test_when_there_is_no_database_then_the_error_says_who_creates_it(self, tmp_path: Path) -> None:
        with KeyStore(f"sqlite:///{tmp_path}/none.db") as store, pytest.raises(NoKeyTable, match="worker migrate"):
            store.keys()

        assert list(tmp_path.iterdir()) == []
