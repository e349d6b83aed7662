// The drawer of options: every sampling parameter, the system message, tools. An empty field is not sent.

import {$, make, on, tab} from "./dom.js";
import {refreshDefaults, taken} from "./defaults.js";

const TEXT_TOKENS = 256;  // a text continues without an end of its own; a chat's answer has one

// kind: number, lines (a text each), json, select (its choices), area. speech: true: of models that write sound down only; "too":
// of these and of others.
const FIELDS = [
  {name: "task", label: "Write down", kind: "select", choices: [["transcriptions", "in the language of the speaker"], ["translations", "in English"]], wide: true, speech: true},
  {name: "language", label: "Language of the speaker", kind: "text", otherwise: "detected", about: "a code, such as de", speech: true},
  {name: "times", label: "Times", kind: "select", choices: [["", "none"], ["on", "of each sentence"]], speech: true},
  {name: "prompt", label: "Names and words that the sound may have", kind: "area", wide: true, speech: true},
  {name: "mode", label: "Mode", kind: "select", choices: [["chat", "chat"], ["text", "continue the text"]], wide: true},
  {name: "system", label: "System message", kind: "area", wide: true},
  {name: "thinking", label: "Thinking", kind: "select", choices: [["", "as the model does"], ["on", "on"], ["off", "off"]]},
  {name: "temperature", label: "Temperature", about: "0: always the likeliest token", speech: "too"},
  {name: "max_tokens", label: "Maximum tokens"},
  {name: "top_p", label: "Top-p", about: "1: off"},
  {name: "top_k", label: "Top-k", about: "0: off"},
  {name: "min_p", label: "Min-p", about: "0: off"},
  {name: "seed", label: "Seed", otherwise: "random", speech: "too"},
  {name: "presence_penalty", label: "Presence penalty"},
  {name: "frequency_penalty", label: "Frequency penalty"},
  {name: "repetition_penalty", label: "Repetition penalty", about: "1: off"},
  {name: "min_tokens", label: "Minimum tokens"},
  {name: "thinking_token_budget", label: "Tokens of thought, at most", otherwise: "no limit"},
  {name: "stop", label: "Stop texts, one on each line", kind: "lines", wide: true},
  {name: "bad_words", label: "Words that never appear, one on each line", kind: "lines", wide: true},
  {name: "logit_bias", label: "Logit bias (JSON: token id to bias)", kind: "json", wide: true, otherwise: '{"50": -10}'},
  {name: "schema", label: "JSON schema of the answer", kind: "json", wide: true, otherwise: '{"type": "object"}'},
  {name: "tools", label: "Tools (JSON list, as in the API)", kind: "json", wide: true, otherwise: '[{"type": "function", "function": {"name": ...}}]'},
];
const UNCHANGED = {mode: "chat", task: "transcriptions"};
const isShown = ({speech}) => speech === "too" || Boolean(speech) === taken().speech;
const element = name => $("option-" + name);
export const value = name => element(name).value.trim();

export function set(name, text) {
  element(name).value = text;
  keep();
}

function build({name, label, kind = "number", choices, about, otherwise = "", wide}) {
  const field = make("label", wide ? "wide" : "", label);
  const input = make(kind === "select" ? "select" : kind === "number" || kind === "text" ? "input" : "textarea");
  input.id = "option-" + name;
  input.autocomplete = "off";
  if (kind === "select") input.append(...choices.map(([value, words]) => new Option(words, value)));
  else input.placeholder = otherwise;
  if (kind === "number") input.inputMode = "decimal";
  if (input.tagName === "TEXTAREA") input.rows = name === "system" ? 3 : 2;
  input.onchange = keep;
  field.append(input);
  if (about) field.append(make("small", "", about));
  $("fields").append(field);
}

function keep() {
  tab.set("options", JSON.stringify(Object.fromEntries(FIELDS.map(({name}) => [name, element(name).value]))));
  const changed = FIELDS.filter(field => isShown(field) && value(field.name) && value(field.name) !== UNCHANGED[field.name]).length;
  $("options-set").textContent = changed ? ` (${changed})` : "";
  $("option-max_tokens").placeholder = value("mode") === "text" ? String(TEXT_TOKENS) : "until it ends";
}

function showDefaults({sampling}) {
  for (const field of FIELDS) element(field.name).parentElement.hidden = !isShown(field);
  keep();
  for (const [name, given] of Object.entries(sampling)) if (given !== null && name !== "max_tokens") element(name).placeholder = String(given);
  if (sampling.max_tokens) element("max_tokens").placeholder = `at most ${sampling.max_tokens}`;
}

// What is no number is sent as it is: the server's error names the field.
const number = text => Number.isFinite(Number(text)) ? Number(text) : text;

function parsed(name, label) {
  try { return JSON.parse(value(name)); } catch (error) { throw new Error(`${label} in the options: ${error.message}`); }
}

// The fields of a request's body. Raises an Error that names the option that is not JSON.
export function requestFields(mode) {
  const body = mode === "text" ? {max_tokens: TEXT_TOKENS} : {};
  for (const {name, label, kind = "number", speech} of FIELDS) {
    if (speech === true || !value(name) || kind === "select" || kind === "area") continue;
    if (kind === "number") body[name] = number(value(name));
    else if (kind === "lines") body[name] = element(name).value.split("\n").filter(line => line);
    else if (name === "schema") body.response_format = {type: "json_schema", json_schema: {name: "answer", schema: parsed(name, label)}};
    else if (name !== "tools" || mode === "chat") body[name] = parsed(name, label);
  }
  if (mode === "chat" && value("thinking")) body.chat_template_kwargs = {enable_thinking: value("thinking") === "on"};
  return body;
}

// The fields of a form that asks for a transcription.
export function speechFields() {
  const names = ["language", "prompt", "temperature", "seed"].filter(value);
  return {...Object.fromEntries(names.map(name => [name, value(name)])), response_format: value("times") ? "verbose_json" : "json"};
}

export function startOptions() {
  FIELDS.forEach(build);
  try {
    for (const [name, given] of Object.entries(JSON.parse(tab.get("options") || "{}"))) if (element(name)) element(name).value = given;
  } catch { /* not ours */ }
  $("options-open").onclick = () => { $("options").showModal(); refreshDefaults().catch(() => {}); };
  $("options-close").onclick = () => $("options").close();
  $("options-reset").onclick = () => {
    for (const {name, kind} of FIELDS) element(name).value = kind === "select" ? element(name).options[0].value : "";
    keep();
  };
  on("defaults", showDefaults);
  addEventListener("pagehide", keep);
  keep();
}
