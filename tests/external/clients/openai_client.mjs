// Asks a server through node's openai package, streams and all, and prints what it got as JSON.
// Run by tests/external/test_openai_node.py: node openai_client.mjs BASE_URL

import { pathToFileURL } from "node:url";

const { default: OpenAI } = await import(pathToFileURL(process.env.OPENAI_MODULE));
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const model = "gull";
const messages = [{ role: "user", content: "Name a bird. 🐦" }];
const tool = {
  type: "function",
  function: {
    name: "look",
    parameters: {
      type: "object",
      properties: { bird: { enum: ["gull", "tern"] } },
      required: ["bird"],
      additionalProperties: false,
    },
  },
};
const seen = {};

seen.models = (await client.models.list()).data.map((card) => card.id);

const asked = { model, messages, max_tokens: 24, temperature: 0 };
const whole = await client.chat.completions.create(asked);
seen.whole = whole.choices[0].message.content;
seen.usage = whole.usage;

let text = "";
let role = null;
let usage = null;
let reasons = [];
const stream = await client.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  usage = chunk.usage ?? usage;
  for (const choice of chunk.choices) {
    role = choice.delta.role ?? role;
    text += choice.delta.content ?? "";
    if (choice.finish_reason) reasons.push(choice.finish_reason);
  }
}
seen.streamed = { text, role, usage, reasons };

let completion = "";
const completions = await client.completions.create({
  model, prompt: "The gull", max_tokens: 16, temperature: 0, stream: true,
});
for await (const chunk of completions) completion += chunk.choices[0].text;
const plain = await client.completions.create({ model, prompt: "The gull", max_tokens: 16, temperature: 0 });
seen.completion = { streamed: completion, whole: plain.choices[0].text };

const runner = client.chat.completions.stream({
  model, messages, tools: [tool], tool_choice: { type: "function", function: { name: "look" } }, max_tokens: 64,
});
seen.call = (await runner.finalChatCompletion()).choices[0].message.tool_calls[0].function;

const left = await client.chat.completions.create({ ...asked, max_tokens: 400, stream: true });
for await (const _ of left) break; // hangs up

try {
  await client.chat.completions.create({ ...asked, temperature: -1 });
} catch (error) {
  seen.error = { status: error.status, type: error.type, param: error.param, kind: error.constructor.name };
}
console.log(JSON.stringify(seen));
