"""The file of `worker fleet FILE`: which workers it names, what they share, and what is refused."""

from pathlib import Path

import pytest

from sluice.worker.errors import ConfigError
from sluice.worker.processes import models
from sluice.worker.processes.child_process import ChildSpec
from sluice.worker.processes.models import Member, read_members, sidecars_of, specs_by_member

TWO = """
[redis]
url = "redis://queue:6379/0"
[batching]
max_num_seqs = 4
[workers.small]
model = "null"
queue = "small"
[workers.large]
model = "null?step_s=0.1"
queue = "large"
max-num-seqs = 8
"""


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "own_cores", lambda: list(range(8)))


def members_of(folder: Path, text: str, **flags: object) -> list[Member]:
    """The workers of a file with this text."""
    file = folder / "fleet.toml"
    file.write_text(text)
    return read_members(file, {}, {name.replace("__", "."): value for name, value in flags.items()})


def problems_of(folder: Path, text: str) -> str:
    """Why a file is refused."""
    with pytest.raises(ConfigError) as raised:
        members_of(folder, text)
    return "\n".join(raised.value.problems)


def all_specs(members: list[Member]) -> list[ChildSpec]:
    """The processes of all members."""
    return [spec for specs in specs_by_member(members, {}).values() for spec in specs]


class TestGivenAFileWithTwoWorkers:
    def test_when_it_is_read_then_each_has_its_settings_over_the_common_ones(self, tmp_path: Path) -> None:
        small, large = members_of(tmp_path, TWO)

        assert (small.name, small.config.queue.title, small.config.step_limits.max_num_seqs) == (
            "small",
            "queue 'small'",
            4,
        )
        assert (large.name, large.config.queue.title, large.config.step_limits.max_num_seqs) == (
            "large",
            "queue 'large'",
            8,
        )
        assert small.config.redis == large.config.redis
        assert [small.config.log.name, large.config.log.name] == ["small", "large"]

    def test_when_flags_are_given_then_they_are_for_all_but_what_a_table_states(self, tmp_path: Path) -> None:
        small, large = members_of(tmp_path, TWO, batching__max_num_seqs="2", queue__model_wait_s="5")

        assert [one.config.step_limits.max_num_seqs for one in (small, large)] == [2, 8]
        assert [one.config.queue.model_wait_s for one in (small, large)] == [5, 5]

    @pytest.mark.parametrize(
        ("small", "large", "shares"),
        [
            ("", "", [{0, 1, 2, 3}, {4, 5, 6, 7}]),
            ("cores = 6", "", [{0, 1, 2, 3, 4, 5}, {6, 7}]),
            ("cores = 1", "cores = 3", [{0}, {1, 2, 3}]),
            ("cores = 2", "processes = 2", [{0, 1}, {2, 3, 4}, {5, 6, 7}]),
            ('device = "cuda:0"', "", [set[int](), {0, 1, 2, 3, 4, 5, 6, 7}]),
        ],
    )
    def test_when_they_start_then_no_two_share_a_core(
        self, tmp_path: Path, small: str, large: str, shares: list[set[int]]
    ) -> None:
        text = TWO.replace("[workers.large]", f"{small}\n[workers.large]") + large

        specs = all_specs(members_of(tmp_path, text))

        assert [set(spec.cores) for spec in specs] == shares

    def test_when_they_start_then_names_ports_and_memory_are_their_own(self, tmp_path: Path) -> None:
        first, second = all_specs(members_of(tmp_path, TWO + "\n[metrics]\nport = 9000\n"))

        assert [first.name, second.name] == ["small-cpu0", "large-cpu0"]
        assert [one.environ["SLUICE_METRICS_PORT"] for one in (first, second)] == ["9000", "9001"]
        assert [float(one.environ["SLUICE_MEMORY_FRACTION"]) for one in (first, second)] == [0.25, 0.25]
        assert [one.environ["SLUICE_QUEUE"] for one in (first, second)] == ["small", "large"]

    def test_when_both_serve_a_queue_then_it_has_one_recorder(self, tmp_path: Path) -> None:
        one_model = TWO.replace("null?step_s=0.1", "null").replace('queue = "large"', 'queue = ["large:3", "small"]')

        specs = sidecars_of(members_of(tmp_path, one_model), {})

        assert [spec.environ["SLUICE_QUEUE"] for spec in specs] == ["small", "large"]

    @pytest.mark.parametrize(
        ("small", "large", "common", "ports"),
        [
            ("metrics-port = 9500", "metrics-port = 9600", "", ["9500", "9600"]),
            ("metrics-port = 9600", "", "port = 9000", ["9600", "9000"]),
            ("", "metrics-port = 9000", "port = 9000", ["9001", "9000"]),
            ("metrics-port = 9001", "processes = 2", "port = 9000", ["9001", "9002", "9003"]),
            ("processes = 2", "", "port = 9000", ["9000", "9001", "9002"]),
            ("metrics-port = 0", "metrics-port = 0", "", ["0", "0"]),
        ],
    )
    def test_when_a_table_states_a_port_then_it_has_it_and_others_have_the_next_ones(
        self, tmp_path: Path, small: str, large: str, common: str, ports: list[str]
    ) -> None:
        text = TWO.replace("[workers.large]", f"{small}\n[workers.large]") + f"{large}\n[metrics]\n{common}\n"

        specs = all_specs(members_of(tmp_path, text))

        assert [spec.environ["SLUICE_METRICS_PORT"] for spec in specs] == ports

    @pytest.mark.parametrize(
        ("small", "large", "fractions"),
        [
            ("device = 'cuda:0'", "device = 'cuda:0'", [0.45, 0.45]),
            ("device = 'cuda'", "device = 'cuda:0'", [0.45, 0.45]),
            ("device = 'cuda:0'", "device = 'cuda:1'", [None, None]),
            ("device = 'cuda:0,1'", "device = 'cuda:1'", [0.45, 0.45, 0.45]),
            ("device = 'cuda:0'\nmemory-fraction = 0.6", "device = 'cuda:0'", [0.6, 0.3]),
            ("device = 'cuda:0'\nmemory-fraction = 0.6", "device = 'cuda:0'\nmemory-fraction = 0.4", [0.6, 0.4]),
            ("device = 'cuda:0'", "", [None, 0.5]),
        ],
    )
    def test_when_they_share_a_gpu_then_they_divide_its_memory(
        self, tmp_path: Path, small: str, large: str, fractions: list[float | None]
    ) -> None:
        text = TWO.replace("[workers.large]", f"{small}\n[workers.large]") + large

        given = [spec.environ.get("SLUICE_MEMORY_FRACTION") for spec in all_specs(members_of(tmp_path, text))]

        assert [one and float(one) for one in given] == [one and pytest.approx(one) for one in fractions]


class TestGivenAFileThatIsWrong:
    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("", r"no worker: expected a table [workers.NAME] for each model"),
            ("[workers", "cannot be read"),
            ("[workers]\nsmall = 1", "workers.small: expected a table"),
            ("[workers.a]\nmodle = 'null'", "workers.a.modle: unknown setting"),
            ("[workers.a]\nmodel = 'null'\nmax-num-seqs = 'x'", "workers.a.max-num-seqs: expected"),
            ("[workers.a]\nmodel = 'null'\ncores = 0", "workers.a.cores: expected a whole number over 0, got 0"),
            ("[workers.a]\nmodel = 'null'\ncores = 9", "9 cores and those of 0 more workers, of 8"),
            ("[workers.a]\ndevice = 'cuda:0'\ncores = 2", "workers.a.cores: only for a CPU"),
            ("[workers.a]\nmodel = 'null'\n[nothing]\nx = 1", "nothing.x: unknown setting"),
            (
                "[workers.a]\nmodel = 'null'\n[workers.b]\nmodel = 'null?step_s=1'",
                "workers.b.queue: a has another model on the queue default: give each model a queue",
            ),
            (
                "[workers.a]\nmodel = 'null'\n[workers.b]\nmodel = 'null'\nredis-url = 'redis://b:1/0'",
                "workers.b: it has another server than a: state the server in [redis]",
            ),
            (
                "[workers.a]\nmodel = 'null'\nprocesses = 2\nmetrics-port = 9500\n"
                "[workers.b]\nmodel = 'null'\nmetrics-port = 9501",
                "workers.b.metrics-port: 9501 is a port of a: state another",
            ),
            (
                "[workers.a]\ndevice = 'cuda:0'\nmemory-fraction = 0.9\n"
                "[workers.b]\ndevice = 'cuda:0'\nmemory-fraction = 0.3",
                "workers.b.memory-fraction: a, b state 1.2 of the memory of cuda:0 together: at most 1",
            ),
            (
                "[workers.a]\ndevice = 'cuda:0'\nmemory-fraction = 0.9\n[workers.b]\ndevice = 'cuda:0'",
                "workers.b.memory-fraction: the others on its GPU leave it no memory: state a part for each",
            ),
        ],
    )
    def test_when_it_is_read_then_the_error_names_the_place(self, tmp_path: Path, text: str, problem: str) -> None:
        assert problem in problems_of(tmp_path, text)
