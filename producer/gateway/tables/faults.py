"""What can go wrong with the gateway's tables, besides a database that does not answer."""

from sluice.producer.errors import HistoryUnavailable


class TablesMissing(HistoryUnavailable):
    """The database does not exist, or its tables are missing or those of another release: an operator must act."""
