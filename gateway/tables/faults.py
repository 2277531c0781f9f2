"""What can go wrong with the gateway's tables, besides a database that does not answer.

TablesMissing   an operator must act: no database, or not the tables of this release
TooManyBytes    caller: the files and responses of the tenant would take more than they may
"""

from sluice.producer.errors import HistoryUnavailable


class TablesMissing(HistoryUnavailable):
    """The database does not exist, or its tables are missing or those of another release: an operator must act."""


class TooManyBytes(Exception):
    """The files and responses of the tenant would take more than they may."""
