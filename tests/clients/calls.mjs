// The quick starts of Vercel's SDK, as in calls.py: node calls.mjs URL
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { readFileSync } from "node:fs";
import { z } from "zod";

const [, , url, picture] = process.argv;
const v1 = `${url}/v1`, name = "gpt-4o-mini", hello = "Hello. Who are you?";
const sentences = Array.from({ length: 90 }, (_, i) => `vercel says in sentence ${i} that the answer is ${i * 7}.`);
const manual = sentences.join(" "), before = "Read this first, please. It is short.", after = "What is the answer?";
const chat = createOpenAICompatible({ name: "mpic", baseURL: v1, apiKey: "-", supportsStructuredOutputs: true })(name);
const responses = createOpenAI({ baseURL: v1, apiKey: "-" }).responses(name);
const common = { maxRetries: 0, maxOutputTokens: 60 };
const weather = tool({ description: "Weather.", inputSchema: z.object({ city: z.enum(["Cologne", "Porto"]) }), execute: async () => "rain" });
const person = z.object({ kind: z.enum(["child", "adult"]), colour: z.enum(["red", "green"]) });
const image = { type: "image", image: readFileSync(picture) };
const calls = [];
for (const [short, model] of [["chat", chat], ["responses", responses]]) {
  calls.push([short, () => generateText({ ...common, model, system: "Be brief.", prompt: hello, frequencyPenalty: 0.5 })]);
  calls.push([`${short} stream`, async () => {
    let failed;
    for await (const _ of streamText({ ...common, model, prompt: hello, onError: ({ error }) => { failed = error; } }).textStream);
    if (failed) throw failed;
  }]);
  calls.push([`${short} tools`, () => generateText({ ...common, model, prompt: "Rain?", tools: { weather }, toolChoice: "required", maxOutputTokens: 200, stopWhen: stepCountIs(2) })]);
  calls.push([`${short} object`, () => generateObject({ ...common, model, schema: person, prompt: "Who?", maxOutputTokens: 300 })]);
  calls.push([`${short} image`, () => generateText({ ...common, model, messages: [{ role: "user", content: [{ type: "text", text: "?" }, image] }] })]);
}
calls.push(["manual", () => generateText({ ...common, model: chat, system: manual, prompt: after })]);
calls.push(["moved", () => generateText({ ...common, model: chat, system: before, messages: [{ role: "user", content: [{ type: "text", text: after }, { type: "text", text: manual }] }] })]);

const tokens = async () => {
  const headers = { "Content-Type": "application/json" }, body = JSON.stringify({ prompt: manual });
  return (await (await fetch(`${url}/tokenize`, { method: "POST", headers, body })).json()).count;
};
const saved = async () => (await (await fetch(`${v1}/savings`)).json()).total.saved_tokens;
for (const [call, run] of calls) {
  const earlier = await saved();
  const line = { call, status: 200, error: null, reused: null };
  try {
    await run();
  } catch (error) {
    Object.assign(line, { status: error.statusCode ?? null, error: `${error.name}: ${error.message}`.slice(0, 500) });
  }
  if (call === "moved") line.reused = ((await saved()) - earlier) / (await tokens());
  console.log(JSON.stringify(line));
}
