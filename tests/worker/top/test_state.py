"""Keys of `worker top`: order, filter, selection, and actions that are confirmed."""

from collections.abc import Sequence

import pytest

from sluice.protocol.workers import WorkerRow
from sluice.worker.top.state import ORDERS, Action, TopState


def row(name: str, **fields: object) -> WorkerRow:
    """A worker of this name."""
    usual: dict[str, object] = {
        "id": name, "queue": "default", "host": "gpu-1", "name": name, "model": "tiny", "version": "1", "device": "cpu",
        "pid": 7, "state": "pulling", "places": 64, "running": 0, "waiting": 0, "kv_share": 0.0,
        "tokens_per_s": 0.0, "started_ms": None, "samples": (),
    }  # fmt: skip
    return WorkerRow(**usual | fields)  # pyright: ignore[reportArgumentType]  # fields by name


ROWS = (row("a", running=3, tokens_per_s=5.0), row("b", running=9, kv_share=0.5), row("c", waiting=4, host="cpu-1"))


def press(state: TopState, *keys: str) -> list[Action]:
    """Press keys one after another; return the actions that they asked for."""
    actions = [state.press(key, state.visible(ROWS)) for key in keys]
    return [action for action in actions if action is not None]


def ids(rows: Sequence[WorkerRow]) -> str:
    return "".join(one.id for one in rows)


class TestGivenAnOrder:
    @pytest.mark.parametrize(
        ("presses", "expected"), [(0, "cab"), (1, "abc"), (2, "bac"), (3, "cab"), (4, "bac"), (5, "cab")]
    )
    def test_when_s_is_pressed_then_the_next_one_holds(self, presses: int, expected: str) -> None:
        state = TopState()

        press(state, *"s" * presses)

        assert ids(state.visible(ROWS)) == expected
        assert state.order == list(ORDERS)[presses % len(ORDERS)]


class TestGivenAFilter:
    def test_when_it_is_typed_then_matching_workers_are_shown(self) -> None:
        state = TopState()

        press(state, "/", *"GPUx", "backspace")

        assert ids(state.visible(ROWS)) == "ab"
        assert state.is_typing

    def test_when_it_is_entered_then_keys_are_commands_again(self) -> None:
        state = TopState()

        press(state, "/", *"gpu", "enter", "q")

        assert (state.pattern, state.is_over) == ("gpu", True)

    def test_when_it_is_left_then_all_are_shown(self) -> None:
        state = TopState()

        press(state, "/", *"gpu", "escape")

        assert len(state.visible(ROWS)) == 3


class TestGivenASelection:
    def test_when_it_is_moved_then_it_stays_within_the_rows(self) -> None:
        state = TopState()
        state.visible(ROWS)

        for key, expected in (("up", "c"), ("down", "a"), ("j", "b"), ("down", "b"), ("k", "a")):
            press(state, key)
            assert state.selected == expected

    def test_when_its_worker_leaves_then_another_is_selected_and_nothing_asked(self) -> None:
        state = TopState()
        press(state, "down", "down", "d")
        assert state.asked is Action.DRAIN

        state.visible(ROWS[:1])

        assert (state.selected, state.asked) == ("a", None)


class TestGivenAnAction:
    @pytest.mark.parametrize(("key", "action"), [("z", Action.QUIET), ("c", Action.RESUME), ("d", Action.DRAIN)])
    def test_when_it_is_confirmed_then_it_is_carried_out_once(self, key: str, action: Action) -> None:
        state = TopState()

        assert press(state, key, "y", "y") == [action]

    @pytest.mark.parametrize("answer", ["n", "escape", "q", ""])
    def test_when_it_is_not_confirmed_then_nothing_happens(self, answer: str) -> None:
        state = TopState()

        assert press(state, "d", answer) == []
        assert not state.is_over

    def test_when_there_is_no_worker_then_nothing_is_asked(self) -> None:
        state = TopState()

        assert state.press("d", []) is None
        assert state.asked is None
