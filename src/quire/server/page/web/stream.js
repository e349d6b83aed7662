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
function cost({began, first, last, tokens, firstTokens, ended}) {
  const parts = [], seconds = (last - first) / 1000;
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
      clock.tokens = event.usage?.completion_tokens ?? clock.tokens;
      const choice = event.choices[0];
      if (!choice) continue;
      const delta = choice.delta ?? {content: choice.text};
      clock.ended = choice.finish_reason ?? clock.ended;
      if (!add(turn, delta, clock)) continue;
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

// Whether the piece had anything.
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
