"""Speculation compared with none: tokens per second of the bare engine on this CPU, by the kind of text.

    python -m benchmarks speculation [--models llama-100m,small] [--cases edit,template,free] [--at 1,16] [--rounds 5]
        [--jobs 8] [--draft-model 0.8,0] [--dtype float32] [--peers openvino,llama.cpp] [--guesses 2,5,10]

Weights in fp32 unless `--dtype bfloat16`, no prefix cache. What a random model generates is no text, so outputs are
given: every step is computed in full, and what it sampled is replaced by the next token of a text. The texts are this
repository's documents, a token a word, so guesses are right as often as for a model that would write them:

- edit: the prompt has a passage, the output is that passage with one word in 25 replaced, dropped or added;
- template: records of fixed words with one field in about four words, each of another job;
- free: the prompt is a passage, the output is what follows it.

With `--draft-model`, the 100 M model also runs with a draft model of 11 M where earlier text gives no guess. Its steps
are computed in full, too, and its guesses are right with the given probability, as those of a model that was trained
for it.

Runs alternate; the medians of tokens per second are printed, the median of the ratios within a round with its minimum
and maximum, the same ratio of processor time (which other programs on the machine change less), drafts accepted of
those verified, and the ratio of steps. Each run has a new engine, so it remembers no output of an earlier one. First,
what the index takes: microseconds and bytes per token.

With `--peers`, other tables are printed: ours with one sequence beside the lookup decoding of other engines, on the
same jobs (`speculation_peers`). Peers have weights in bf16. Each is installed in its own environment at first use.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from sluice.engine.execution.threads import limit_spinning

if TYPE_CHECKING:
    from sluice.engine.execution.slots import Slot
    from sluice.engine.llm_engine import LLMEngine

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 96
"""Of an output on average: from half of it to half more."""

NUM_JOBS = {1: 8, 16: 48}
MAX_NUM_BATCHED_TOKENS = 1024
DRAFT_MODELS = {"llama-100m": "llama-11m"}
"""By model: the draft model with the same vocabulary."""

FIRST_ID = 3
"""Ids before it are special tokens of both models."""

Text = list[int]


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt, and the output that is given to it."""

    prompt: Text
    output: Text


def words_of_documents() -> Iterator[list[str]]:
    """Return the words of each document."""
    for path in sorted((ROOT / "docs").rglob("*.md")):
        yield re.findall(r"\w+|[^\w\s]", path.read_text())


class Texts:
    """Passages of the documents as token ids, and the jobs made of them. Always the same."""

    def __init__(self, vocab_size: int) -> None:
        ids: dict[str, int] = {}
        fresh = count()
        self._random = Random(0)
        self._known = range(FIRST_ID, vocab_size)
        self._documents = [
            [FIRST_ID + ids.setdefault(word, next(fresh)) % len(self._known) for word in words]
            for words in words_of_documents()
            if len(words) > 4 * NUM_TOKENS
        ]

    def passage(self, num_tokens: int) -> Text:
        """Return a passage of a random document."""
        document = self._random.choice(self._documents)
        start = self._random.randrange(len(document) - num_tokens)
        return document[start : start + num_tokens]

    def _num_tokens(self) -> int:
        return self._random.randint(NUM_TOKENS // 2, NUM_TOKENS * 3 // 2)

    def edit(self) -> Job:
        """A passage, to be copied with changes."""
        num_tokens = self._num_tokens()
        passage = self.passage(num_tokens + 32)
        edited: Text = []
        for token_id in passage:
            change = self._random.random() * 75
            if change < 1:
                continue
            edited += [self._random.choice(self._known)] if change < 2 else [token_id]
            edited += [self._random.choice(self._known)] if change > 74 else []
        return Job(self.passage(16) + passage, edited[:num_tokens])

    def template(self) -> Callable[[], Job]:
        """A batch of jobs from one template."""
        fixed = [self.passage(self._random.randint(3, 9)) for _ in range(NUM_TOKENS)]

        def job() -> Job:
            output: Text = []
            for words in fixed:
                output += words + self._random.choices(self._known, k=self._random.randint(1, 3))
            return Job(self.passage(64), output[: self._num_tokens()])

        return job

    def free(self) -> Job:
        """A passage, to be continued."""
        passage = self.passage(NUM_TOKENS + self._num_tokens())
        return Job(passage[:NUM_TOKENS], passage[NUM_TOKENS:])

    def jobs(self, case: str, num_jobs: int) -> list[Job]:
        """Return the jobs of a case."""
        make = {"edit": self.edit, "template": self.template(), "free": self.free}[case]
        return [make() for _ in range(num_jobs)]


@dataclass(frozen=True, slots=True)
class Run:
    """One run over all jobs."""

    seconds: float
    processor_s: float
    num_steps: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to speculate."""

    name: str
    draft_model: "GivenGuesses | None" = None
    share: float = 0.0
    """Probability with which a guess of the draft model is right."""


def make_engine(runner: "GivenOutputs", at: int, kind: Kind | None) -> "LLMEngine":
    """Make a new engine; without a kind it does not speculate."""
    from benchmarks.engine.bare import Words
    from sluice.engine.config import EngineConfig, StepLimits
    from sluice.engine.llm_engine import LLMEngine
    from sluice.engine.speculation.model_drafts import ModelDrafts
    from sluice.engine.speculation.source import Fallback
    from sluice.engine.speculation.suffix_drafts import SuffixDrafts

    config = EngineConfig(
        max_num_seqs=at,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        enable_prefix_caching=False,
        speculation="suffix" if kind is not None else "off",
    )
    vocab_size, source = runner.executor.limits.vocab_size, None
    if kind is not None and kind.draft_model is not None:
        limits = StepLimits(at, MAX_NUM_BATCHED_TOKENS).of_draft_model
        model_drafts = ModelDrafts(kind.draft_model.executor, limits, vocab_size=vocab_size)
        model_drafts.rows._generations = kind.draft_model.ids
        source = Fallback(SuffixDrafts(), model_drafts)
    engine = LLMEngine(runner.executor, Words(vocab_size), config, draft_source=source)
    # An executor knows sequences by their ids, which one engine never uses twice.
    engine._sequence_ids = runner.ids
    return engine


def run(runner: "GivenOutputs", jobs: Sequence[Job], at: int, kind: Kind | None) -> Run:
    """Generate all jobs with a new engine, and check that their outputs are the given ones."""
    from sluice.engine.request import Request, SamplingParams

    engine = make_engine(runner, at, kind)
    if kind is not None and kind.draft_model is not None:
        kind.draft_model.expect(jobs, kind.share)
    runner.outputs = [job.output for job in jobs]
    engine.add(
        Request(
            id=str(number),
            prompt_token_ids=tuple(job.prompt),
            sampling=SamplingParams(temperature=0, seed=number, max_tokens=len(job.output), ignore_eos=True),
        )
        for number, job in enumerate(jobs)
    )
    found: dict[str, Text] = {str(number): [] for number in range(len(jobs))}
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    while not engine.is_idle:
        for delta in engine.advance():
            found[delta.request_id] += delta.token_ids
    taken_s, processor_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    assert list(found.values()) == runner.outputs, "the outputs are not the given ones"
    stats = engine.stats
    return Run(taken_s, processor_s, stats.num_steps, stats.num_drafted_tokens, stats.num_accepted_tokens)


class GivenOutputs:
    """A model runner whose samples are replaced by given tokens: those of `outputs[seed]` of each request."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        from sluice.engine.execution.options import ModelOptions
        from sluice.engine.execution.sampling.sampler import Drawn, PreparedRows, Sampler
        from sluice.engine.execution.start.model_loading import load_model_runner

        options = ModelOptions(path=folder, dtype=dtype, num_blocks=1024, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS)
        self.executor = load_model_runner(options)
        self.outputs: list[Text] = []
        self.ids = count()
        sampler: Sampler = self.executor._sampler
        sample = sampler.sample

        def given(logits: object, prepared: PreparedRows, **options: object) -> Drawn:
            drawn = sample(logits, prepared, **options)
            rows = zip(prepared.slots, prepared.positions, strict=True)
            token_ids = [self._token(slot, position) for slot, position in rows]
            [on_host] = drawn.pending_copy.wait()
            on_host[:] = on_host.new_tensor(token_ids)
            return drawn

        sampler.sample = given

    def _token(self, slot: "Slot", position: int) -> int:
        output = self.outputs[slot.sampling.seed]
        return output[position] if position < len(output) else 0


class GivenGuesses(GivenOutputs):
    """A draft model whose samples are replaced by the next tokens of the jobs' outputs, or wrong ones."""

    def __init__(self, folder: Path, dtype: str) -> None:
        super().__init__(folder, dtype)
        self._guesses: dict[tuple[int, ...], Text] = {}
        """By prompt."""

    def expect(self, jobs: Sequence[Job], share: float) -> None:
        """Guess the tokens of these outputs right with a probability of `share`."""
        random = Random(0)
        self._guesses = {
            tuple(job.prompt): [one if random.random() < share else one - 1 for one in job.output] for job in jobs
        }

    def _token(self, slot: "Slot", position: int) -> int:
        guesses = self._guesses[tuple(slot.token_ids[: slot.num_prompt_tokens])]
        return guesses[position] if position < len(guesses) else 0


def measure(
    runner: GivenOutputs, jobs: Sequence[Job], at: int, num_rounds: int, kinds: Sequence[Kind]
) -> list[list[Run]]:
    """Return the runs of each round: without speculation, then of each kind; the first round is not counted."""
    rounds: list[list[Run]] = []
    for number in range(1 + num_rounds):
        # Each goes first equally often.
        every: list[Kind | None] = [None, *kinds]
        order = every if number % 2 else every[::-1]
        found = {kind: run(runner, jobs, at, kind) for kind in order}
        rounds.append([found[kind] for kind in every])
    return rounds[1:]


def line_of(name: str, jobs: Sequence[Job], rounds: Sequence[tuple[Run, Run]]) -> str:
    """Return the line of a case and a kind: runs without and with it."""
    num_tokens = sum(len(job.output) for job in jobs)
    off, on = (statistics.median(num_tokens / one[kind].seconds for one in rounds) for kind in (0, 1))
    ratios = [without.seconds / with_.seconds for without, with_ in rounds]
    processor = statistics.median(without.processor_s / with_.processor_s for without, with_ in rounds)
    drafted, accepted = (sum(getattr(one[1], part) for one in rounds) for part in ("num_drafted", "num_accepted"))
    steps = statistics.median(without.num_steps / with_.num_steps for without, with_ in rounds)
    share = f"{accepted / drafted:.0%} of {drafted // len(rounds)}" if drafted else "none"
    return (
        f"{name:<40} {off:>8.0f} {on:>8.0f} {statistics.median(ratios):>7.2f} "
        f"{min(ratios):>6.2f} {max(ratios):>6.2f} {processor:>9.2f}  {share:<14} {steps:>6.2f}"
    )


def index_lines() -> list[str]:
    """Measure the index: microseconds of processor time and bytes per token."""
    from sluice.engine.speculation.suffix_index import SuffixIndex

    text = [token_id for document in Texts(32_000)._documents for token_id in document][:60_000]
    lines: list[str] = []
    for name, chunk in (("token by token", 1), ("in pieces of 1,000", 1000)):
        took_us: list[float] = []
        for _ in range(5):
            index = SuffixIndex(max_size=2**15)
            began_s = time.thread_time()
            for start in range(0, len(text), chunk):
                index.extend(text[start : start + chunk])
            took_us.append((time.thread_time() - began_s) * 1e6 / len(text))
        lines.append(f"index, {name}: {min(took_us):.2f} us a token, {index.num_bytes / 2**15:.0f} bytes a token kept")
    reader, searches = SuffixIndex(max_size=2**15), list[tuple[Text, int]]()
    for end in range(1000, 21_000):
        reader.extend(text[end - 1 : end])
        searches.append((text[end - 40 : end], reader.key))
    began_s = time.thread_time()
    for recent, key in searches:
        index.find(recent, key)
    lines.append(f"search: {(time.thread_time() - began_s) * 1e6 / len(searches):.2f} us")
    return lines


def folders(names: Sequence[str]) -> Mapping[str, Path]:
    """Return the folders of models."""
    from benchmarks.engine.models import model_folder

    return {name: ROOT / "worker" / "small_model" if name == "small" else model_folder(name) for name in names}


def main() -> None:
    """Print the table."""
    given = arguments()
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        # As in the worker: it must come before torch.
        limit_spinning()
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks", "speculation", *sys.argv[1:]])
    print(f"{os.cpu_count()} cores, {given.dtype}, load {os.getloadavg()[0]:.1f} before the start\n")
    if given.peers:
        print_peers(given)
    else:
        print_kinds(given)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama-100m,small", help="of llama-100m, qwen2-500m, small")
    parser.add_argument("--cases", default="edit,template,free", help="of edit, template, free (default all)")
    parser.add_argument("--at", default="1,16", help="sequences at once (default 1,16)")
    parser.add_argument("--jobs", type=int, help="jobs of a case (default 8 with one sequence, 48 with 16)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default 5)")
    parser.add_argument("--dtype", default="float32", help="of our weights: float32, bfloat16 (default float32)")
    parser.add_argument("--peers", default="", help="of openvino, llama.cpp (default none)")
    parser.add_argument("--guesses", default="2,5,10", help="tokens that a peer guesses in a step (default 2,5,10)")
    parser.add_argument(
        "--draft-model",
        default="0.8,0",
        metavar="SHARES",
        help="also with a draft model whose guesses are right so often, none if empty (default 0.8,0)",
    )
    return parser.parse_args()


def print_kinds(given: argparse.Namespace) -> None:
    """Print what the index takes, and a line for each model, case, number of sequences and kind."""
    print("\n".join(index_lines()), end="\n\n")
    ratios = f"{'ratio':>7} {'least':>6} {'most':>6} {'processor':>9}"
    print(f"{'':<40} {'off':>8} {'on':>8} {ratios}  {'accepted':<14} {'steps':>6}")
    for model, folder in folders(given.models.split(",")).items():
        runner = GivenOutputs(folder, given.dtype)
        texts = Texts(runner.executor.limits.vocab_size)
        kinds = [Kind("suffix"), *kinds_with_draft_model(model, given.draft_model, given.dtype)]
        for case in given.cases.split(","):
            for at in map(int, given.at.split(",")):
                jobs = texts.jobs(case, given.jobs or NUM_JOBS.get(at, 2 * at))
                rounds = measure(runner, jobs, at, given.rounds, kinds)
                for number, kind in enumerate(kinds, 1):
                    name = f"{model}, {case}, {at} at once, {kind.name}"
                    print(line_of(name, jobs, [(runs[0], runs[number]) for runs in rounds]), flush=True)


def print_peers(given: argparse.Namespace) -> None:
    """Print a table for each model and case: ours with one sequence beside the peers."""
    from benchmarks.engine.speculation_peers import print_beside

    guesses = {name: list(map(int, given.guesses.split(","))) for name in given.peers.split(",")}
    for model, folder in folders(given.models.split(",")).items():
        runner = GivenOutputs(folder, given.dtype)
        texts = Texts(runner.executor.limits.vocab_size)
        for case in given.cases.split(","):
            jobs = texts.jobs(case, given.jobs or NUM_JOBS[1])
            print_beside(f"{model}, {case}", runner, folder, jobs, guesses, given.rounds)


def kinds_with_draft_model(model: str, shares: str, dtype: str) -> list[Kind]:
    """Return a kind for each share of right guesses, if the model has a draft model."""
    if not shares or model not in DRAFT_MODELS:
        return []
    [folder] = folders([DRAFT_MODELS[model]]).values()
    draft_model = GivenGuesses(folder, dtype)
    return [Kind(f"model {float(share):.0%}", draft_model, float(share)) for share in shares.split(",")]


if __name__ == "__main__":
    main()
