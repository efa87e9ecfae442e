// The openai package for Node.
import assert from "node:assert";
import OpenAI from "openai";

const { HALFMOON_URL: url, HALFMOON_KEY: apiKey, HALFMOON_MODEL: model } = process.env;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });

const models = await client.models.list();
assert.equal(models.data[0].id, model);

const messages = [{ role: "user", content: "Hello" }];
const whole = await client.chat.completions.create({
  model, messages, max_completion_tokens: 8, temperature: 0,
});
let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  model, messages, max_completion_tokens: 8, temperature: 0,
  stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);

const completion = await client.completions.create({ model, prompt: [10, 11, 12], max_tokens: 4 });
assert.equal(completion.choices.length, 1);

const response = await client.responses.create({ model, input: "Hello", max_output_tokens: 8 });
assert.equal(typeof response.output_text, "string");
const kinds = [];
for await (const event of await client.responses.create({
  model, input: "Hello", max_output_tokens: 8, stream: true,
})) kinds.push(event.type);
assert.equal(kinds[0], "response.created");

await assert.rejects(
  client.chat.completions.create({ model, messages, mood: 1 }),
  (error) => error.status === 400 && error.param === "mood",
);
