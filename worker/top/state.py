"""The state of `worker top`, and how keys change it. No I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from sluice.protocol.workers import WorkerRow

Order = Callable[[WorkerRow], object]
ORDERS: Mapping[str, Order] = {
    "host": lambda row: (row.host, row.name, row.id),
    "tokens/s": lambda row: (-row.tokens_per_s, row.id),
    "running": lambda row: (-row.running, row.id),
    "waiting": lambda row: (-row.waiting, row.id),
    "KV": lambda row: (-row.kv_share, row.id),
}


class Action(Enum):
    """An action that a key requests of the selected worker. The value is its name for people."""

    QUIET = "quiet"
    RESUME = "resume"
    DRAIN = "drain"


_ACTIONS = {"z": Action.QUIET, "c": Action.RESUME, "d": Action.DRAIN}
CONFIRMED = "y"


@dataclass(slots=True, eq=False)
class TopState:
    """The order, the filter and the selection. Changes with each key."""

    order: str = "host"
    pattern: str = ""
    is_typing: bool = False
    """Whether keys go to the filter."""

    selected: str | None = None
    """Id of a worker."""

    asked: Action | None = None
    """An action that waits for a confirmation."""

    message: str = ""
    is_over: bool = False

    def visible(self, rows: Sequence[WorkerRow]) -> list[WorkerRow]:
        """Return the rows that match, in order, and keep the selection among them."""
        shown = [row for row in rows if self.pattern.lower() in _text_of(row)]
        shown.sort(key=ORDERS[self.order])  # pyright: ignore[reportCallIssue,reportArgumentType]  # keys of one order compare
        if self.selected not in {row.id for row in shown}:
            self.selected = shown[0].id if shown else None
            self.asked = None
        return shown

    def press(self, key: str, rows: Sequence[WorkerRow]) -> Action | None:
        """Take a key. Return an action to carry out on the selected worker; `rows` are the visible ones."""
        if self.is_typing:
            self._type(key)
            return None
        if self.asked is not None:
            return self._confirm(key)
        self.message = ""
        match key:
            case "q":
                self.is_over = True
            case "s":
                names = list(ORDERS)
                self.order = names[(names.index(self.order) + 1) % len(names)]
            case "/":
                self.is_typing, self.pattern = True, ""
            case "up" | "k" | "down" | "j":
                self._move(rows, -1 if key in ("up", "k") else 1)
            case _ if key in _ACTIONS and self.selected is not None:
                self.asked = _ACTIONS[key]
            case _:
                pass
        return None

    def _type(self, key: str) -> None:
        if key in ("enter", "escape"):
            self.is_typing = False
            self.pattern = "" if key == "escape" else self.pattern
        elif key == "backspace":
            self.pattern = self.pattern[:-1]
        elif len(key) == 1 and key.isprintable():
            self.pattern += key

    def _confirm(self, key: str) -> Action | None:
        asked, self.asked = self.asked, None
        return asked if key == CONFIRMED else None

    def _move(self, rows: Sequence[WorkerRow], step: int) -> None:
        ids = [row.id for row in rows]
        if self.selected in ids:
            place = ids.index(self.selected) + step
            self.selected = ids[min(max(place, 0), len(ids) - 1)]


def _text_of(row: WorkerRow) -> str:
    return " ".join((row.id, row.host, row.name, row.model, row.device, row.state)).lower()
