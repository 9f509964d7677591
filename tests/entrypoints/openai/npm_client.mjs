// Drives a server with the openai npm package: node npm_client.mjs BASE_URL KEY. Prints one JSON object.
import OpenAI from "openai";

const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "Hi" }];
const found = {};

found.models = (await client.models.list()).data.map((model) => model.id);
const completion = await client.completions.create({ model: "fake", prompt: "Say", max_tokens: 9, temperature: 0, logprobs: 1 });
found.completion = completion.choices[0];
const chat = await client.chat.completions.create({ model: "fake", messages, max_tokens: 3, temperature: 0, logprobs: true, top_logprobs: 1 });
found.chat = chat.choices[0];
found.usage = chat.usage;

const stream = await client.chat.completions.create({
  model: "fake", messages, max_tokens: 20, temperature: 1, seed: 2, n: 2, stream: true, stream_options: { include_usage: true },
});
found.texts = ["", ""];
for await (const chunk of stream) {
  for (const choice of chunk.choices) found.texts[choice.index] += choice.delta.content ?? "";
  if (chunk.usage) found.streamed = chunk.usage.completion_tokens;
}

const closed = await client.completions.create({ model: "fake", prompt: "a", max_tokens: 3900, stream: true });
for await (const chunk of closed) break; // leaving the loop closes the connection

async function errorOf(work) {
  try {
    await work();
  } catch (error) {
    return [error.constructor.name, error.status, error.code];
  }
}
const complete = (fields, other = client) => () => other.completions.create({ model: "fake", prompt: "a", ...fields });
found.errors = [
  await errorOf(complete({ temperature: -1 })),
  await errorOf(complete({}, new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 }))),
  await errorOf(complete({ model: "gpt-5" })),
];
console.log(JSON.stringify(found));
