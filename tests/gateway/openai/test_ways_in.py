"""A request has the same verdict, code and parameter over HTTP, as a line of a batch and as a line of a bulk file."""

import json
from typing import Any

import pytest

from sluice.protocol.openai_format.requests import CHAT, COMPLETIONS, Endpoint
from tests.gateway.openai.ways_in import PARAMETERS, Asked, Verdict, asked, verdicts

SEED = 32
SHORT, LONG = 200, 20_000


def differing(seed: int, number: int) -> list[tuple[Asked, dict[str, Verdict]]]:
    """The requests of which two ways in say different things."""
    found = ((one, verdicts(one)) for one in (asked(seed, place) for place in range(number)))
    return [(one, said) for one, said in found if len({*said.values()}) > 1]


def of(endpoint: Endpoint, **parameters: Any) -> dict[str, Verdict]:  # Any: JSON
    """What the ways in say of a request."""
    prompt = {"messages": [{"role": "user", "content": "a"}]} if endpoint == CHAT else {"prompt": "a"}
    return verdicts(Asked(endpoint, json.dumps({**prompt, **parameters}).encode()))


class TestGivenRandomRequests:
    def test_when_they_come_in_every_way_then_verdicts_are_the_same(self) -> None:
        assert differing(SEED, SHORT) == []

    @pytest.mark.long
    @pytest.mark.parametrize("seed", range(4))
    def test_when_many_come_in_every_way_then_verdicts_are_the_same(self, seed: int) -> None:
        assert differing(seed, LONG // 4) == []

    def test_when_they_are_read_then_they_are_of_every_kind(self) -> None:
        found = [verdicts(asked(SEED, number))["http"] for number in range(SHORT)]

        accepted = [one for one in found if one.digest is not None]
        assert SHORT // 4 < len(accepted) < SHORT * 3 // 4
        assert {one.code for one in found} >= {
            None,
            "invalid_request",
            "unsupported",
            "unknown_parameter",
            "invalid_json",
        }
        assert len({one.param for one in found} & {*PARAMETERS}) > len(PARAMETERS) // 3


class TestGivenTheClientsNameOfAnOption:
    @pytest.mark.parametrize(
        ("endpoint", "parameters", "param"),
        [
            (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
            (CHAT, {"max_tokens": 0}, "max_tokens"),
            (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
            (CHAT, {"messages": [{"role": "user", "content": "a"}, {"role": "bot"}]}, "messages[1].role"),
            (CHAT, {"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
            (CHAT, {"messages": [{"role": "user", "content": "a", "name": 1}]}, "messages[0].name"),
            (COMPLETIONS, {"prompt": ""}, "prompt"),
            (COMPLETIONS, {"prompt": [1, -1]}, "prompt"),
            (COMPLETIONS, {"prompt": [{"role": "user", "content": "a"}]}, "prompt"),
            (COMPLETIONS, {"logprobs": 21}, "logprobs"),
            (COMPLETIONS, {"metadata": {"a": 1}}, "metadata"),
        ],
    )
    def test_when_its_value_is_wrong_then_param_is_that_name(
        self, endpoint: Endpoint, parameters: dict[str, object], param: str
    ) -> None:
        said = of(endpoint, **parameters)

        assert {*said.values()} == {Verdict(None, "invalid_request", param)}
        assert "plain bulk" in said

    @pytest.mark.parametrize(
        "parameters",
        [
            *({name: None} for name in ("stop", "n", "presence_penalty", "echo")),
            *({"seed": -1}, {"user": "x"}, {"echo": False}, {"max_completion_tokens": 5}, {"prompt": ["Once"]}),
            *({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        ],
    )
    def test_when_it_is_accepted_over_http_then_it_is_in_files(self, parameters: dict[str, object]) -> None:
        said = of(COMPLETIONS, **parameters)

        assert len({*said.values()}) == 1
        assert said["plain bulk"].digest is not None

    def test_when_a_message_has_no_tool_calls_then_it_is_accepted(self) -> None:
        said = of(CHAT, messages=[{"role": "assistant", "content": "a", "tool_calls": None}])

        assert said["plain bulk"] == said["http"]
        assert said["http"].digest is not None
