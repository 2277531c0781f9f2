"""Ctrl-C during a change: it is delivered when the change is done."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from sluice.worker.signals import interrupts_held


def interrupt(steps: list[str]) -> None:
    """Note in `steps` how far a block gets that is interrupted."""
    with interrupts_held():
        signal.raise_signal(signal.SIGINT)
        steps.append("interrupted")
    steps.append("left")


class TestGivenABlockThatIsInterrupted:
    def test_when_it_is_done_then_the_interrupt_is_delivered(self) -> None:
        steps: list[str] = []

        with pytest.raises(KeyboardInterrupt):
            interrupt(steps)

        assert steps == ["interrupted"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_when_it_fails_then_the_interrupt_is_delivered_with_its_error(self) -> None:
        def fail() -> None:
            with interrupts_held():
                signal.raise_signal(signal.SIGINT)
                raise ValueError

        with pytest.raises(KeyboardInterrupt) as caught:
            fail()

        assert isinstance(caught.value.__context__, ValueError)

    def test_when_it_is_within_another_then_the_interrupt_waits_for_the_outer_one(self) -> None:
        steps: list[str] = []

        with pytest.raises(KeyboardInterrupt), interrupts_held():
            interrupt(steps)

        assert steps == ["interrupted", "left"]

    @pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL], ids=str)
    def test_when_python_does_not_handle_interrupts_then_nothing_changes(self, handler: signal.Handlers) -> None:
        before = signal.signal(signal.SIGINT, handler)
        try:
            with interrupts_held():
                within = signal.getsignal(signal.SIGINT)
        finally:
            signal.signal(signal.SIGINT, before)

        assert within is handler

    def test_when_it_runs_in_another_thread_then_nothing_changes(self) -> None:
        def handler_within() -> object:
            with interrupts_held():
                return signal.getsignal(signal.SIGINT)

        with ThreadPoolExecutor(1) as threads:
            within = threads.submit(handler_within).result()

        assert within is signal.default_int_handler
