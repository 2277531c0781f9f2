"""Every option of a database URL is served, or refused with a sentence before anything connects."""

from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from sluice.history.database import BadDatabaseUrl, open_database
from sluice.history.database_urls import POSTGRES_OPTIONS

SECRET = "s3cr3t"
REFUSED_PARAMETERS = {
    *("user", "password", "dbname"),  # parts of the URL itself
    *("sslpassword", "scram_client_key", "scram_server_key", "oauth_client_secret"),  # secrets, and URLs are logged
    *("oauth_issuer", "oauth_client_id", "oauth_scope", "sslkeylogfile"),
    *("client_encoding", "replication", "fallback_application_name"),  # the product relies on them
    *("sslcompression", "gsslib", "gssdelegation", "min_protocol_version", "max_protocol_version"),
}
"""Parameters of the library that are no option of ours."""

VALUES = {
    "text": "x",
    "numbers with commas": "5432",
    "`-csearch_path=SCHEMA`, `endpoint=ID`, `project=ID`": "-c search_path=sluice",
}

SQLITE = {
    "sqlite://": "in memory is lost",
    "sqlite:///": "in memory is lost",
    "sqlite:///:memory:": "in memory is lost",
    "sqlite:///file::memory:": "in memory is lost",
    "sqlite:///file:history.db": "in memory is lost",
    "sqlite:///x.db?timeout=3": "has no options, got timeout",
    "sqlite:///x.db?uri=true&mode=ro": "has no options, got mode, uri",
    "sqlite://host/x.db": "has no host",
}
POSTGRES = {
    "postgresql://h/d?prepare_threshold=0": "'prepare_threshold' is not supported; supported are host,",
    "postgresql://h/d?autocommit=1": "'autocommit' is not supported",
    "postgresql://h/d?plugin=x": "'plugin' is not supported",
    "postgresql://h/d?sslmode=on": "'sslmode' must be disable, allow, .* got 'on'",
    "postgresql://h/d?connect_timeout=0": "'connect_timeout' must be 2 to 60, got '0'",
    "postgresql://h/d?connect_timeout=1e3": "'connect_timeout' must be 2 to 60",
    "postgresql://h/d?target_session_attrs=standby": "'target_session_attrs' must be any, read-write, primary",
    "postgresql://h/d?options=-cdefault_transaction_isolation%3Dserializable": "'options' must be -csearch_path=",
    "postgresql://h/d?options=-csearch_path%3Da%20-cautocommit%3Don": "'options' must be",
    "postgresql://h/d?sslmode=require&sslmode=disable": "'sslmode' is given 2 times",
    "postgresql://h:0/d": "port must be 1 to 65535, got 0",
    "postgresql://h:99999/d": "port must be 1 to 65535, got 99999",
    f"postgresql://u:{SECRET}/d": "write @, / and : in a password as",
    "postgresql://h/d?port=x": "'port' must be",
    "postgresql://a:1,b:2/d": "several hosts as",
    "postgresql://h/d\0": "control character",
    "postgresql://u:a%0Ab@h/d": "control character",
    "postgresql+psycopg2://h/d": r"postgresql\+psycopg2 is not supported",
    "mysql://h/d": "mysql is not supported",
    "history.db": "not a database URL",
    "": "not a database URL",
}


@pytest.mark.parametrize(("url", "why"), [*SQLITE.items(), *POSTGRES.items()])
def test_when_a_url_cannot_be_served_then_a_sentence_says_why(url: str, why: str) -> None:
    with pytest.raises(BadDatabaseUrl, match=f"the database URL cannot be used: .*{why}") as refused:
        open_database(url)

    assert SECRET not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", POSTGRES_OPTIONS)
def test_when_an_option_has_one_of_its_values_then_the_library_takes_it(name: str) -> None:
    option = POSTGRES_OPTIONS[name]
    value = VALUES.get(option.accepts) or option.accepts.replace("`", "").split(",")[-1].split(" to ")[-1].strip()

    url = open_database(f"postgresql://h/d?{name}={value.replace('=', '%3D')}").url

    assert option.takes(value)
    assert not option.takes("")
    assert url.query == {name: value}
    assert conninfo_to_dict(**{name: value}) == {name: value}


def test_every_parameter_of_the_library_is_served_or_refused() -> None:
    known = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}

    assert known - set(POSTGRES_OPTIONS) <= REFUSED_PARAMETERS
    assert not REFUSED_PARAMETERS & set(POSTGRES_OPTIONS)


def test_when_options_are_given_then_ours_yield_or_bound_them() -> None:
    url = "postgresql://h/d?application_name=mine&connect_timeout=30"

    plain, hurried = open_database(url), open_database(url, patience_s=4.5)
    (_, plain_given), (_, hurried_given) = (one.dialect.create_connect_args(one.url) for one in (plain, hurried))

    assert plain_given["application_name"] == hurried_given["application_name"] == "mine"


def test_when_a_file_is_named_then_it_may_have_any_name(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/a b%c:d.db")

    with engine.connect() as connection:
        connection.exec_driver_sql("SELECT 1")
    engine.dispose()

    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".db"] == ["a b%c:d.db"]
