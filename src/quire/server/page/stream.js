// One answer of the server, as it streams.

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

// What a finished answer cost. A rate needs some time between the first and the last token.
function cost({began, first, last, usage, ended}) {
  const parts = [], seconds = (last - first) / 1000;
  if (usage) {
    parts.push(`${usage.completion_tokens} tokens`);
    if (seconds >= 0.1) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} per second`);
    if (first) parts.push(`first after ${Math.round(first - began)} ms`);
  }
  if (ended === "length") parts.push("ended at the maximum number of tokens");
  return parts.join(" · ");
}

// Add pieces of tool calls; a call's pieces have the same index, and the first one has the name.
function addCalls(calls, pieces) {
  for (const {index, function: {name = "", arguments: given = ""}} of pieces) {
    let call = calls.findLast(one => one.index === index);
    if (!call) calls.push(call = {index, name: "", arguments: ""});
    call.name += name ?? "";
    call.arguments += given ?? "";
  }
}

// Ask, and add what comes to the turn's answer, thoughts and calls; `changed(first)` after each piece. Sets the turn's note.
async function stream(turn, path, body, signal, changed) {
  const clock = {began: performance.now(), first: 0, last: 0, usage: null, ended: null};
  try {
    const answer = await ask(path, {body, signal});
    for await (const event of events(answer, signal)) {
      if (event.error) throw new Refused(0, event.error.message);
      clock.usage = event.usage ?? clock.usage;
      const choice = event.choices[0];
      if (!choice) continue;
      const more = (choice.delta ? choice.delta.content : choice.text) ?? "", aside = choice.delta?.reasoning ?? "";
      const calls = choice.delta?.tool_calls ?? [];
      clock.ended = choice.finish_reason ?? clock.ended;
      if (!more && !aside && !calls.length) continue;
      turn.answer += more;
      turn.thoughts += aside;
      addCalls(turn.calls, calls);
      clock.last = performance.now();
      changed(!clock.first);
      clock.first ||= clock.last;
    }
    turn.note = cost(clock);
  } catch (error) {
    turn.bad = error.name !== "AbortError";
    turn.note = turn.bad ? error.message : "stopped";
  }
}
