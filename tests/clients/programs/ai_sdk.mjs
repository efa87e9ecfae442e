// The AI SDK, by its provider for servers like this one and by OpenAI's (chats and responses).
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { HALFMOON_URL: url, HALFMOON_KEY: apiKey, HALFMOON_MODEL: name } = process.env;
const baseURL = `${url}/v1`;
const compatible = createOpenAICompatible({
  name: "halfmoon", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL, apiKey });
const models = { compatible: compatible(name), chat: openai.chat(name), responses: openai(name) };

const Moon = z.object({ phase: z.enum(["half", "full"]), lit: z.boolean() });
const ONE_CALL = {
  openai: { parallelToolCalls: false }, halfmoon: { parallel_tool_calls: false },
};
const texts = {};
for (const [kind, model] of Object.entries(models)) {
  const common = { model, maxRetries: 0, temperature: 0, system: "Be brief" };
  const hello = { ...common, prompt: "Hello" };

  // Text, whole and streamed, and what it took.
  const whole = await generateText({ ...hello, maxOutputTokens: 16 });
  assert.deepEqual(whole.warnings, []);
  assert.equal(whole.response.modelId, name);
  texts[kind] = whole.text;
  const stream = streamText({ ...hello, maxOutputTokens: 16 });
  let text = "";
  for await (const delta of stream.textStream) text += delta;
  assert.equal(text, whole.text);
  assert.equal(await stream.finishReason, whole.finishReason);
  const usage = await stream.usage;
  assert.ok(usage.outputTokens >= 1);
  assert.equal(usage.outputTokens, whole.usage.outputTokens);
  assert.equal(usage.inputTokens, whole.usage.inputTokens);
  assert.equal(usage.totalTokens, usage.inputTokens + usage.outputTokens);

  // A conversation goes on; over responses it names the earlier items rather than send them,
  // unless it is told not to.
  const turns = [
    { role: "user", content: "Hello" },
    ...whole.response.messages,
    { role: "user", content: [{ type: "text", text: "And " }, { type: "text", text: "then?" }] },
  ];
  const going = { ...common, messages: turns, maxOutputTokens: 8 };
  const next = await generateText(going);
  assert.ok(next.usage.inputTokens > whole.usage.inputTokens);
  const sent = await generateText({ ...going, providerOptions: { openai: { store: false } } });
  assert.equal(sent.text, next.text);
  assert.equal(sent.usage.inputTokens, next.usage.inputTokens);

  // An object of a schema, whole and as it grows.
  const shaped = { ...hello, maxOutputTokens: 300, output: Output.object({ schema: Moon }) };
  const { output } = await generateText(shaped);
  Moon.parse(output);
  const growing = streamText(shaped);
  let parts = 0;
  for await (const part of growing.partialOutputStream) parts += typeof part === "object";
  assert.ok(parts >= 1);
  assert.deepEqual(await growing.output, output);

  // A tool that must be called, then an answer that goes on with what it gave.
  const seen = [];
  const look = tool({
    description: "Look at the moon", inputSchema: Moon, strict: true,
    execute: async (input) => { seen.push(Moon.parse(input)); return { there: true }; },
  });
  const calling = {
    ...hello, maxOutputTokens: 300, tools: { look }, providerOptions: ONE_CALL,
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    stopWhen: stepCountIs(2),
  };
  const called = await generateText(calling);
  assert.equal(called.steps.length, 2);
  assert.equal(called.steps[0].finishReason, "tool-calls");
  assert.equal(called.steps[0].toolResults[0].output.there, true);
  const flow = streamText(calling);
  const kinds = [];
  for await (const part of flow.fullStream) {
    assert.notEqual(part.type, "error", String(part.error));
    kinds.push(part.type);
  }
  for (const each of ["tool-input-start", "tool-call", "tool-result", "finish"]) {
    assert.ok(kinds.includes(each), each);
  }
  assert.equal(await flow.text, called.text);
  assert.equal(seen.length, 2);
  assert.deepEqual(seen[0], seen[1]);

  // A reader that leaves.
  const leaving = new AbortController();
  const left = streamText({ ...hello, maxOutputTokens: 300, abortSignal: leaving.signal });
  const ends = [];
  for await (const part of left.fullStream) {
    ends.push(part.type);
    if (part.type === "text-delta") leaving.abort();
  }
  assert.equal(ends.at(-1), "abort");
}
assert.equal(texts.chat, texts.compatible);
assert.equal(texts.responses, texts.compatible);

// Errors.
const refused = (model, status, says) => assert.rejects(
  generateText({ model, prompt: "Hello", maxRetries: 0 }),
  (error) => APICallError.isInstance(error) && error.statusCode === status
    && says.test(error.message) && error.isRetryable === false,
);
for (const model of [compatible("other"), openai.chat("other"), openai("other")]) {
  await refused(model, 404, /other/);
}
await refused(createOpenAICompatible({ name: "halfmoon", baseURL, apiKey: "wrong" })(name), 401, /key/);
await refused(createOpenAI({ baseURL, apiKey: "wrong" })(name), 401, /key/);
const errors = [];
const failing = streamText({
  model: compatible("other"), prompt: "Hello", maxRetries: 0,
  onError: ({ error }) => errors.push(error),
});
for await (const part of failing.fullStream) assert.notEqual(part.type, "text-delta");
assert.equal(errors[0].statusCode, 404);
