"""The suite on an engine whose steps are computed in another process."""

from collections.abc import Generator

import pytest

from sluice.engine.conformance.behaviours import CHECKS, checks_for
from sluice.engine.conformance.resumption import Resume, resume_matrix
from sluice.engine.conformance.subject import Driver, Subject
from sluice.engine.null_model import NullTokenizer
from tests.engine.conformance.subjects import CONFIG, NOT_COMPUTED
from tests.worker.engine_process.test_remote_engine import remote_engine


@pytest.fixture(scope="module")
def remote() -> Generator[Driver]:
    """The null model in a process of its own."""
    limits = {"max_num_seqs": CONFIG.max_num_seqs, "max_num_batched_tokens": CONFIG.max_num_batched_tokens}
    flags = {f"batching.{name}": value for name, value in limits.items()}
    with remote_engine("null?max_model_len=256&num_blocks=256&block_size=4&step_s=0.001", **flags) as engine:
        yield Driver(
            Subject(
                engine=engine,
                vocab_size=NullTokenizer.vocab_size,
                eos_token_ids=NullTokenizer.eos_token_ids,
                refused_options=NOT_COMPUTED,
            )
        )


class TestGivenAnEngineInAnotherProcess:
    @pytest.mark.parametrize("name", [name for name in checks_for(NOT_COMPUTED) if name != "failing_request"])
    def test_when_it_is_checked_then_it_behaves(self, remote: Driver, name: str) -> None:
        CHECKS[name].run(remote)

        remote.settle()

    def test_when_requests_are_resumed_then_the_output_is_bitwise_the_same(self, remote: Driver) -> None:
        matrix = resume_matrix(remote)

        assert {cell for cells in matrix.values() for cell in cells} == {Resume.BITWISE, Resume.REFUSED}
