// The openai package for Node.
import assert from "node:assert";
import OpenAI from "openai";

const { HALFMOON_URL: url, HALFMOON_KEY: apiKey, HALFMOON_MODEL: model } = process.env;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });

const models = await client.models.list();
assert.equal(models.data[0].id, model);

// Chats, whole and streamed.
const messages = [{ role: "user", content: "Hello" }];
const greedy = { model, messages, max_completion_tokens: 8, temperature: 0 };
const whole = await client.chat.completions.create(greedy);
let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...greedy, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);

// Answers of a given form, and calls of tools, put together from a stream.
const schema = {
  type: "object",
  properties: { phase: { enum: ["half", "full"] } },
  required: ["phase"],
  additionalProperties: false,
};
const formed = await client.chat.completions.create({
  model, messages, max_completion_tokens: 600,
  response_format: { type: "json_schema", json_schema: { name: "moon", schema, strict: true } },
});
assert.ok(["half", "full"].includes(JSON.parse(formed.choices[0].message.content).phase));
const calling = client.chat.completions.stream({
  ...greedy, max_completion_tokens: 600, tool_choice: "required", parallel_tool_calls: false,
  tools: [{ type: "function", function: { name: "look", parameters: schema } }],
});
const called = (await calling.finalChatCompletion()).choices[0];
assert.equal(called.finish_reason, "tool_calls");
assert.equal(called.message.tool_calls[0].function.name, "look");
JSON.parse(called.message.tool_calls[0].function.arguments);

const completion = await client.completions.create({ model, prompt: [70, 71, 72], max_tokens: 4 });
assert.equal(completion.choices.length, 1);

// Responses, whole and as events.
const asked = { model, input: "Hello", max_output_tokens: 8, temperature: 0 };
const response = await client.responses.create(asked);
const kinds = [];
let streamed = "";
for await (const event of await client.responses.create({ ...asked, stream: true })) {
  kinds.push(event.type);
  if (event.type === "response.output_text.delta") streamed += event.delta;
}
assert.equal(kinds[0], "response.created");
assert.ok(["response.completed", "response.incomplete"].includes(kinds.at(-1)));
assert.equal(streamed, response.output_text);

await assert.rejects(
  client.chat.completions.create({ model, messages, mood: 1 }),
  (error) => error.status === 400 && error.param === "mood",
);
