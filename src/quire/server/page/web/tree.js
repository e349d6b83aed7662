// A conversation as a tree of turns. A turn is a message and its answer; an edit or another answer is a sibling.
//
//   conversation  {id, title, changed, turns, leaf}   leaf: number of the last turn that is shown; -1: none
//   turn          {parent, mode, model, ask, media, results, answer, thoughts, thoughtMs, calls, note, bad}
//                 parent: number of the turn before it; -1: it begins the conversation
//                 mode: chat, text (a text to continue), or speech (sound to write down)
//   media         a list of {kind, name, blob}, see media.js

import {blobOf, dataUrl, mediaPart, NAMES} from "./media.js";

export const LIMITS = {turns: 10000, text: 2000000, title: 200, conversations: 10000};

export function newConversation() {
  return {id: crypto.randomUUID?.() ?? String(Date.now() + Math.random()), title: "", changed: Date.now(), turns: [], leaf: -1};
}

export function newTurn(given) {
  return {parent: -1, mode: "chat", model: "", ask: "", media: [], results: [], answer: "", thoughts: "", thoughtMs: 0, calls: [], note: "", bad: false, ...given};
}

// Numbers of the turns that are shown, oldest first.
export function path({turns, leaf}) {
  const numbers = [];
  for (let at = leaf; at >= 0; at = turns[at].parent) numbers.unshift(at);
  return numbers;
}

const question = ({mode, ask, results, media}) => JSON.stringify([mode, ask, results, media.map(({name, blob}) => [name, blob.size])]);

// The branches at a turn: other messages in its place, and other answers to its message. The numbers of turns.
export function branches({turns}, at) {
  const siblings = turns.flatMap((turn, number) => turn.parent === turns[at].parent ? [number] : []);
  const answers = siblings.filter(number => question(turns[number]) === question(turns[at]));
  const messages = new Map();
  for (const number of siblings) messages.set(question(turns[number]), number);
  messages.set(question(turns[at]), at);
  return {answers, messages: [...messages.values()]};
}

// Show the branch of a turn, to its newest end.
export function show(conversation, at) {
  conversation.leaf = at;
  for (;;) {
    const next = conversation.turns.findLastIndex(turn => turn.parent === conversation.leaf);
    if (next < 0) return;
    conversation.leaf = next;
  }
}

// The messages of a request whose last turn has no answer yet. Only turns of the chat that have an answer are sent, and
// tool calls whose results are known.
export async function messages(turns, system) {
  const sent = system ? [{role: "system", content: system}] : [];
  for (const [at, turn] of turns.entries()) {
    if (turn.mode !== "chat") continue;
    const last = at === turns.length - 1, calls = turns[at + 1]?.results.length ? turn.calls : [];
    for (const {id, content} of turn.results) sent.push({role: "tool", tool_call_id: id, content});
    if (!turn.results.length && (last || turn.answer || calls.length)) sent.push({role: "user", content: await content(turn)});
    if (last || (!turn.answer && !calls.length)) continue;
    const answer = {role: "assistant", content: turn.answer};
    if (calls.length) answer.tool_calls = calls.map((call, n) => ({id: callId(call, n), type: "function", function: {name: call.name, arguments: call.arguments}}));
    sent.push(answer);
  }
  return sent;
}

async function content({ask, media}) {
  if (!media.length) return ask;
  const parts = await Promise.all(media.map(mediaPart));
  return ask ? [...parts, {type: "text", text: ask}] : parts;
}

export const callId = (call, n) => call.id || `call_${n}`;

// A conversation of a file or of the browser's store, checked field by field. Raises an Error that names the field.
export function checked(given) {
  const text = (value, name, most = LIMITS.text) => {
    if (typeof value !== "string" || value.length > most) throw new Error(`${name} must be a text of at most ${most} characters`);
    return value;
  };
  const list = (value, name, most) => {
    if (!Array.isArray(value) || value.length > most) throw new Error(`${name} must be a list of at most ${most} entries`);
    return value;
  };
  const media = ({kind, name, blob}) => {
    if (!Object.hasOwn(NAMES, kind)) throw new Error("media.kind must be image, video or audio");
    return {kind, name: text(name, "media.name", 200), blob: blob instanceof Blob ? blob : blobOf(text(blob, "media.blob", Infinity))};
  };
  const turns = list(given?.turns, "turns", LIMITS.turns).map((turn, at) => {
    if (!Number.isInteger(turn?.parent) || turn.parent < -1 || turn.parent >= at) throw new Error(`turns[${at}].parent must be the number of an earlier turn, or -1`);
    return newTurn({
      parent: turn.parent, mode: ["text", "speech"].includes(turn.mode) ? turn.mode : "chat", bad: turn.bad === true, thoughtMs: Number(turn.thoughtMs) || 0,
      model: text(turn.model ?? "", "model", 1000), ask: text(turn.ask, "ask"), answer: text(turn.answer ?? "", "answer"),
      thoughts: text(turn.thoughts ?? "", "thoughts"), note: text(turn.note ?? "", "note"),
      media: list(turn.media ?? [], "media", 100).map(media),
      calls: list(turn.calls ?? [], "calls", 1000).map(call => ({index: Number(call.index) || 0, id: text(call.id ?? "", "calls.id"), name: text(call.name, "calls.name"), arguments: text(call.arguments, "calls.arguments")})),
      results: list(turn.results ?? [], "results", 1000).map(result => ({id: text(result.id, "results.id"), name: text(result.name ?? "", "results.name"), content: text(result.content, "results.content")})),
    });
  });
  const {leaf} = given;
  if (!Number.isInteger(leaf) || leaf < -1 || leaf >= turns.length) throw new Error("leaf must be the number of a turn, or -1");
  return {...newConversation(), title: text(given.title ?? "", "title", LIMITS.title), changed: Number(given.changed) || Date.now(), turns, leaf};
}

// A copy of a conversation that can be written as JSON.
export async function plainCopy(conversation) {
  const plain = async one => ({...one, blob: await dataUrl(one.blob)});
  const turns = await Promise.all(conversation.turns.map(async turn => ({...turn, media: await Promise.all((turn.media ?? []).map(plain))})));
  return {...conversation, turns};
}
