"""Two interfaces joined by a thread that holds each frame for a while, as `tc netem` does in kernels that have it."""

import heapq
import random
import select
import socket
import threading
import time
from itertools import count

_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_ETH_P_ALL = 3
_FRAME_BYTES = 65_600
_IDLE_S = 0.05


class DelayLine:
    """A thread that forwards frames both ways, between interfaces of the namespace in which it was made. Mutable."""

    def __init__(self, one: str, other: str, delay_s: float, reordered_share: float) -> None:
        self._delay_s = delay_s
        self._reordered_share = reordered_share
        self._dice = random.Random(0)
        self._ends = (_socket(one), _socket(other))
        self._held: list[tuple[float, int, socket.socket, bytes]] = []
        self._numbers = count()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._forward, name=f"delay line of {one}", daemon=True)
        self._thread.start()

    def _forward(self) -> None:
        others = {self._ends[0]: self._ends[1], self._ends[1]: self._ends[0]}
        while not self._is_over.is_set():
            wait_s = _IDLE_S if not self._held else min(_IDLE_S, max(0.0, self._held[0][0] - time.monotonic()))
            for ready in select.select(self._ends, (), (), wait_s)[0]:
                self._hold(ready, others[ready])
            self._send_due()

    def _hold(self, source: socket.socket, target: socket.socket) -> None:
        is_early = self._dice.random() < self._reordered_share
        due_s = time.monotonic() + (0.0 if is_early else self._delay_s)
        heapq.heappush(self._held, (due_s, next(self._numbers), target, source.recv(_FRAME_BYTES)))

    def _send_due(self) -> None:
        while self._held and self._held[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(self._held)
            target.send(frame)

    def close(self) -> None:
        """Stop; frames that are held are lost."""
        self._is_over.set()
        self._thread.join()
        for end in self._ends:
            end.close()


def _socket(interface: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    # With its header, a frame keeps what the kernel still owes it: a checksum, or a division into segments.
    made.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    made.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    made.bind((interface, _ETH_P_ALL))
    return made
