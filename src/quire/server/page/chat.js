// The chat box: sends messages, and shows the answer as it streams.

let messages = [];
let running = null;  // an AbortController while an answer streams

// Text with ``` fences as paragraphs and code boxes.
function show(box, text) {
  const parts = text.split(/^```[^\n]*\n?/m);
  const nodes = parts.map((part, at) => {
    if (at % 2 === 0) return document.createTextNode(part);
    const pre = document.createElement("pre");
    pre.textContent = part.replace(/\n$/, "");
    return pre;
  });
  box.replaceChildren(...nodes);
}

function say(who, text) {
  $("hint")?.remove();
  const said = make("div", "said " + who);
  said.append(make("span", "hidden", who === "user" ? "You: " : "Answer: "));
  const box = make("div", "text"), note = make("div", "note"), thoughts = make("details", "thoughts");
  thoughts.append(make("summary", "", "Thoughts"), make("div"));
  thoughts.hidden = true;
  show(box, text);
  if (who === "assistant") said.append(thoughts);
  said.append(box, note);
  $("talk").append(said);
  $("talk").scrollTop = $("talk").scrollHeight;
  return {said, box, note, thoughts};
}

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

function asking(words) {
  const body = {stream: true, stream_options: {include_usage: true}};
  if ($("temperature").value) body.temperature = Number($("temperature").value);
  if ($("most").value) body.max_tokens = Number($("most").value);
  if ($("mode").value === "text") return ["v1/completions", {...body, prompt: words}];
  const system = $("system").value.trim();
  const whole = system ? [{role: "system", content: system}, ...messages] : messages;
  return ["v1/chat/completions", {...body, messages: whole}];
}

function cost(began, first, usage, ended) {
  const parts = [];
  if (usage) {
    const seconds = (performance.now() - first) / 1000;
    parts.push(`${usage.completion_tokens} tokens`);
    if (usage.completion_tokens > 1 && seconds > 0) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} per second`);
    parts.push(`first after ${Math.round(first - began)} ms`);
  }
  if (ended === "length") parts.push("cut at the most tokens");
  return parts.join(" · ");
}

async function answerTo(words) {
  const [path, body] = asking(words);
  const {said, box, note, thoughts} = say("assistant", "");
  const began = performance.now();
  let text = "", thought = "", first = 0, usage = null, ended = null, due = false;
  const draw = () => {
    due = false;
    const talk = $("talk"), atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
    show(box, text);
    if (thought) {
      if (thoughts.hidden) { thoughts.hidden = false; thoughts.open = !text; }
      thoughts.lastChild.textContent = thought;
    }
    if (atEnd) talk.scrollTop = talk.scrollHeight;
  };
  said.classList.add("busy");
  $("talk").setAttribute("aria-busy", "true");
  try {
    const answer = await ask(path, {body, signal: running.signal});
    for await (const event of events(answer, running.signal)) {
      if (event.error) throw new Refused(0, event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (!choice) continue;
      const more = (choice.delta ? choice.delta.content : choice.text) ?? "", aside = choice.delta?.reasoning ?? "";
      if (more || aside) {
        if (more && !text) thoughts.open = false;  // the reasoning ended, the answer begins
        text += more;
        thought += aside;
        if (!first) draw();  // the first token at once, later ones at a limited rate
        else if (!due) { due = true; setTimeout(draw, 30); }
        first ||= performance.now();
      }
      ended = choice.finish_reason ?? ended;
    }
    note.textContent = cost(began, first || performance.now(), usage, ended);
  } catch (error) {
    note.textContent = error.name === "AbortError" ? "stopped" : error.message;
    if (error.name !== "AbortError") note.classList.add("bad");
    if (error instanceof Refused && !text && !thought) {  // no output yet: it can be sent again
      messages.pop();
      if (!$("words").value) $("words").value = words;
    }
  }
  draw();
  said.classList.remove("busy");
  $("talk").setAttribute("aria-busy", "false");
  if (text && $("mode").value === "chat") messages.push({role: "assistant", content: text});
  $("spoken").textContent = text.slice(0, 2000) || note.textContent;
}

$("ask").onsubmit = async event => {
  event.preventDefault();
  if (running) { running.abort(); return; }
  const words = $("words").value.trim();
  if (!words) return;
  $("words").value = "";
  say("user", words);
  messages.push({role: "user", content: words});
  running = new AbortController();
  $("send").textContent = "Stop";
  try {
    await answerTo(words);
  } finally {
    running = null;
    $("send").textContent = "Send";
  }
};

$("words").onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) $("ask").requestSubmit();
  }
};
document.addEventListener("keydown", event => {
  if (event.key === "Escape" && running && !$("key-dialog").open) running.abort();
});
$("fresh").onclick = () => {
  running?.abort();
  messages = [];
  $("talk").replaceChildren();
  $("words").focus();
};
