"""Check the database of the job history."""

from collections.abc import Iterator

from sluice.worker.checks.result import CheckResult, warning
from sluice.worker.checks.site import Site
from sluice.worker.endpoints import database_url_of
from sluice.worker.errors import ConfigError


def check_history(site: Site) -> Iterator[CheckResult]:
    """Check that the recorder can use the database. An unreachable one is not an error.

    Raises:
        ConfigError: it does not exist, refuses this user, cannot be written, or has another schema.
    """
    if not site.config.history.recorder:
        yield CheckResult(what="history", found="this worker runs no recorder")
        return
    # Imported here because SQLAlchemy is slow to import, and a worker without recorder does not need it.
    from sluice.history.database import HistoryError, HistoryUnreachable, check_writable, is_pooled, open_database

    try:
        engine = open_database(database_url_of(site.config, site.environ), is_writer=True)
        schema = check_writable(engine)
        pooler = ", through a connection pooler" if schema is not None and is_pooled(engine) else ""
        engine.dispose()
    except HistoryUnreachable as error:
        advice = "Jobs run without it. The outbox in Redis keeps their events until it answers."
        yield warning("history", f"does not answer: {error}", advice)
    except HistoryError as error:
        raise ConfigError([f"SLUICE_DATABASE_URL: {error}"]) from error
    else:
        shown = engine.url.render_as_string(hide_password=True)
        found = f"{shown}, schema {schema}{pooler}" if schema else f"{shown} will be created at the first start"
        yield CheckResult(what="history", found=found)
