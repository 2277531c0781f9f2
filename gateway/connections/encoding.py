"""Encoding of JSON responses: large ones are encoded on threads, so that they do not block the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from starlette.responses import Response

LARGE_BYTES = 64 * 1024
"""Size of packed output that takes about 10 ms to encode."""

THREADS = ThreadPoolExecutor(2, thread_name_prefix="answers")
"""Few threads, because each running one delays the event loop by up to 5 ms at a time."""


async def encoded_answer(num_bytes: int, encode: Callable[[], bytes]) -> Response:
    """Return the response with the body of `encode`, on a thread if `num_bytes` of packed output are large.

    Raises:
        Exception: any error of `encode`.
    """
    if num_bytes < LARGE_BYTES:
        content = encode()
    else:
        content = await asyncio.get_running_loop().run_in_executor(THREADS, encode)
    return Response(content, media_type="application/json")
