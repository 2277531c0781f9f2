"""What can go wrong with files.

StorageUnavailable    temporary: the files cannot be read or written now
└── ContentMissing    the content of a file is gone
FileInUse             caller: a batch that is not over reads the file
"""

from sluice.producer.errors import ProducerError


class StorageUnavailable(ProducerError):
    """The files cannot be read or written now."""


class ContentMissing(StorageUnavailable):
    """There is no such object."""


class FileInUse(ProducerError):
    """A batch that is not over reads the file."""
