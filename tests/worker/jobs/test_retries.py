"""Which errors are tried again: the table is whole, its times grow, are bounded and spread, and only failures ask."""

import re
from pathlib import Path

import pytest

from sluice.engine import errors
from sluice.engine.errors import RequestRejected
from sluice.engine.request import FailureKind
from sluice.worker.jobs.retries import PREPARATION_FAILED, RETRIES, RetryDelay, rejection_of, retry_in_ms
from sluice.worker.model.translate import code_of

ROOT = Path(__file__).parents[3]
ERRORS = (ROOT / "docs" / "reference" / "errors.md").read_text()

FINAL = frozenset(
    {
        # The job is wrong in itself.
        "invalid_request",
        "prompt_empty",
        "prompt_too_long",
        "unknown_token",
        "request_too_large",
        "model_mismatch",
        "unknown_adapter",
        "result_too_large",
        "output_not_encoded",
        # A requeue helps once another engine is there.
        "option_refused",
        # The same tokens give the same logits.
        FailureKind.LOGITS,
        # The operator decided so, or must look first.
        "model_changed",
        "channel_damaged",
        "channel_lost",
        # Found by the scripts, and ended there.
        "payload_lost",
        "broken_key",
        "killed_its_worker",
        "cancelled",
        "deadline",
        "ttl",
    }
)
"""Every code that is not retried."""


def codes_of_errors() -> set[str]:
    """Every error code that an engine, a worker or a script can give a job."""
    rejections = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RequestRejected)
    ]
    worker = "\n".join(path.read_text() for path in (ROOT / "worker").rglob("*.py"))
    scripts = "\n".join(path.read_text() for path in (ROOT / "protocol/scripts").glob("*.lua"))
    codes = re.findall(r'JobRejected\(\s*"([a-z_]+)"', worker) + re.findall(r'error_code="([a-z_]+)"', worker)
    return {
        *map(str, FailureKind),
        PREPARATION_FAILED,
        *(code_of(kind("")) for kind in rejections),
        *codes,
        *re.findall(r"error_code = '([a-z_]+)'", scripts),
    }


class TestGivenTheTable:
    def test_when_a_code_can_be_said_then_it_is_either_tried_again_or_final(self) -> None:
        codes = codes_of_errors()

        assert {"engine_error", "invalid_request", "killed_its_worker", "result_too_large"} <= codes
        assert codes - (RETRIES.keys() | FINAL) == set()
        assert RETRIES.keys() & FINAL == set()
        assert (RETRIES.keys() | FINAL) - codes == set(), "no code raises these any more"

    def test_when_the_errors_page_lists_codes_then_it_says_the_same(self) -> None:
        table = ERRORS.split("| code | who must act | retried |")[1].split("\n\n")[0]
        rows = re.findall(r"^\| (`[^|]+) \| [^|]+ \| ([^|]+) \|$", table, re.MULTILINE)
        listed = {code: "yes" in again for codes, again in rows for code in re.findall(r"`([a-z_]+)`", codes)}

        assert listed == {code: code in RETRIES for code in RETRIES.keys() | FINAL}

    def test_when_the_recovery_page_lists_pauses_then_they_are_the_same(self) -> None:
        page = (ROOT / "docs/explanation/recovery.md").read_text()
        rows = re.findall(r"^\| `([a-z_]+)` \| (\d+) s, doubled each time, at most (\d+) s \|", page, re.MULTILINE)

        listed = {code: RetryDelay(first_s=int(first), most_s=int(most)) for code, first, most in rows}

        assert listed == dict(RETRIES)

    @pytest.mark.parametrize("code", [*sorted(FINAL), "an_unknown_code", None])
    def test_when_an_error_is_final_or_unknown_then_it_is_not_tried_again(self, code: str | None) -> None:
        assert retry_in_ms(code, 0, which="j 1") is None


class TestGivenARetryDelay:
    def test_when_failures_follow_each_other_then_it_doubles_up_to_its_bound(self) -> None:
        delay = RetryDelay(first_s=1, most_s=10)

        assert [delay.delay_s(n, share=1) for n in range(6)] == [1, 2, 4, 8, 10, 10]
        assert delay.delay_s(10**9, share=1) == 10
        assert delay.delay_s(0, share=0) == 0.5

    @pytest.mark.parametrize("code", RETRIES)
    def test_when_many_jobs_fail_together_then_retries_are_spread_over_half_the_backoff(self, code: str) -> None:
        delays = [retry_in_ms(code, 1, which=f"0.t.{n} 1") or 0 for n in range(1000)]
        whole_ms = RETRIES[code].first_s * 2 * 1000

        assert min(delays) >= whole_ms / 2
        assert max(delays) <= whole_ms
        quarters = [sum(1 for one in delays if part <= (one / whole_ms - 0.5) * 8 < part + 1) for part in range(4)]
        assert min(quarters) > 150, "no quarter of the time is left out"

    def test_when_the_same_end_is_sent_again_then_it_asks_for_the_same_time(self) -> None:
        assert retry_in_ms("engine_error", 0, which="j 1") == retry_in_ms("engine_error", 0, which="j 1")
        assert retry_in_ms("engine_error", 0, which="j 1") != retry_in_ms("engine_error", 0, which="j 2")


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


class TestGivenWhatADeviceRaises:
    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            (OutOfMemoryError("CUDA out of memory"), FailureKind.MEMORY),
            (MemoryError(), FailureKind.MEMORY),
            (RuntimeError("DefaultCPUAllocator: can't allocate memory"), FailureKind.MEMORY),
            (FileNotFoundError("model.safetensors"), FailureKind.FILE),
            (RuntimeError("bad shape"), FailureKind.STEP),
        ],
    )
    def test_when_it_is_read_then_its_kind_is_known(self, error: Exception, kind: FailureKind) -> None:
        assert FailureKind.of(error) is kind

    def test_when_preparing_a_job_raises_then_its_producer_hears_what(self) -> None:
        assert (rejection_of(KeyError("x")).code, str(rejection_of(KeyError("x")))) == (
            PREPARATION_FAILED,
            "its request could not be made: KeyError: 'x'",
        )
        assert rejection_of(FileNotFoundError("tokenizer.json")).code == "model_file_lost"
