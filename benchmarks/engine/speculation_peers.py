"""Ours beside the lookup decoding of other engines: the same jobs, one sequence at a time, in turns.

A peer generates the given output of each job as ours does: every step is computed in full, and the token that comes
next is forced (`benchmarks/peers/engines/serve_lookup.py` and the peers' programs say how). So that a token tells its
job, each job has ids of its own. A peer's guesses come from the prompt and output of the same sequence, so they are the
same with these ids. Ours also come from earlier outputs: it runs the jobs with these ids, where it finds nothing there,
and as they are.
"""

# torch's and safetensors' types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine.speculation import FIRST_ID, GivenOutputs, Job, Kind, run
from benchmarks.peers.lookup_side import lookup_serving

NUM_CANDIDATES = 4096
"""Ids of which those of the jobs are chosen."""


@dataclass(frozen=True, slots=True)
class Counted:
    """One run over all jobs."""

    seconds: float
    num_steps: int


@dataclass(frozen=True, slots=True)
class Row:
    """An engine and a way to guess."""

    engine: str
    kind: str
    """`off`: without guesses."""


Runs = Mapping[Row, Callable[[], Counted]]


def with_own_ids(jobs: Sequence[Job], ids: Sequence[int]) -> list[Job]:
    """Return the jobs with other ids, of which no two jobs have one in common.

    Raises:
        ValueError: there are too few ids.
    """
    unused = iter(ids)
    renamed: list[Job] = []
    for job in jobs:
        tokens = dict.fromkeys(job.prompt + job.output)
        own = dict(zip(tokens, unused, strict=False))
        if len(own) < len(tokens):
            raise ValueError(f"{len(ids)} ids are too few for {len(jobs)} jobs: ask for fewer jobs")
        renamed.append(Job([own[one] for one in job.prompt], [own[one] for one in job.output]))
    return renamed


def ids_to_force(folder: Path) -> list[int]:
    """Return ids that get the largest logit if the hidden state is their row of the model's last matrix.

    With random weights all do. Of a trained model's, other rows may be longer.
    """
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    matrix = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).float()
    largest = (matrix[:NUM_CANDIDATES] @ matrix.T).argmax(1).tolist()
    return [token_id for token_id, best in enumerate(largest) if token_id == best and token_id >= FIRST_ID]


def ours(runner: GivenOutputs, jobs: Sequence[Job], kind: Kind | None) -> Callable[[], Counted]:
    """Return what runs ours."""

    def counted() -> Counted:
        done = run(runner, jobs, 1, kind)
        return Counted(done.seconds, done.num_steps)

    return counted


def theirs(ask: Callable[[], str]) -> Callable[[], Counted]:
    """Return what runs a peer."""

    def counted() -> Counted:
        seconds, num_steps = ask().split()
        return Counted(float(seconds), int(num_steps))

    return counted


def converted_from(folder: Path) -> Path:
    """Return a copy of a model's folder outside this repository: a peer's files are written next to it."""
    copy = Path(tempfile.gettempdir()) / f"sluice-benchmark-{folder.name}"
    return folder if folder.parent == copy.parent else shutil.copytree(folder, copy, dirs_exist_ok=True)


def open_runs(
    stack: ExitStack, runner: GivenOutputs, folder: Path, jobs: Sequence[Job], guesses: Mapping[str, Sequence[int]]
) -> Runs:
    """Load the peers, each without guesses and with these numbers of them; return what runs each and ours."""
    renamed = with_own_ids(jobs, ids_to_force(folder))
    suffix = Kind("suffix")
    runs = {
        Row("ours", "off"): ours(runner, renamed, None),
        Row("ours", "of the same sequence"): ours(runner, renamed, suffix),
        Row("ours", "and of earlier outputs"): ours(runner, jobs, suffix),
    }
    work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    pairs = [(job.prompt, job.output) for job in renamed]
    for name, numbers in guesses.items():
        for number in (0, *numbers):
            peer = stack.enter_context(lookup_serving(name, converted_from(folder), number, pairs, work))
            runs[Row(name, f"lookup, {number} guesses" if number else "off")] = theirs(peer.ask)
    return runs


def measure_beside(runs: Runs, num_rounds: int) -> list[Mapping[Row, Counted]]:
    """Return the runs of each round; each goes first equally often, and the first round is not counted."""
    rounds: list[Mapping[Row, Counted]] = []
    for number in range(1 + num_rounds):
        order = list(runs) if number % 2 else list(runs)[::-1]
        rounds.append({row: runs[row]() for row in order})
        said = ", ".join(f"{row.engine} {row.kind} {rounds[-1][row].seconds:.1f} s" for row in runs)
        print(f"  round {number}{'' if number else ', not counted'}: {said}", file=sys.stderr, flush=True)
    return rounds[1:]


def lines_beside(num_tokens: int, rounds: Sequence[Mapping[Row, Counted]]) -> list[str]:
    """Return a line for each way to guess; ratios are within a round, of seconds without guesses to those with them."""
    lines = [f"{'':<36} {'off':>8} {'on':>8} {'ratio':>7} {'least':>6} {'most':>6} {'tokens a step':>14}"]
    for row in rounds[0]:
        if row.kind == "off":
            continue
        pairs = [(one[Row(row.engine, "off")], one[row]) for one in rounds]
        off, on = (statistics.median(num_tokens / pair[which].seconds for pair in pairs) for which in (0, 1))
        ratios = [without.seconds / with_.seconds for without, with_ in pairs]
        steps = num_tokens / statistics.median(with_.num_steps for _, with_ in pairs)
        lines.append(
            f"{row.engine + ', ' + row.kind:<36} {off:>8.0f} {on:>8.0f} {statistics.median(ratios):>7.2f} "
            f"{min(ratios):>6.2f} {max(ratios):>6.2f} {steps:>14.2f}"
        )
    return lines


def print_beside(
    name: str,
    runner: GivenOutputs,
    folder: Path,
    jobs: Sequence[Job],
    guesses: Mapping[str, Sequence[int]],
    rounds: int,
) -> None:
    """Print the table of one case."""
    # Ours has read it; peers wait in their own way.
    os.environ.pop("GOMP_SPINCOUNT", None)
    with ExitStack() as stack:
        found = measure_beside(open_runs(stack, runner, folder, jobs, guesses), rounds)
    num_tokens = sum(len(job.output) for job in jobs)
    print(f"\n{name}, one at once, tokens/s", *lines_beside(num_tokens, found), sep="\n", flush=True)
