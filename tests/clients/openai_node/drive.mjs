// Use a gateway as any program with the `openai` client does: `drive.mjs WHAT`, with the client's own variables.
// OPENAI_BASE_URL and OPENAI_API_KEY say where; prints one JSON object a line. `drive.py` is the same for Python.

import OpenAI from "openai";

const MODEL = process.env.MODEL ?? "null";
const asked = {
  model: MODEL,
  messages: [{ role: "user", content: process.env.PROMPT ?? "hello" }],
  max_tokens: Number(process.env.TOKENS ?? 20),
  seed: 7,
};

const say = (facts) => console.log(JSON.stringify(facts));

const textOf = (chunks, choice = 0) =>
  chunks.flatMap((chunk) => chunk.choices).filter((part) => part.index === choice)
    .map((part) => part.delta.content ?? "").join("");

async function all(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}

const answered = { model: MODEL, input: asked.messages[0].content, max_output_tokens: asked.max_tokens };

const deltasOf = (events) =>
  events.filter((event) => event.type === "response.output_text.delta").map((event) => event.delta).join("");

async function sayDeltas(ask) {
  try {
    let event;
    for await (event of await ask()) {
      if (event.type === "response.created") say({ id: event.response.id, after: event.sequence_number });
      if (event.type === "response.output_text.delta") say({ delta: event.delta, after: event.sequence_number });
    }
    say({ end: event.type, text: event.response.output.map((item) => item.content[0].text).join("") });
  } catch (error) {
    say({ end: "raised", kind: error.constructor.name });
  }
}

const scenarios = {
  async chat() {
    const client = new OpenAI();
    const whole = await client.chat.completions.create({ ...asked, n: 2 });
    const usage = { stream: true, stream_options: { include_usage: true } };
    const chunks = await all(await client.chat.completions.create({ ...asked, n: 2, ...usage }));
    const parts = [{ role: "user", content: [{ type: "text", text: "hel" }, { type: "text", text: "lo" }] }];
    const inParts = await client.chat.completions.create({ ...asked, messages: parts });
    say({
      models: (await all(client.models.list())).map((model) => model.id),
      texts: whole.choices.map((choice) => choice.message.content),
      streamed: [textOf(chunks, 0), textOf(chunks, 1)],
      finish_reasons: whole.choices.map((choice) => choice.finish_reason),
      usage: whole.usage.completion_tokens,
      streamed_usage: chunks.at(-1).usage.completion_tokens,
      in_parts: inParts.choices[0].message.content,
      has_request_id: Boolean(whole._request_id),
    });
  },

  async completion() {
    const client = new OpenAI();
    const request = { model: MODEL, prompt: "once", max_tokens: 20, seed: 3 };
    const whole = await client.completions.create(request);
    const chunks = await all(await client.completions.create({ ...request, stream: true }));
    say({ text: whole.choices[0].text, streamed: chunks.map((chunk) => chunk.choices[0].text).join("") });
  },

  async several() {
    const client = new OpenAI();
    const ask = async (seed) => {
      // The client's helper, which puts the chunks together itself.
      const helper = client.chat.completions.stream({ ...asked, seed });
      const streamed = await helper.finalChatCompletion();
      const whole = await client.chat.completions.create({ ...asked, seed });
      return streamed.choices[0].message.content === whole.choices[0].message.content;
    };
    say({ equal: await Promise.all([...Array(8).keys()].map(ask)) });
  },

  async refused() {
    const client = new OpenAI({ maxRetries: 0 });
    for (const change of [{ model: "gpt-9" }, { temperature: -1 }, { colour: "red" }, { messages: [] }]) {
      try {
        await client.chat.completions.create({ ...asked, ...change });
      } catch (error) {
        const { status, code, param, requestID } = error;
        say({ kind: error.constructor.name, status, code, param, has_request_id: Boolean(requestID) });
      }
    }
  },

  async stream() {
    try {
      for await (const chunk of await new OpenAI().chat.completions.create({ ...asked, stream: true })) {
        say({ delta: chunk.choices[0].delta.content ?? "", id: chunk.id });
      }
      say({ end: "clean" });
    } catch (error) {
      say({ end: "raised", kind: error.constructor.name });
    }
  },

  async whole() {
    const client = new OpenAI({ maxRetries: 8 });
    say({ waiting: true });
    const answer = await client.chat.completions.create(asked, { headers: { "Idempotency-Key": process.env.KEY } });
    say({ id: answer.id, text: answer.choices[0].message.content });
  },

  async responses() {
    const client = new OpenAI();
    const first = await client.responses.create(answered);
    const second = await client.responses.create({ ...answered, input: "go on", previous_response_id: first.id });
    const streamed = await all(await client.responses.create({ ...answered, stream: true }));
    const helper = client.responses.stream(answered);
    const helped = await helper.finalResponse();
    const running = await client.responses.create({ ...answered, max_output_tokens: 100_000, background: true });
    const cancelled = await client.responses.cancel(running.id);
    const items = await all(client.responses.inputItems.list(second.id));
    await client.responses.delete(first.id);
    const deleted = await client.responses.retrieve(first.id).catch((error) => error.status);
    say({
      text: first.output_text,
      retrieved: (await client.responses.retrieve(second.id)).output_text === second.output_text,
      streamed: deltasOf(streamed) === streamed.at(-1).response.output[0].content[0].text,
      helped: helped.output_text.length,
      previous: second.previous_response_id === first.id,
      items: items.map((item) => item.content[0].text),
      usage: first.usage.output_tokens,
      cancelled: cancelled.status,
      deleted,
    });
  },

  async background() {
    await sayDeltas(() => new OpenAI().responses.create({ ...answered, seed: 7, background: true, stream: true }));
  },

  async rejoined() {
    const after = Number(process.env.AFTER);
    await sayDeltas(() => new OpenAI().responses.retrieve(process.env.ID, { stream: true, starting_after: after }));
  },

  async batch() {
    const client = new OpenAI();
    const body = { ...asked, max_tokens: 4 };
    const line = (number) => ({ custom_id: `c-${number}`, method: "POST", url: "/v1/chat/completions", body });
    const lines = [...Array(5).keys()].map((number) => JSON.stringify(line(number))).join("\n");
    const file = await client.files.create({ file: new File([lines], "in.jsonl"), purpose: "batch" });
    let made = await client.batches.create({
      input_file_id: file.id,
      endpoint: "/v1/chat/completions",
      completion_window: "24h",
      metadata: { team: "search" },
    });
    while (!["completed", "failed", "expired", "cancelled"].includes(made.status)) {
      await new Promise((resolve) => setTimeout(resolve, 200));
      made = await client.batches.retrieve(made.id);
    }
    const outputs = (await (await client.files.content(made.output_file_id)).text()).trim().split("\n");
    const purpose = async (id) => (await client.files.retrieve(id)).purpose;
    say({
      status: made.status,
      completed: made.request_counts.completed,
      metadata: made.metadata,
      ids: outputs.map((output) => JSON.parse(output).custom_id).sort(),
      listed: (await all(client.batches.list({ limit: 1 }))).some((one) => one.id === made.id),
      files: [await purpose(file.id), await purpose(made.output_file_id)],
      content: (await (await client.files.content(file.id)).text()) === lines,
      deleted: (await client.files.delete(made.output_file_id)).deleted,
    });
  },
};

await scenarios[process.argv[2]]();
