"""Schemas that others wrote: `python -m benchmarks schemas`.

How many compile, how long the first mask takes, and whether each output that ends is valid by `jsonschema`. Beside it,
how many xgrammar, vLLM's default decoder, compiles, and with `--llama.cpp` how many llama.cpp does (its server is built
the first time: minutes). Packages are downloaded into a cache outside the tree.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import median, quantiles
from threading import Thread

import jsonschema
import referencing

from benchmarks.peers.engine_side import PEERS, build_server, server_of
from benchmarks.peers.environments import python_of
from benchmarks.schemas import llama_cpp_peer, peer
from benchmarks.schemas.collection import Schema, cache_folder, collected
from sluice.engine.config import EngineConfig
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.request import FinishReason, Grammar, Request, Sampling
from sluice.engine.sampling import MAX_GRAMMAR_CHARS
from sluice.engine.text.grammars import Compiler
from sluice.engine.text.matcher import CompiledGrammar
from sluice.engine.text.tokenizer import load_tokenizer
from sluice.worker.model.folders import SMALL_MODEL
from tools.real_model.folder import real_model_gguf

PEER = ("xgrammar==0.2.9", "apache-tvm-ffi")
PATIENCE_S = 10.0
"""For one schema; a decoder that takes longer does not compile it."""

START_S = 90.0
"""For a program to start, and its first schema."""


@dataclass(slots=True, eq=False)
class _Table:
    """What is found of one collection. Extended while it runs."""

    num_schemas: int = 0
    first_mask_s: list[float] = field(default_factory=list[float])
    refusals: Counter[str] = field(default_factory=Counter[str])
    num_ended: int = 0
    num_unjudged: int = 0
    invalid: list[str] = field(default_factory=list[str])
    num_cut: int = 0
    num_stuck: int = 0


def main() -> None:
    """Print a table for each collection."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=400, metavar="TOKENS", help="of an output (default: 400)")
    parser.add_argument("--llama.cpp", action="store_true", dest="llama_cpp", help="ask llama.cpp's server, too")
    options = parser.parse_args()
    schemas, tables = collected(), dict[str, _Table]()
    for schema in schemas:
        tables.setdefault(schema.source, _Table()).num_schemas += 1
    compiled = _compile(schemas, tables)
    _generate(compiled, tables, options.max_tokens)
    for source, table in tables.items():
        _print(source, table)
    texts = [schema.text for schema in schemas]
    programs = [_xgrammar(), *([_llama_cpp()] if options.llama_cpp else [])]
    for program in programs:
        by_peer = Counter[str]()
        for schema, reason in zip(schemas, _reasons_of(program, texts), strict=True):
            by_peer[schema.source] += not reason
        for source, table in tables.items():
            print(f"{program.name} compiles {by_peer[source]} of {table.num_schemas} of {source}")


def _compile(schemas: list[Schema], tables: dict[str, _Table]) -> list[Schema]:
    """Compile them one after another; return those that compile."""
    runner_vocab = json.loads((SMALL_MODEL / "config.json").read_text())["vocab_size"]
    compiler = Compiler(load_tokenizer(SMALL_MODEL), runner_vocab)
    _seconds(compiler, "{}")  # the tokenizer's table
    compiled: list[Schema] = []
    for schema in schemas:
        table = tables[schema.source]
        if len(schema.text) > MAX_GRAMMAR_CHARS:
            table.refusals["longer than a grammar may be"] += 1
            continue
        taken_s, reason = _seconds(compiler, schema.text)
        if reason is None:
            table.first_mask_s.append(taken_s)
            compiled.append(schema)
        else:
            table.refusals[_kind(reason)] += 1
    return compiled


def _seconds(compiler: Compiler, text: str) -> tuple[float, str | None]:
    """Return how long a schema takes until its first mask, and why it cannot be compiled."""
    grammar = Grammar(kind="json_schema", text=text)
    began_s = time.perf_counter()
    compiler.add(Request(id="schema", prompt_token_ids=(1,), grammar=grammar), grammar)
    while not (ready := compiler.take_ready()):
        time.sleep(0.0001)
    [(_, result)] = ready
    if isinstance(result, CompiledGrammar):
        result.matcher_of_choice().mask(())
        return time.perf_counter() - began_s, None
    return time.perf_counter() - began_s, result.reason


def _kind(reason: str) -> str:
    """Return a reason without what is special to one schema."""
    reason = reason.removeprefix("the grammar cannot be compiled: ")
    return re.sub(r'"[^"]*"|\d+|\[[^]]*\]', "…", reason)[:80]


def _generate(schemas: list[Schema], tables: dict[str, _Table], max_tokens: int) -> None:
    """Generate with each, and judge the outputs that ended."""
    limits = {"max_num_seqs": 32, "max_num_batched_tokens": 1024}
    options = ModelOptions(path=SMALL_MODEL, num_blocks=1600, max_model_len=max_tokens + 64, **limits)
    engine = LLMEngine(load_model_runner(options), load_tokenizer(SMALL_MODEL), EngineConfig(**limits))
    by_id = {str(number): schema for number, schema in enumerate(schemas)}
    engine.add(
        Request(
            id=name,
            prompt_token_ids=(300, 301, 302),
            sampling=Sampling(temperature=1.0, seed=int(name), max_tokens=max_tokens),
            grammar=Grammar(kind="json_schema", text=schema.text),
        )
        for name, schema in by_id.items()
    )
    texts = dict.fromkeys(by_id, "")
    while not engine.is_idle:
        for delta in engine.advance():
            texts[delta.request_id] += delta.text
            if delta.finish is not None:
                schema = by_id[delta.request_id]
                _judge(tables[schema.source], schema, texts[delta.request_id], delta.finish.reason)


def _judge(table: _Table, schema: Schema, text: str, reason: FinishReason) -> None:
    if reason is not FinishReason.STOP:
        table.num_cut += reason is FinishReason.LENGTH
        table.num_stuck += reason is FinishReason.ERROR
        return
    table.num_ended += 1
    parsed = json.loads(schema.text)
    judge = jsonschema.validators.validator_for(parsed)(parsed, registry=referencing.Registry())
    try:
        judge.validate(json.loads(text))
    except (jsonschema.ValidationError, ValueError) as error:
        table.invalid.append(f"{schema.name}: {text[:100]!r} {str(error).splitlines()[0]}")
    except Exception:  # noqa: BLE001 - a reference that leaves the schema, or a schema that is none
        table.num_unjudged += 1


@dataclass(frozen=True, slots=True)
class _Program:
    """Another decoder."""

    name: str
    file: str
    environ: Mapping[str, str]


def _xgrammar() -> _Program:
    site = cache_folder() / "xgrammar"
    if not site.exists():
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--no-deps", "--target", site, *PEER], check=True)
    return _Program("xgrammar", peer.__file__, {"PYTHONPATH": str(site)})


def _llama_cpp() -> _Program:
    python = python_of(PEERS["llama.cpp"].recipe)
    if not server_of(python).is_file():
        build_server(python)
    environ = {"LLAMA_SERVER": str(server_of(python)), "GGUF": str(real_model_gguf())}
    return _Program("llama.cpp", llama_cpp_peer.__file__, environ)


def _reasons_of(program: _Program, texts: list[str]) -> list[str]:
    """Return for each schema why another decoder does not compile it; nothing if it does."""
    reasons: list[str] = []
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(texts, file)
        file.flush()
        while len(reasons) < len(texts):
            reasons += _part_of(program, Path(file.name), len(reasons))
            if len(reasons) < len(texts):
                reasons.append("it hangs, or crashes")
    return reasons


def _part_of(program: _Program, texts: Path, first: int) -> list[str]:
    """Compile from the schema numbered `first` on, until one hangs or crashes."""
    environ = {**os.environ, **program.environ}
    command = [sys.executable, program.file, str(texts), str(first)]
    child = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    lines: SimpleQueue[str | None] = SimpleQueue()

    def read() -> None:
        for line in child.stdout or ():
            lines.put(line)
        lines.put(None)

    Thread(target=read, daemon=True).start()
    reasons: list[str] = []
    try:
        # The first one waits for the start of the program, too.
        while (line := lines.get(timeout=PATIENCE_S if reasons else START_S)) is not None:
            reasons.append(json.loads(line))
    except Empty:
        pass
    # With its children: llama.cpp's server is one.
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    return reasons


def _print(source: str, table: _Table) -> None:
    times, num_judged = sorted(table.first_mask_s), table.num_ended - table.num_unjudged
    print(f"{source}: {table.num_schemas} schemas")
    print(f"  compiled: {len(times)} ({len(times) / table.num_schemas:.0%})")
    print(
        f"  first mask: median {1e3 * median(times):.1f} ms, 95 %: {1e3 * quantiles(times, n=20)[-1]:.0f} ms, ", end=""
    )
    print(f"longest {1e3 * times[-1]:.0f} ms")
    print(f"  outputs that ended: {table.num_ended}; cut off: {table.num_cut}; left without a token: {table.num_stuck}")
    print(f"  valid: {num_judged - len(table.invalid)} of {num_judged} that jsonschema can judge")
    for line in table.invalid:
        print(f"    invalid: {line}")
    for reason, count in table.refusals.most_common(12):
        print(f"  {count:4} refused: {reason}")


if __name__ == "__main__":
    main()
