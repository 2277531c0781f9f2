"""A chat with tools is watched: its calls appear as they are written, and are those of the page after the end."""

import pytest
from playwright.sync_api import expect

from sluice.producer import Producer
from tests.end_to_end.processes import worker_pool
from tests.gateway.gateway_process import gateway_process
from tests.gateway.ui.browser.conftest import Chromium
from tests.servers import RedisServer

pytestmark = [pytest.mark.browser, pytest.mark.long]
NUMBERS = {"type": "array", "items": {"type": "integer", "maximum": 999}, "minItems": 20, "maxItems": 20}


class TestGivenAJobWithToolsThatIsWatched:
    def test_when_it_is_over_then_the_calls_are_shown_as_after_a_reload(
        self, valkey: RedisServer, chromium: Chromium, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        parameters = {"type": "object", "properties": {"numbers": NUMBERS}, "required": ["numbers"]}
        function = {"name": "add", "parameters": {**parameters, "additionalProperties": False}}
        with (
            worker_pool(valkey.url, tmp_path_factory.mktemp("parts")) as pool,
            gateway_process(valkey.url) as gateway,
            Producer(valkey.url) as producer,
            chromium.window() as window,
        ):
            pool.start_all(1, MODEL="null?step_s=0.02", TOOL_FORMAT="hermes")
            tools = [{"type": "function", "function": function}]
            job = producer.submit(
                messages=[{"role": "user", "content": "Add."}], tools=tools, tool_choice="required", seed=3
            )
            window.page.goto(f"{gateway.url.removesuffix('/v1')}/ui/jobs/{job.id}")

            expect(window.page.locator("#live")).to_have_text("complete", timeout=60_000)
            parts, text = window.page.locator("#parts-0 pre"), window.page.locator("#choice-0")
            watched = (parts.all_text_contents(), text.text_content())
            window.page.reload()

            [choice] = producer.result(job).choices
            arguments = [call.arguments for call in choice.parsed.calls]
            assert (parts.all_text_contents(), text.text_content()) == watched == (arguments, choice.text)
            assert window.faults == []
