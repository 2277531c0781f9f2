"""Answers of JSON: large ones are made on threads, so that streams and probes go on meanwhile."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from starlette.responses import Response

LARGE_BYTES = 64 * 1024
"""Packed output of which an answer takes about 10 ms."""

THREADS = ThreadPoolExecutor(2, thread_name_prefix="answers")
"""Few, because each that computes delays the event loop by up to 5 ms at a time."""


async def encoded_answer(num_bytes: int, encode: Callable[[], bytes]) -> Response:
    """Return the answer that `encode` makes of this many bytes.

    Raises:
        Exception: from `encode`.
    """
    if num_bytes < LARGE_BYTES:
        content = encode()
    else:
        content = await asyncio.get_running_loop().run_in_executor(THREADS, encode)
    return Response(content, media_type="application/json")
