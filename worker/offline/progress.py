"""The progress bar of a call, on standard error."""

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from sluice.worker.offline.outputs import RequestOutput

Listener = Callable[[RequestOutput], None]


@contextmanager
def progress_bar(total: int | None, *, is_shown: bool | None) -> Generator[Listener]:
    """Show prompts done and output tokens a second; yield what to call for each prompt that has ended.

    Args:
        total: Number of prompts, if known.
        is_shown: None shows it if standard error is a terminal.
    """
    if not (sys.stderr.isatty() if is_shown is None else is_shown):
        yield lambda _output: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    tokens = TextColumn("{task.fields[num_tokens]} tokens, {task.fields[rate]:.0f}/s")
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), tokens, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, num_tokens=0, rate=0.0)
        began_s, num_tokens = time.monotonic(), 0

        def ended(output: RequestOutput) -> None:
            nonlocal num_tokens
            num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
            rate = num_tokens / max(time.monotonic() - began_s, 1e-9)
            bar.update(task, advance=1, num_tokens=num_tokens, rate=rate)

        yield ended
