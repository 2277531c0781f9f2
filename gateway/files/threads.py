"""Threads for calls of the storage."""

from sluice.gateway.files.faults import StorageUnavailable
from sluice.gateway.tables.threads import Threads

FILES = Threads("the files", StorageUnavailable, num_threads=8, max_waiting=200, limit_s=30.0)
"""For what requests read and write. A call sends or reads up to 8 MiB."""

IDENTITY = Threads("the files", StorageUnavailable, num_threads=1, max_waiting=20, limit_s=2.0)
"""For the storage's identity, which `/readyz` reads: it waits for no request."""
