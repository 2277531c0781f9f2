"""Settings: one tree from defaults, file, environment and flags, with every problem reported at once."""

from pathlib import Path
from typing import ClassVar

import pytest

from sluice.protocol.queue_shares import QueueShare
from sluice.worker.config import SETTINGS, load_config
from sluice.worker.errors import ConfigError, ExitCode
from sluice.worker.model.load import engine_config
from sluice.worker.processes.specs import environment_of


class TestGivenNothing:
    """No file, no environment, no flags."""

    def test_when_loaded_then_every_setting_has_its_default(self) -> None:
        config = load_config({})

        assert config.redis.url is None
        assert config.queue.names == ("default",)
        assert config.beat.every_s == 1.0
        assert config.beat.life_s == 4.0

    def test_when_the_environment_has_names_of_others_then_they_are_left_alone(self) -> None:
        config = load_config({"PATH": "/bin", "SLUICE_STATE_DIR": "/tmp/state", "SLUICE_API_KEY": "x"})

        assert config.queue.names == ("default",)


class TestGivenAPodOfKubernetes:
    """The kubelet sets variables for each service of the namespace; one is `sluice-gateway`, one `sluice-metrics`."""

    LINKS: ClassVar = {
        "GATEWAY_SERVICE_HOST": "10.96.12.7",
        "GATEWAY_SERVICE_PORT": "8000",
        "GATEWAY_SERVICE_PORT_HTTP": "8000",
        "GATEWAY_PORT": "tcp://10.96.12.7:8000",
        "GATEWAY_PORT_8000_TCP": "tcp://10.96.12.7:8000",
        "GATEWAY_PORT_8000_TCP_PROTO": "tcp",
        "GATEWAY_PORT_8000_TCP_PORT": "8000",
        "GATEWAY_PORT_8000_TCP_ADDR": "10.96.12.7",
        "METRICS_PORT": "tcp://[fd00::7]:9400",
        "METRICS_SERVICE_HOST": "fd00::7",
    }

    def test_when_loaded_then_its_variables_are_no_settings(self) -> None:
        config = load_config({f"SLUICE_{name}": value for name, value in self.LINKS.items()})

        assert config == load_config({})

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("BROKER_SERVICE_HOST", "localhost"),
            ("BROKER_SERVICE_PORT", "http"),
            ("BROKER_PORT", "8000"),
            ("BROKER_PORT_8000_TCP", "10.96.12.7:8000"),
            ("BROKER_PORT_8000_TCP_NAME", "http"),
            ("BROKER_HOST", "10.96.12.7"),
            ("METRICS_PORT", "tcp"),
        ],
    )
    def test_when_a_name_or_value_is_another_then_it_is_refused(self, name: str, value: str) -> None:
        with pytest.raises(ConfigError, match=f"SLUICE_{name}: "):
            load_config({f"SLUICE_{name}": value})


class TestGivenADevice:
    """Its defaults for the largest step: 64 sequences would starve a large GPU."""

    @pytest.mark.parametrize(
        ("device", "given", "expected"),
        [
            ("cpu", {}, (64, 2048)),
            ("cuda:0", {}, (256, 8192)),
            ("cuda:all", {}, (256, 8192)),
            ("cuda:0", {"MAX_NUM_SEQS": "8"}, (8, 8192)),
            ("cuda:0", {"MAX_NUM_BATCHED_TOKENS": "1024"}, (256, 1024)),
            ("cuda:0", {"MAX_NUM_BATCHED_TOKENS": "128"}, (128, 128)),
            ("cpu", {"MAX_NUM_SEQS": "4096"}, (4096, 4096)),
        ],
        ids=str,
    )
    def test_when_limits_are_not_given_then_they_are_the_device_s(
        self, device: str, given: dict[str, str], expected: tuple[int, int]
    ) -> None:
        environ = {"SLUICE_DEVICE": device} | {f"SLUICE_{name}": value for name, value in given.items()}

        config = load_config(environ)

        assert tuple(config.step_limits) == expected
        assert engine_config(config).max_num_seqs == expected[0]


class TestGivenSpeculationAsTheMachineHasIt:
    """auto: nobody has measured it on a GPU."""

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            ({}, "suffix"),
            ({"DEVICE": "cuda:0"}, "off"),
            ({"MODEL": "null"}, "off"),
            ({"DISCIPLINE": "orca"}, "off"),
            ({"DEVICE": "cuda:0", "SPECULATION": "suffix"}, "suffix"),
            ({"SPECULATION": "off"}, "off"),
        ],
        ids=str,
    )
    def test_when_a_model_runs_then_it_is_on_where_it_pays(self, settings: dict[str, str], expected: str) -> None:
        config = load_config({f"SLUICE_{name}": value for name, value in settings.items()})

        assert engine_config(config).speculation == expected

    def test_when_a_discipline_for_comparison_is_to_speculate_then_both_are_named(self) -> None:
        config = load_config({"SLUICE_SPECULATION": "suffix", "SLUICE_DISCIPLINE": "orca"})

        with pytest.raises(ConfigError, match="speculation must be off with the discipline orca"):
            engine_config(config)


class TestGivenTheSameSettingInAllPlaces:
    """A file, the environment and a flag name the queue."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "sluice.toml"
        path.write_text('[queue]\nname = "from-file"\npartitions = 3\n[beat]\nlife_s = 9\n')
        return path

    def test_when_loaded_then_the_flag_wins_over_the_environment_over_the_file(self, file: Path) -> None:
        environ = {"SLUICE_QUEUE": "from-env", "SLUICE_BEAT_LIFE_S": "8"}

        config = load_config(environ, file=file, flags={"queue.name": "from-flag"})

        assert config.queue.names == ("from-flag",)
        assert config.beat.life_s == 8.0
        assert config.queue.partitions == 3

    def test_when_the_environment_names_the_file_then_it_is_read(self, file: Path) -> None:
        assert load_config({"SLUICE_CONFIG": str(file)}).queue.names == ("from-file",)


class TestGivenSeveralQueues:
    """The first has three parts of the worker, the second one."""

    SHARES = (QueueShare("chat", 3), QueueShare("batch", 1))

    def test_when_any_source_names_them_then_they_have_their_weights(self, tmp_path: Path) -> None:
        file = tmp_path / "sluice.toml"
        file.write_text('[queue]\nname = ["chat:3", "batch"]\n')

        assert load_config({}, file=file).queue.shares == self.SHARES
        assert load_config({"SLUICE_QUEUE": "chat:3 batch:1"}).queue.shares == self.SHARES
        assert load_config({}, flags={"queue.name": ("chat:3", "batch")}).queue.shares == self.SHARES

    def test_when_a_child_process_reads_its_environment_then_they_are_the_same(self) -> None:
        config = load_config({"SLUICE_QUEUE": "chat:3 batch"})

        assert load_config(environment_of(config)) == config

    def test_when_a_command_reads_one_then_the_refusal_names_both(self) -> None:
        queue = load_config({"SLUICE_QUEUE": "chat:3 batch"}).queue

        with pytest.raises(
            ConfigError, match="SLUICE_QUEUE: an audit reads one queue, not chat, batch: give one as --queue"
        ):
            queue.only("an audit reads")

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("chat:x", "expected NAME or NAME:WEIGHT, where the weight is a whole number, got 'chat:x'"),
            ("chat:-1", "expected NAME or NAME:WEIGHT, where the weight is a whole number, got 'chat:-1'"),
            ("chat:2:3", "expected NAME or NAME:WEIGHT, where the weight is a whole number, got 'chat:2:3'"),
            ("chat:", "expected NAME or NAME:WEIGHT, where the weight is a whole number, got 'chat:'"),
            ("chat:0", "the weight of a queue is 1 to 1000, got 0"),
            ("chat:1001", "the weight of a queue is 1 to 1000, got 1001"),
            (":3", "expected 1 to 64 characters without braces, colons or spaces, got ''"),
            ("a{b", "expected 1 to 64 characters without braces, colons or spaces, got 'a{b'"),
            ("chat:3 batch chat", "expected each queue once, got chat more than once"),
        ],
    )
    def test_when_they_are_wrong_then_it_says_what_is_expected(self, text: str, problem: str) -> None:
        with pytest.raises(ConfigError) as raised:
            load_config({"SLUICE_QUEUE": text})

        assert raised.value.problems == (f"SLUICE_QUEUE: {problem}",)


class TestGivenManyMistakes:
    """Wrong kinds, unknown names and contradictions."""

    def test_when_loaded_then_every_mistake_is_named_at_once(self, tmp_path: Path) -> None:
        file = tmp_path / "sluice.toml"
        file.write_text('[queue]\nnmae = "x"\n[metrics]\nport = "a lot"\n')

        with pytest.raises(ConfigError) as caught:
            load_config(
                {"SLUICE_BEAT_LIFE_S": "30s", "SLUICE_QUEU": "x", "SLUICE_RECORDER": "perhaps", "SLUICE_DTYPE": "int4"},
                file=file,
            )

        message = str(caught.value)
        assert message.startswith("6 settings are wrong:")
        assert "SLUICE_BEAT_LIFE_S: expected seconds as a number, got '30s'" in message
        for name in ("SLUICE_QUEU", "SLUICE_RECORDER", "SLUICE_DTYPE", "queue.nmae", "metrics.port"):
            assert name in message
        assert caught.value.exit_code == ExitCode.MISUSED

    def test_when_values_contradict_each_other_then_the_name_that_was_used_is_reported(self) -> None:
        with pytest.raises(ConfigError) as caught:
            load_config({"SLUICE_BEAT_EVERY_S": "2", "SLUICE_NUM_BLOCKS": "0"}, flags={"redis.url": "localhost:6379"})

        message = str(caught.value)
        assert "SLUICE_BEAT_EVERY_S: must be at most a third of BEAT_LIFE_S (4), got 2" in message
        assert "SLUICE_NUM_BLOCKS: must be over 0, got 0" in message
        assert "--redis-url: expected a URL that begins with redis://" in message

    @pytest.mark.parametrize(
        ("device", "dtype", "problem"),
        [
            ("cpu", "float32", "int8 needs bfloat16 (or auto) as dtype, got float32"),
            ("cpu", "float16", "int8 needs bfloat16 (or auto) as dtype, got float16"),
            ("cuda:1", "float32", "int8 needs bfloat16, float16 (or auto) as dtype, got float32"),
        ],
    )
    def test_when_int8_is_asked_where_it_cannot_be_had_then_it_is_refused(
        self, device: str, dtype: str, problem: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            load_config({"SLUICE_QUANTIZATION": "int8", "SLUICE_DEVICE": device, "SLUICE_DTYPE": dtype})

        assert caught.value.problems == (f"SLUICE_QUANTIZATION: {problem}",)

    def test_when_a_cache_in_fp8_is_asked_on_a_cpu_then_it_is_refused_and_on_a_gpu_taken(self) -> None:
        with pytest.raises(ConfigError, match="SLUICE_KV_CACHE_DTYPE: fp8 needs a GPU"):
            load_config({"SLUICE_KV_CACHE_DTYPE": "fp8"})

        taken = load_config({"SLUICE_KV_CACHE_DTYPE": "fp8", "SLUICE_DEVICE": "cuda:0"})
        assert taken.model.kv_cache_dtype == "fp8"

    @pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
    def test_when_int8_is_asked_on_a_gpu_then_it_is_taken(self, dtype: str) -> None:
        found = load_config({"SLUICE_QUANTIZATION": "int8", "SLUICE_DEVICE": "cuda:0", "SLUICE_DTYPE": dtype})

        assert found.model.quantization == "int8"

    def test_when_the_file_is_not_toml_then_it_is_reported(self, tmp_path: Path) -> None:
        file = tmp_path / "sluice.toml"
        file.write_text("queue = [")

        with pytest.raises(ConfigError, match="cannot be read"):
            load_config({}, file=file)


class TestGivenSecrets:
    """URLs with passwords."""

    def test_when_shown_then_no_secret_is_in_it(self) -> None:
        config = load_config(
            {
                "SLUICE_REDIS_URL": "redis://user:hunter2@host/0",
                "SLUICE_DATABASE_URL": "postgresql://user:hunter3@host/db",
                "SLUICE_CALLBACKS_SECRET": "hunter4",
            }
        )

        assert "hunter" not in repr(config)

    def test_when_a_wrong_url_is_reported_then_its_password_is_not(self) -> None:
        with pytest.raises(ConfigError) as caught:
            load_config({"SLUICE_REDIS_URL": "http://user:hunter2@host"})

        assert "hunter2" not in str(caught.value)


def test_names_of_settings_are_unique() -> None:
    assert len({leaf.env_name for leaf in SETTINGS}) == len(SETTINGS)
    assert len({leaf.flag for leaf in SETTINGS}) == len(SETTINGS)
