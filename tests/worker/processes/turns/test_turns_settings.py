"""The groups of a fleet's file whose workers have their device by turns."""

from pathlib import Path

import pytest

from sluice.worker.errors import ConfigError
from sluice.worker.processes import models
from sluice.worker.processes.models import Member, read_members, read_turns, specs_by_member
from sluice.worker.processes.turns.policy import TurnRules

TWO = """
[workers.small]
model = "null"
queue = "small"
turns = "card"
[workers.large]
model = "null?step_s=0.1"
queue = "large"
turns = "card"
"""
SAME_QUEUE = TWO.replace("null?step_s=0.1", "null").replace('queue = "large"', 'queue = "small"')


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "own_cores", lambda: list(range(8)))


def read(folder: Path, text: str) -> tuple[list[Member], dict[str, TurnRules]]:
    """The workers and the groups of a file with this text."""
    file = folder / "fleet.toml"
    file.write_text(text)
    members = read_members(file, {}, {})
    return members, read_turns(file, members)


class TestGivenAFileWithAGroup:
    def test_when_it_states_nothing_then_the_defaults_hold(self, tmp_path: Path) -> None:
        members, rules = read(tmp_path, TWO)

        assert [member.turns for member in members] == ["card", "card"]
        assert rules == {"card": TurnRules()}

    def test_when_it_states_settings_then_they_hold(self, tmp_path: Path) -> None:
        _, rules = read(tmp_path, TWO + "[turns.card]\nshare = 0.2\npatience-s = 30\nturn-s = 2\nstop-s = 5\n")

        assert rules == {"card": TurnRules(share=0.2, patience_s=30.0, turn_s=2.0, stop_s=5.0)}

    def test_when_its_turn_ends_then_a_worker_hands_its_jobs_over(self, tmp_path: Path) -> None:
        members, _ = read(tmp_path, TWO + "[workers.apart]\nmodel = 'null'\nqueue = 'apart'\n")

        assert [member.config.drain.mode for member in members] == ["hand-over", "hand-over", "finish"]

    @pytest.mark.parametrize(
        ("own", "apart", "num_own", "num_apart"),
        [("", "", 4, 4), ("cores = 6", "", 6, 2), ("", "cores = 2", 6, 2), ("cores = 6", "cores = 2", 6, 2)],
    )
    def test_when_they_start_then_a_group_has_one_share_of_the_host(
        self, tmp_path: Path, own: str, apart: str, num_own: int, num_apart: int
    ) -> None:
        members, _ = read(tmp_path, f"{TWO}{own}\n[workers.apart]\nmodel = 'null'\nqueue = 'apart'\n{apart}\n")

        specs = specs_by_member(members, {})

        cores = {name: of_member[0].cores for name, of_member in specs.items()}
        assert [len(cores[name]) for name in ("small", "large", "apart")] == [num_own, num_own, num_apart]
        assert cores["small"] == cores["large"]
        assert cores["small"].isdisjoint(cores["apart"])
        shares = [float(of_member[0].environ["SLUICE_MEMORY_FRACTION"]) for of_member in specs.values()]
        assert shares == [0.25] * 3

    @pytest.mark.parametrize(
        ("more", "fractions"),
        [
            ("", {"small": None, "large": None}),
            ("[workers.apart]\nqueue = 'apart'\ndevice = 'cuda:0'\n", {"small": 0.45, "large": 0.45, "apart": 0.45}),
            (
                "memory-fraction = 0.6\n[workers.apart]\nqueue = 'apart'\ndevice = 'cuda:0'\n",
                {"small": 0.45, "large": 0.6, "apart": 0.3},
            ),
        ],
    )
    def test_when_it_is_on_a_gpu_then_each_has_all_that_others_leave(
        self, tmp_path: Path, more: str, fractions: dict[str, float | None]
    ) -> None:
        members, _ = read(tmp_path, TWO.replace("turns =", "device = 'cuda:0'\nturns =") + more)

        specs = specs_by_member(members, {})

        given = {name: own[0].environ.get("SLUICE_MEMORY_FRACTION") for name, own in specs.items()}
        assert {name: one and float(one) for name, one in given.items()} == {
            name: one and pytest.approx(one) for name, one in fractions.items()
        }


class TestGivenAFileWithAWrongGroup:
    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            (
                TWO.replace('queue = "small"', 'queue = ["small", "more"]'),
                "workers.small.queue: expected one queue of a worker with turns, got small, more",
            ),
            (TWO.replace("card", "a", 1), "turns.a: expected at least two workers with turns = 'a', got 1"),
            (TWO + "[turns.other]\n", "turns.other: expected at least two workers with turns = 'other', got 0"),
            (TWO + "[turns.card]\nshare = 0\n", "turns.card.share: must be over 0 and at most 1, got 0"),
            (TWO + "[turns.card]\nshare = 'x'\n", "turns.card.share: expected a number of 0 or more, got 'x'"),
            (TWO + "[turns.card]\npatience-s = -1\n", "turns.card.patience-s: expected a number of 0 or more"),
            (
                TWO + "[turns.card]\nwait = 1\n",
                "turns.card.wait: unknown setting; there are share, patience-s, turn-s",
            ),
            (TWO + "[turns]\ncard = 1\n", "turns.card: expected a table"),
            (TWO.replace('"card"', "1", 1), "workers.small.turns: expected the name of a group, got 1"),
            (SAME_QUEUE, "workers.large.queue: small takes turns with it, and has the same queue"),
        ],
    )
    def test_when_it_is_read_then_the_error_names_the_place(self, tmp_path: Path, text: str, problem: str) -> None:
        with pytest.raises(ConfigError) as raised:
            read(tmp_path, text)

        assert problem in "\n".join(raised.value.problems)
