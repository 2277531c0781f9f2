"""Essential tasks of the gateway: an unexpected error in one ends the process."""

import asyncio
import logging
import os
from collections.abc import Coroutine
from typing import Any

from sluice.protocol.host.thread_errors import EXIT_CODE

LOG = logging.getLogger(__name__)


def essential_task(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:  # Any: what asyncio sends
    """Start a task; an unhandled error is logged, and ends the process with exit code 1."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_check)
    return task


def _check(task: asyncio.Task[None]) -> None:
    if task.cancelled() or (error := task.exception()) is None:
        return
    try:
        LOG.critical("Task failed; ending the process", exc_info=error, extra={"fields": {"task": task.get_name()}})
    finally:
        os._exit(EXIT_CODE)
