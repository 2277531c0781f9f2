"""Names of keys, and the table of states."""

import re
from pathlib import Path

import pytest

from sluice.protocol import scripts
from sluice.protocol.keys import QueueKeys
from sluice.protocol.rows import LETTERS, read_state
from sluice.protocol.states import RECORDED, TRANSITIONS, JobState
from sluice.protocol.wire import JobId, WireError


class TestGivenAQueue:
    def test_when_keys_are_named_then_all_share_one_hash_tag(self) -> None:
        keys = QueueKeys("chat", 3)
        job_id = JobId("3.acme.x1")

        named = [*keys.fixed(), keys.lane(2, "acme"), keys.job(job_id), keys.payload(job_id), keys.channel(job_id, 1)]

        assert {key.split("}")[0] for key in named} == {"{chat:3"}
        assert keys.fixed() == ("{chat:3}:2:config",)
        assert named[-4:] == [
            "{chat:3}:2:lane:2:acme",
            "{chat:3}:2:job:acme:x1",
            "{chat:3}:2:payload:acme:x1",
            "{chat:3}:2:channel:acme:x1:1",
        ]

    def test_when_an_id_is_none_then_it_names_no_key(self) -> None:
        with pytest.raises(WireError, match="not a job id"):
            QueueKeys("q").job(JobId("nonsense"))


class TestGivenTheStates:
    def test_when_a_state_is_an_end_then_only_a_failed_job_has_a_way_back(self) -> None:
        ends = [state for state in JobState if state.is_terminal]

        assert len(ends) == 4
        assert {state: set(TRANSITIONS[state]) for state in ends if TRANSITIONS[state]} == {
            JobState.FAILED: {JobState.QUEUED}
        }
        assert set(TRANSITIONS) == set(JobState)

    def test_when_they_are_in_a_row_then_each_has_a_letter_of_its_own(self) -> None:
        read = {read_state(LETTERS[state].encode()) for state in RECORDED}

        assert read == {*RECORDED}
        assert read_state(b"") is None


class TestGivenTheDocumentation:
    def test_when_its_table_is_read_then_it_is_the_one_that_the_scripts_enforce(self) -> None:
        page = (Path(__file__).parents[2] / "docs/reference/job-states.md").read_text()
        rows = re.findall(r"^\| (\w+) \| (\w+) \| ", page, re.MULTILINE)
        ways = {(state, to) for state, to in rows if state in set(JobState)}

        assert ways == {(str(state), str(to)) for state, ways_out in TRANSITIONS.items() for to in ways_out}

    def test_when_its_keys_are_read_then_every_key_of_the_scripts_is_there(self) -> None:
        page = (Path(__file__).parents[2] / "docs/reference/keys.md").read_text()
        text = "".join(path.read_text() for path in Path(scripts.__file__).parent.glob("*.lua"))
        # A key that is only deleted, the first write of most scripts.
        names = {*re.findall(r"PREFIX \.\. '(\w+)", text)} - {"nothing"}

        assert len(names) > 30
        assert [name for name in sorted(names) if f"`P:{name}" not in page] == []

    def test_when_its_scripts_are_listed_then_every_script_is_there(self) -> None:
        page = (Path(__file__).parents[2] / "docs/reference/wire-format.md").read_text()
        table = page.split("## Scripts")[1]
        folder = Path(scripts.__file__).parent

        assert [path.stem for path in folder.glob("[!l]*.lua") if path.stem not in table] == []
