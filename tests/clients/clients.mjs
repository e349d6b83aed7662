// The clients of Node, against the server at argv[2]; argv[3] is the answer that each must get.
import OpenAI from "openai";
import Anthropic from "@anthropic-ai/sdk";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText, tool, jsonSchema } from "ai";
import assert from "node:assert";

const [url, story, prompt, tokens] = process.argv.slice(2);
const messages = [{ role: "user", content: prompt }];
const how = { model: "quire-tiny", messages, temperature: 0, max_tokens: Number(tokens) };

const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "x" });
assert.equal((await openai.chat.completions.create(how)).choices[0].message.content, story);
let text = "";
for await (const chunk of await openai.chat.completions.create({ ...how, stream: true })) text += chunk.choices[0]?.delta?.content ?? "";
assert.equal(text, story);
console.log("openai");

const anthropic = new Anthropic({ baseURL: url, apiKey: "x" });
assert.equal((await anthropic.messages.create(how)).content[0].text, story);
console.log("anthropic");

const model = createOpenAICompatible({ name: "quire", baseURL: `${url}/v1`, apiKey: "x" })("quire-tiny");
const asked = { model, prompt, temperature: 0, maxOutputTokens: Number(tokens) };
assert.equal((await generateText(asked)).text, story);
text = "";
for await (const part of streamText(asked).textStream) text += part;
assert.equal(text, story);
const city = { type: "object", properties: { city: { enum: ["Rome", "Oslo"] } }, required: ["city"], additionalProperties: false };
const { toolCalls } = await generateText({ model, prompt, toolChoice: "required", tools: { weather: tool({ inputSchema: jsonSchema(city) }) } });
assert.ok(["Rome", "Oslo"].includes(toolCalls[0].input.city));
console.log("ai");
