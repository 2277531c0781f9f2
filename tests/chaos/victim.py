"""The process under test, with an optional failpoint at a stage of its work.

    python -m tests.chaos.victim worker '{"redis_url": …}'

It installs a failpoint around one method, then runs the real `main` of the worker, of its recorder, or of the mover of
callbacks. The code under test has no hooks. Round trips go wrong outside, see `fault_proxy.py`.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any

from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModel
from sluice.engine.scheduling.blocks.manager import BlockManager
from sluice.engine.scheduling.scheduler import Scheduler
from sluice.history.writer import HistoryAway, HistoryWriter
from sluice.worker.callbacks.mover import Mover
from sluice.worker.callbacks.settings import CallbackSettings
from sluice.worker.config import load_config
from sluice.worker.connection.clients import Client, connect
from sluice.worker.jobs import progress as advance
from sluice.worker.log import get_log
from sluice.worker.recorder import recorder
from sluice.worker.serve.mailbox import Mailbox
from sluice.worker.serve.preparation import Preparation
from sluice.worker.serve.start import start
from tests.chaos.faults.fault_proxy import CLIENT_TIMEOUT_S, Fault, Moment

STAGES: Mapping[str, tuple[type, str]] = {
    "add": (LLMEngine, "add"),
    "translate": (Preparation, "_prepare"),
    "schedule": (Scheduler, "schedule"),
    "execute": (NullModel, "launch"),
    "commit": (Scheduler, "commit"),
    "publish": (Mailbox, "publish"),
    "release blocks": (BlockManager, "release"),
    "sql transaction": (HistoryWriter, "_write_all"),
}
"""Where a failpoint can be: its name, and the method that it goes around."""

SECRET = "of a mover, as long as it has to be"
STAGE_DEADLINE_S = 0.5
"""A step that takes longer is hung, for the workers under test."""

HUNG_S = 1.5
"""Duration of a late stage: past its deadline and a lifetime, so others take its jobs before it continues."""


class ToldToFail(RuntimeError):
    """The failpoint's error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The arguments of a victim: its role and its failpoint."""

    redis_url: str
    real_redis_url: str
    """Without the proxy."""

    sprung: str
    """A file that is made when the failpoint is reached."""

    database_url: str = ""
    flags: dict[str, Any] = field(default_factory=dict[str, Any])  # Any: as in a configuration
    part_bytes: int = 0
    """Results longer than this are written in parts. 0: as usual."""

    stage: str | None = None
    moment: Moment = Moment.BEFORE
    fault: Fault = Fault.KILL
    nth: int = 1

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "Order":
        """Parse its text form."""
        order = cls(**json.loads(text))
        return replace(order, moment=Moment(order.moment), fault=Fault(order.fault))


def install(order: Order) -> None:
    """Put the failpoint around its method."""
    if order.stage is None:
        return
    owner, name = STAGES[order.stage]
    method: Callable[..., Any] = getattr(owner, name)
    num_calls = 0

    @wraps(method)
    def failing(*args: Any, **kwargs: Any) -> Any:  # Any: whatever the method takes and gives
        nonlocal num_calls
        num_calls += 1
        is_now = num_calls == order.nth
        if is_now and order.moment is Moment.BEFORE:
            _happen(order)
        result = method(*args, **kwargs)
        if is_now and order.moment is Moment.AFTER:
            _happen(order)
        return result

    setattr(owner, name, failing)


def _happen(order: Order) -> None:
    Path(order.sprung).touch()
    match order.fault:
        case Fault.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Fault.CUT:
            client = connect(order.real_redis_url, timeout_s=CLIENT_TIMEOUT_S)
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        case Fault.LATE:
            time.sleep(HUNG_S)
        case Fault.ERROR if order.stage == "sql transaction":
            raise HistoryAway("injected outage")
        case Fault.ERROR:
            raise ToldToFail(order.stage)


# ---------------------------------------------------------------- who it is


def _worker(order: Order) -> int:
    if order.part_bytes:
        # A true result of this size would have hundreds of thousands of tokens.
        advance.PART_BYTES = order.part_bytes
    return start(load_config({}, flags={**order.flags, "redis.url": order.redis_url}), {})


def _recorder(order: Order) -> int:
    recorder.connect = _impatient
    settings = recorder.RecorderSettings(name="victim", block_s=0.05)
    return recorder.main(redis_url=order.redis_url, database_url=order.database_url, settings=settings)


def _mover(order: Order) -> int:
    client = _impatient(order.redis_url)
    settings = CallbackSettings(
        redis_url=order.redis_url, rq_url=order.redis_url, database_url="", name="victim", block_s=0.05, secret=SECRET
    )
    mover = Mover(client, _impatient(order.redis_url), settings)
    signal.signal(signal.SIGTERM, lambda _number, _frame: mover.stop())
    get_log().info("mover started")
    mover.run()
    return 0


def _impatient(url: str, *, timeout_s: float = CLIENT_TIMEOUT_S) -> Client:
    return connect(url, timeout_s=min(timeout_s, CLIENT_TIMEOUT_S))


MAINS: Mapping[str, Callable[[Order], int]] = {"worker": _worker, "recorder": _recorder, "mover": _mover}


if __name__ == "__main__":
    given = Order.read(sys.argv[2])
    install(given)
    sys.exit(MAINS[sys.argv[1]](given))
