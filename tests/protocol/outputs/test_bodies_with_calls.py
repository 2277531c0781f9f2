"""Bodies of chats whose text has marks, as the gateway answers them and files of batches have them."""

from sluice.producer.bulk.output import output_line
from sluice.protocol.openai_format.requests import CHAT, COMPLETIONS
from sluice.protocol.openai_format.tools import parsed_object
from sluice.protocol.wire import ChoiceResult, JobResult, Usage

TEXT = '<think>\nHm.\n</think>\n\nLet me see.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def result(finish_reason: str, output_format: str = "think+hermes") -> JobResult:
    """A job with one choice."""
    choice = ChoiceResult(text=TEXT, token_ids=(1, 2), finish_reason=finish_reason, format=output_format)
    return JobResult(choices=(choice,), usage=Usage(prompt_tokens=1, output_tokens=2), model="m")


class TestGivenAResultWithACall:
    def test_when_it_is_a_line_of_a_batch_then_the_message_has_its_parts(self) -> None:
        [choice] = output_line("n", "c", CHAT, result("stop"), model=None)["response"]["body"]["choices"]

        message = choice["message"]
        [call] = message.pop("tool_calls")
        assert choice["finish_reason"] == "tool_calls"
        assert message == {
            "role": "assistant", "content": "Let me see.", "refusal": None, "reasoning_content": "Hm.",
        }  # fmt: skip
        assert (call["type"], call["function"]) == ("function", {"name": "f", "arguments": '{"a": 1}'})

    def test_when_it_was_cut_off_then_the_reason_says_so(self) -> None:
        [choice] = output_line("n", "c", CHAT, result("length"), model=None)["response"]["body"]["choices"]

        assert choice["finish_reason"] == "length"

    def test_when_it_is_read_twice_then_the_ids_are_the_same(self) -> None:
        first, second, other = (
            output_line(name, "c", CHAT, result("stop"), model=None)["response"]["body"]["choices"][0]["message"]
            for name in ("n", "n", "o")
        )

        assert first["tool_calls"][0]["id"] == second["tool_calls"][0]["id"] != other["tool_calls"][0]["id"]

    def test_when_it_is_shown_beside_its_text_then_it_has_its_parts(self) -> None:
        [marked], [plain] = result("stop").choices, result("stop", "").choices

        assert parsed_object(plain) is None
        assert parsed_object(marked) == {
            "content": "Let me see.", "reasoning": "Hm.", "calls": [{"name": "f", "arguments": '{"a": 1}'}],
        }  # fmt: skip

    def test_when_its_parts_are_read_again_then_they_are_not_parsed_again(self) -> None:
        [choice] = result("stop").choices

        assert choice.parsed is choice.parsed

    def test_when_nothing_is_marked_or_it_is_no_chat_then_the_text_is_as_it_is(self) -> None:
        chat = output_line("n", "c", CHAT, result("stop", ""), model=None)["response"]["body"]["choices"][0]
        text = output_line("n", "c", COMPLETIONS, result("stop"), model=None)["response"]["body"]["choices"][0]

        assert (chat["message"]["content"], chat["finish_reason"]) == (TEXT, "stop")
        assert (text["text"], text["finish_reason"]) == (TEXT, "stop")
