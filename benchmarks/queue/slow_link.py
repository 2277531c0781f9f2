"""A link with latency: every byte arrives a fixed delay after it was sent, in order, in both directions.

    python -m benchmarks.queue.slow_link LISTEN TARGET DELAY_S

A separate process between unix sockets. It adds latency; it does not lose data or limit the rate.
"""

import asyncio
import sys
from pathlib import Path

CHUNK_BYTES = 1 << 18


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Forward data, each piece `delay_s` after it arrived."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due_s, piece = await pieces.get()
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            if not piece:
                writer.close()
                return
            writer.write(piece)

    delivering = asyncio.create_task(deliver())
    while piece := await reader.read(CHUNK_BYTES):
        pieces.put_nowait((loop.time() + delay_s, piece))
    pieces.put_nowait((loop.time() + delay_s, b""))
    await delivering


async def serve(listen: Path, target: Path, delay_s: float) -> None:
    """Proxy a server until the process is ended."""

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_unix_connection(target)
        async with asyncio.TaskGroup() as both:
            both.create_task(carry(reader, there_writer, delay_s))
            both.create_task(carry(there_reader, writer, delay_s))

    server = await asyncio.start_unix_server(join, listen)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])))
