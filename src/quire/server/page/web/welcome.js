// What an empty conversation shows: examples to press, and how a program reaches the server.

import {$, addButton, copy, emit, on} from "./dom.js";
import {taken} from "./defaults.js";
import {shownModel} from "./readiness.js";
import {hasKey} from "./server.js";

const WEATHER = [{type: "function", function: {name: "get_weather", description: "Weather of a city", parameters: {
  type: "object", properties: {city: {type: "string"}}, required: ["city"]}}}];
const STORY = {label: "A short story", ask: "Tell me a story about a fox."};
const SUM = {label: "A sum, with its thoughts", ask: "What is 17 plus 25?"};
const CALL = {label: "A tool call", ask: "What is the weather in Oslo?", tools: WEATHER, result: '{"sky": "rainy", "degrees": 7}'};
const CODE = {label: "A function in Python", ask: "Write a Python function that returns the first n prime numbers, with an example."};

// The embedded model knows stories, sums and tools, and no code.
const examples = model => [STORY, SUM, model.startsWith("quire-tiny") ? CALL : CODE];

const SPEECH = [
  {label: "Speak", ask: "Record the microphone. The text comes when you stop.", press: "record"},
  {label: "A sound file", ask: "Choose, drop or paste WAV, FLAC, MP3 and others.", press: "attach"},
];

const baseUrl = () => new URL("v1", location.href).href;

function exampleRequest() {
  const header = hasKey() ? " \\\n  -H 'Authorization: Bearer YOUR_KEY'" : "";
  if (taken().speech) return `curl ${baseUrl()}/audio/transcriptions${header} \\\n  -F file=@speech.wav`;
  const body = JSON.stringify({model: shownModel(), messages: [{role: "user", content: "Tell me a story about a fox."}]});
  return `curl ${baseUrl()}/chat/completions \\\n  -H 'Content-Type: application/json'${header} \\\n  -d '${body.replaceAll("'", "'\\''")}'`;
}

function refresh() {
  $("base-url").textContent = baseUrl();
  $("curl").textContent = exampleRequest();
  $("examples").replaceChildren();
  for (const example of taken().speech ? SPEECH : examples(shownModel())) {
    const button = addButton($("examples"), "", () => example.press ? $(example.press).click() : emit("ask", example), "example");
    const label = document.createElement("b");
    label.textContent = example.label;
    button.append(label, example.ask);
  }
}

export function startWelcome() {
  $("copy-base").onclick = event => copy(baseUrl(), event.target);
  $("copy-curl").onclick = event => copy(exampleRequest(), event.target);
  on("models", refresh);
  on("defaults", refresh);
}
