"""Use a gateway as any program with the `openai` client does: `drive.py WHAT`, with the client's own variables.

OPENAI_BASE_URL and OPENAI_API_KEY say where; prints one JSON object a line. `drive.mjs` is the same for Node.
"""

import asyncio
import json
import os
import sys
import time

import openai
from openai import AsyncOpenAI, OpenAI

MODEL = os.environ.get("MODEL", "null")
MESSAGES = [{"role": "user", "content": os.environ.get("PROMPT", "hello")}]


def say(**facts):
    print(json.dumps(facts), flush=True)


def asked():
    return {"model": MODEL, "messages": MESSAGES, "max_tokens": int(os.environ.get("TOKENS", "20")), "seed": 7}


def text_of(chunks, choice=0):
    return "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == choice)


def chat():
    client = OpenAI()
    raw = client.chat.completions.with_raw_response.create(**asked(), n=2)
    whole = raw.parse()
    chunks = list(client.chat.completions.create(**asked(), n=2, stream=True, stream_options={"include_usage": True}))
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    in_parts = client.chat.completions.create(**{**asked(), "messages": parts})
    say(
        models=[model.id for model in client.models.list()],
        texts=[choice.message.content for choice in whole.choices],
        streamed=[text_of(chunks, 0), text_of(chunks, 1)],
        finish_reasons=[choice.finish_reason for choice in whole.choices],
        usage=whole.usage.completion_tokens,
        streamed_usage=chunks[-1].usage.completion_tokens,
        in_parts=in_parts.choices[0].message.content,
        has_request_id=bool(raw.request_id),
    )


def completion():
    client = OpenAI()
    request = {"model": MODEL, "prompt": "once", "max_tokens": 20, "seed": 3}
    whole = client.completions.create(**request)
    chunks = list(client.completions.create(**request, stream=True))
    say(text=whole.choices[0].text, streamed="".join(chunk.choices[0].text or "" for chunk in chunks))


def several():
    async def ask(client, seed):
        chunks = [c async for c in await client.chat.completions.create(**{**asked(), "seed": seed}, stream=True)]
        whole = await client.chat.completions.create(**{**asked(), "seed": seed})
        return text_of(chunks) == whole.choices[0].message.content

    async def all_of_them():
        async with AsyncOpenAI() as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(8)))

    say(equal=asyncio.run(all_of_them()))


def refused():
    client = OpenAI(max_retries=0)
    for change in ({"model": "gpt-9"}, {"temperature": -1}, {"colour": "red"}, {"messages": []}):
        try:
            client.chat.completions.create(
                **{**asked(), **{k: v for k, v in change.items() if k != "colour"}},
                extra_body={k: v for k, v in change.items() if k == "colour"},
            )
        except openai.APIStatusError as error:
            say(
                kind=type(error).__name__,
                status=error.status_code,
                code=error.code,
                param=error.param,
                has_request_id=bool(error.request_id),
            )


def stream():
    try:
        for chunk in OpenAI().chat.completions.create(**asked(), stream=True):
            say(delta=chunk.choices[0].delta.content or "", id=chunk.id)
        say(end="clean")
    except Exception as error:
        say(end="raised", kind=type(error).__name__)


def whole():
    headers = {"Idempotency-Key": os.environ["KEY"]}
    say(waiting=True)
    answer = OpenAI(max_retries=8).chat.completions.create(**asked(), extra_headers=headers)
    say(id=answer.id, text=answer.choices[0].message.content)


def answered():
    return {"model": MODEL, "input": MESSAGES[0]["content"], "max_output_tokens": int(os.environ.get("TOKENS", "20"))}


def deltas_of(events):
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def responses():
    client = OpenAI()
    first = client.responses.create(**answered())
    second = client.responses.create(**{**answered(), "input": "go on"}, previous_response_id=first.id)
    streamed = list(client.responses.create(**answered(), stream=True))
    with client.responses.stream(**answered()) as helper:
        helped = [event.snapshot for event in helper if event.type == "response.output_text.delta"][-1]
    running = client.responses.create(**{**answered(), "max_output_tokens": 100_000}, background=True)
    cancelled = client.responses.cancel(running.id)
    client.responses.delete(first.id)
    try:
        client.responses.retrieve(first.id)
    except openai.NotFoundError as error:
        deleted = error.status_code
    say(
        text=first.output_text,
        retrieved=client.responses.retrieve(second.id).output_text == second.output_text,
        streamed=deltas_of(streamed) == streamed[-1].response.output_text,
        helped=len(helped),
        previous=second.previous_response_id == first.id,
        items=[item.content[0].text for item in client.responses.input_items.list(second.id)],
        usage=first.usage.output_tokens,
        cancelled=cancelled.status,
        deleted=deleted,
    )


def say_deltas(events):
    try:
        for event in events:
            if event.type == "response.created":
                say(id=event.response.id, after=event.sequence_number)
            elif event.type == "response.output_text.delta":
                say(delta=event.delta, after=event.sequence_number)
        say(end=event.type, text=event.response.output_text)
    except Exception as error:
        say(end="raised", kind=type(error).__name__)


def background():
    say_deltas(OpenAI().responses.create(**answered(), background=True, stream=True, extra_body={"seed": 7}))


def rejoined():
    after = int(os.environ["AFTER"])
    say_deltas(OpenAI().responses.retrieve(os.environ["ID"], stream=True, starting_after=after))


def batch():
    client = OpenAI()
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = "\n".join(json.dumps({**line, "custom_id": f"c-{number}"}) for number in range(5))
    file = client.files.create(file=("in.jsonl", lines.encode()), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"team": "search"}
    )
    while made.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.2)
        made = client.batches.retrieve(made.id)
    outputs = [json.loads(line) for line in client.files.content(made.output_file_id).text.splitlines()]
    facts = {
        "status": made.status,
        "completed": made.request_counts.completed,
        "metadata": made.metadata,
        "ids": sorted(output["custom_id"] for output in outputs),
        "listed": made.id in [one.id for one in client.batches.list(limit=1)],
        "files": [client.files.retrieve(one).purpose for one in (file.id, made.output_file_id)],
        "content": client.files.content(file.id).text == lines,
    }
    say(**facts, deleted=client.files.delete(made.output_file_id).deleted)


SCENARIOS = (chat, completion, several, refused, stream, whole, responses, background, rejoined, batch)

if __name__ == "__main__":
    {f.__name__: f for f in SCENARIOS}[sys.argv[1]]()
