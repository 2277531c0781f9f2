"""Errors of the gateway's tables and files, besides a database that does not answer.

StorageUnavailable    temporary: the files cannot be read or written now
└── ContentMissing    the content of a file is gone
FileOfOpenBatch       caller: an open batch reads the file
TooManyBytes          caller: the files and responses of the tenant would take more than they may
TablesMissing         an operator must act: no database, or not the tables of this release
"""

from sluice.producer.errors import HistoryUnavailable, ProducerError


class StorageUnavailable(ProducerError):
    """The files cannot be read or written now."""


class ContentMissing(StorageUnavailable):
    """The object does not exist."""


class FileOfOpenBatch(ProducerError):
    """An open batch reads the file."""


class TooManyBytes(Exception):
    """The files and responses of the tenant would take more than they may."""


class TablesMissing(HistoryUnavailable):
    """The database does not exist, or its tables are missing or those of another release: an operator must act."""
