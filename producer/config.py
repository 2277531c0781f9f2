"""Settings of the client: arguments, then the environment, then the embedded server.

Only this module reads the environment, from a mapping passed to it. No I/O.

    SLUICE_REDIS_URL      redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// URL of the queue's server
    SLUICE_DATABASE_URL   SQLAlchemy URL of the job history
    SLUICE_STATE_DIR      folder of the embedded server and of journals; default $XDG_STATE_HOME/sluice
"""

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from sluice.protocol.errors import InvalidSetting
from sluice.protocol.host.state_folder import history_path
from sluice.protocol.redis.urls import HOW, SCHEMES, cannot_read, redacted

REDIS_URL = "SLUICE_REDIS_URL"
DATABASE_URL = "SLUICE_DATABASE_URL"


def redis_url(argument: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the checked URL of the server; None means the embedded server.

    Raises:
        InvalidSetting: the URL has an unknown scheme, or cannot be read.
    """
    url, name = (argument, "the URL") if argument else (environ.get(REDIS_URL), REDIS_URL)
    if not url:
        return None
    try:
        scheme = urlsplit(url).scheme
    except ValueError as error:
        raise cannot_read(url, error) from None
    if scheme not in SCHEMES:
        raise InvalidSetting(f"{name} is not a Redis URL: {redacted(url)!r}. {HOW}")
    return url


def database_url(argument: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Return the SQLAlchemy URL of the job history: the argument, the environment, or SQLite in the state folder."""
    return argument or environ.get(DATABASE_URL) or f"sqlite:///{history_path(environ)}"
