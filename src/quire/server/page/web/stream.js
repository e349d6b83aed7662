// One answer of the server, as it streams.

import {ask, Refused} from "./server.js";

// The data of each server-sent event, parsed.
async function* events(answer, signal) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return;
      left += value;
      const whole = left.split("\n\n");
      left = whole.pop();
      for (const event of whole) {
        if (!event.startsWith("data: ")) continue;  // a keep-alive comment
        if (event === "data: [DONE]") return;
        yield JSON.parse(event.slice(6));
      }
    }
  } finally {
    if (!signal.aborted) reader.cancel().catch(() => {});
  }
}

const LEAST_S = 0.03;

// What an answer has cost. A rate needs some time between the first and the last token.
function cost({began, first, last, tokens, firstTokens, ended, heard}) {
  const parts = [], seconds = (last - first) / 1000;
  if (heard) parts.push(`${heard} s of sound in ${((last - began) / 1000).toFixed(1)} s`);
  if (tokens) {
    parts.push(tokens === 1 ? "1 token" : `${tokens} tokens`);
    if (seconds >= LEAST_S) parts.push(`${((tokens - firstTokens) / seconds).toFixed(1)} per second`);
    if (first) parts.push(`first after ${Math.round(first - began)} ms`);
  }
  if (ended === "length") parts.push("ended at the maximum number of tokens");
  return parts.join(" · ");
}

// Add pieces of tool calls; a call's pieces have the same index, and the first one has the name.
function addCalls(calls, pieces) {
  for (const {index, id = "", function: {name = "", arguments: given = ""}} of pieces) {
    let call = calls.findLast(one => one.index === index);
    if (!call) calls.push(call = {index, id, name: "", arguments: ""});
    call.name += name ?? "";
    call.arguments += given ?? "";
  }
}

// Ask, and add what comes to the turn's answer, thoughts and calls; `changed(first)` after each piece. Sets the turn's note.
export async function stream(turn, path, body, signal, changed) {
  const clock = {began: performance.now(), first: 0, last: 0, tokens: 0, firstTokens: 1, ended: null};
  try {
    const answer = await ask(path, {body, signal});
    for await (const event of events(answer, signal)) {
      if (event.error) throw new Refused(0, event.error.message);
      if (!(event.type ? addSpeech : addChoice)(turn, event, clock)) continue;
      turn.note = cost(clock);
      changed(!clock.before);
      clock.before = true;
    }
    turn.note = cost(clock);
  } catch (error) {
    turn.bad = error.name !== "AbortError";
    turn.note = turn.bad ? error.message : ["stopped", cost(clock)].filter(Boolean).join(" · ");
  }
}

// Of a transcription: text as it is drawn; with times, the lines of a window take its place when they are known.
function addSpeech(turn, {type, delta = "", start, end, text, usage}, clock) {
  clock.last = performance.now();
  clock.first ||= clock.last;
  clock.heard = usage?.seconds ?? clock.heard;
  if (type === "transcript.text.segment") {
    clock.lines = `${clock.lines ?? ""}${time(start)} – ${time(end)}  ${text.trim()}\n`;
    turn.answer = clock.lines;
  } else turn.answer += clock.lines && turn.answer === clock.lines ? delta.trimStart() : delta;
  return true;
}

const time = seconds => `${Math.floor(seconds / 60)}:${(seconds % 60).toFixed(1).padStart(4, "0")}`;

// Of a chat or a text. Whether the event had anything.
function addChoice(turn, {choices: [choice], usage}, clock) {
  clock.tokens = usage?.completion_tokens ?? clock.tokens;
  if (!choice) return false;
  clock.ended = choice.finish_reason ?? clock.ended;
  return add(turn, choice.delta ?? {content: choice.text}, clock);
}

function add(turn, {content, reasoning, tool_calls: calls}, clock) {
  if (!content && !reasoning && !calls?.length) return false;
  clock.last = performance.now();
  if (!clock.first) {
    clock.first = clock.last;
    clock.firstTokens = clock.tokens || 1;
  }
  if (content || calls?.length) clock.thought ??= turn.thoughts ? clock.last - clock.first : 0;
  turn.answer += content ?? "";
  turn.thoughts += reasoning ?? "";
  addCalls(turn.calls, calls ?? []);
  if (turn.thoughts) turn.thoughtMs = clock.thought ?? clock.last - clock.first;
  return true;
}
