"""What a job is sampled with: its request, then its model's generation config, then neutral values."""

import json
import shutil
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from sluice.engine.errors import ModelFolderError
from sluice.protocol.errors import InvalidJob
from sluice.protocol.keys import QueueKeys
from sluice.protocol.limits import MAX_TOKENS
from sluice.protocol.wire import JobOptions, JobSpec, ResolvedOptions, encode_resolved
from sluice.worker.config import load_config
from sluice.worker.errors import ConfigError, JobRejected
from sluice.worker.jobs.held_job import HeldJob
from sluice.worker.jobs.leases import Leases
from sluice.worker.model.folders import SMALL_MODEL
from sluice.worker.model.load import prepare
from sluice.worker.model.sampling_defaults import NOTHING_STATED, describe, read_defaults, resolve
from sluice.worker.model.translate import Translator, read_spec
from tests.worker.model.test_translate import leased

QWEN = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
ENDS = frozenset({7, 2})


def resolved(stated: JobOptions, **config: object) -> ResolvedOptions:
    return resolve(stated, read_defaults(config), ENDS)


class TestGivenAModelWithDefaults:
    def test_when_a_request_states_nothing_then_they_are_used(self) -> None:
        found = resolved(NOTHING_STATED, **QWEN, min_p=0.1, max_new_tokens=2048)

        assert found == ResolvedOptions(
            max_tokens=2048, temperature=0.7, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.05,
            end_token_ids=(2, 7),
        )  # fmt: skip

    def test_when_a_request_states_neutral_values_then_those_are_used(self) -> None:
        stated = JobOptions(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_tokens=256)

        found = resolved(stated, **QWEN, min_p=0.1, max_new_tokens=2048)

        assert found == resolved(NOTHING_STATED)

    @pytest.mark.parametrize("stated", [100, 5000])
    def test_when_a_request_states_a_length_then_it_gets_that(self, stated: int) -> None:
        assert resolved(JobOptions(max_tokens=stated), max_new_tokens=2048).max_tokens == stated

    def test_when_min_tokens_alone_are_stated_then_max_tokens_are_no_fewer(self) -> None:
        stated = JobOptions(min_tokens=300)

        assert resolved(stated, max_new_tokens=2048).max_tokens == 2048
        assert resolved(stated).max_tokens == stated.planned_tokens == 300
        with pytest.raises(InvalidJob, match="min_tokens must be in \\[0, max_tokens = 256\\]"):
            JobOptions(min_tokens=300, max_tokens=256)

    @pytest.mark.parametrize(
        ("field", "value", "expected"),
        [
            ("top_k", -1, 0), ("top_k", 50.0, 50), ("top_k", -1.0, 0),
            ("max_new_tokens", 512.0, 512), ("max_new_tokens", 10**9, MAX_TOKENS),
        ],
    )  # fmt: skip
    def test_when_a_value_is_written_as_other_programs_do_then_it_is_taken(
        self, field: str, value: float, expected: int
    ) -> None:
        defaults = read_defaults({field: value})

        found = defaults.top_k if field == "top_k" else defaults.max_tokens
        assert (found, type(found)) == (expected, int)

    @pytest.mark.parametrize(("field", "value"), [("top_k", -2), ("top_k", 1.5), ("top_k", inf), ("max_new_tokens", 0)])
    def test_when_a_value_means_nothing_then_it_is_refused(self, field: str, value: float) -> None:
        with pytest.raises(ModelFolderError, match="generation-config none"):
            read_defaults({field: value})

    def test_when_a_config_names_no_end_by_minus_one_then_that_is_no_end(self) -> None:
        assert resolve(NOTHING_STATED, NOTHING_STATED, frozenset({-1, 7})).end_token_ids == (7,)

    def test_when_it_samples_by_do_sample_false_then_that_is_no_default(self) -> None:
        assert resolved(NOTHING_STATED, do_sample=False).temperature == 1.0

    def test_when_they_are_described_then_options_and_values_are_named(self) -> None:
        assert describe(read_defaults(QWEN)) == "temperature 0.7, top_p 0.8, top_k 20, repetition_penalty 1.05"

    def test_when_no_length_is_stated_then_it_is_what_fits_and_at_least_one(self) -> None:
        defaults = read_defaults({"max_new_tokens": 2048})

        found = [resolve(NOTHING_STATED, defaults, ENDS, room=room).max_tokens for room in (4000, 90, 0)]

        assert found == [2048, 90, 1]
        assert resolve(JobOptions(max_tokens=91), defaults, ENDS, room=90).max_tokens == 91


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The shipped model with Qwen's defaults."""
    folder = tmp_path / "model"
    shutil.copytree(SMALL_MODEL, folder)
    state(folder, **QWEN)
    return folder


def state(folder: Path, **values: object) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


class TestGivenAFolderWithDefaults:
    def test_when_it_is_loaded_then_they_are_the_folders_or_none(self, folder: Path) -> None:
        as_stated, ignored = (
            prepare(load_config({"SLUICE_MODEL": str(folder), "SLUICE_GENERATION_CONFIG": how})).load()
            for how in ("auto", "none")
        )

        assert as_stated.text.defaults == JobOptions(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
        assert ignored.text.defaults == NOTHING_STATED
        assert as_stated.executor.fingerprint == ignored.executor.fingerprint, "a job brings what it was begun with"

    def test_when_its_length_exceeds_the_cache_then_a_job_gets_what_fits(self, folder: Path) -> None:
        state(folder, max_new_tokens=4096)
        environ = {"SLUICE_MODEL": str(folder), "SLUICE_NUM_BLOCKS": "8", "SLUICE_BLOCK_SIZE": "16"}
        loaded = prepare(load_config(environ)).load()

        request = loaded.translator.translate(held(published=0))[0]

        assert request.sampling.max_tokens == 8 * 16 - len(request.prompt_token_ids)
        with pytest.raises(JobRejected, match="lower max_tokens"):
            loaded.translator.translate(held(published=0, options=JobOptions(max_tokens=200)))[0]

    @pytest.mark.parametrize("value", [1.5, "high"])
    def test_when_one_is_impossible_then_the_error_names_it_and_the_way_out(self, folder: Path, value: object) -> None:
        state(folder, top_p=value)

        with pytest.raises(ConfigError, match=r"top_p must be .*--generation-config none"):
            prepare(load_config({"SLUICE_MODEL": str(folder)}))


def translator() -> Translator:
    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        del add_special_tokens
        return [ord(letter) for letter in text]

    return Translator(
        encode=encode,
        template=None,
        validate=lambda _: None,
        model="m",
        defaults=read_defaults(QWEN),
        end_token_ids=ENDS,
    )


def held(*, published: int, resolved: bytes | None = None, options: JobOptions = NOTHING_STATED) -> HeldJob:
    job = leased("a", spec=JobSpec(options=options), published=(published,))._replace(attempt=2, resolved=resolved)
    return Leases().new_job(job, QueueKeys("q"), read_spec(job.spec))


class TestGivenAJobThatAnEarlierAttemptBegan:
    def test_when_it_had_resolved_its_options_then_they_hold_here_too(self) -> None:
        before = resolve(NOTHING_STATED, JobOptions(temperature=0.2, max_tokens=9), frozenset({5}))

        sampling = translator().translate(held(published=3, resolved=encode_resolved(before)))[0].sampling

        assert (sampling.temperature, sampling.max_tokens, sampling.repetition_penalty) == (0.2, 9, 1.0)
        assert sampling.end_token_ids == {5}

    def test_when_it_published_nothing_then_this_worker_resolves_them(self) -> None:
        before = encode_resolved(resolve(NOTHING_STATED, JobOptions(temperature=0.2), frozenset({5})))

        for resolved in (None, before):
            sampling = translator().translate(held(published=0, resolved=resolved))[0].sampling

            assert (sampling.temperature, sampling.end_token_ids) == (0.7, ENDS)

    @pytest.mark.parametrize(("published", "most"), [(3, 90), (95, 96)])
    def test_when_this_worker_has_less_room_then_a_length_that_nobody_stated_is_that(
        self, published: int, most: int
    ) -> None:
        before = encode_resolved(resolve(NOTHING_STATED, JobOptions(max_tokens=5000), frozenset()))
        job = held(published=published, resolved=before)
        num_prompt_tokens = len(translator().translate(job)[0].prompt_token_ids)
        here = replace(translator(), max_job_tokens=num_prompt_tokens + 90)

        assert here.translate(job)[0].sampling.max_tokens == most
        stated = held(published=published, resolved=before, options=JobOptions(max_tokens=5000))
        assert here.translate(stated)[0].sampling.max_tokens == 5000

    def test_when_what_it_resolved_is_damaged_then_the_job_is_rejected(self) -> None:
        with pytest.raises(JobRejected, match="resolved options"):
            translator().translate(held(published=3, resolved=b"\x91\x05"))[0]

    def test_when_a_length_is_stated_then_that_counts_and_not_the_models(self) -> None:
        here = replace(translator(), defaults=JobOptions(max_tokens=9))

        sampling = here.translate(held(published=0, options=JobOptions(min_tokens=10, max_tokens=20)))[0].sampling

        assert (sampling.min_tokens, sampling.max_tokens) == (10, 20)

    @pytest.mark.parametrize("stated", [None, 20])
    def test_when_min_tokens_exceed_the_models_bound_then_they_are_that(self, stated: int | None) -> None:
        before = resolve(NOTHING_STATED, JobOptions(max_tokens=9), frozenset())
        options = JobOptions(min_tokens=10, max_tokens=stated)

        sampling = (
            translator().translate(held(published=3, resolved=encode_resolved(before), options=options))[0].sampling
        )

        assert (sampling.min_tokens, sampling.max_tokens) == (9, 9)
