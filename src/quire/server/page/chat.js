// The chat box: a conversation of turns, kept in this tab. Only turns of the chat that have an answer are sent again.

let turns = [];       // {mode, ask, answer, thoughts, calls, note, bad}, oldest first
let running = null;   // an AbortController while an answer streams
let editing = -1;     // the turn whose message is in the box, to be sent again
let ready = false;    // the server takes requests
const drawn = [];     // the elements of each turn

const FIELDS = ["mode", "temperature", "most", "system"];
const TEXT_TOKENS = 256;  // a text continues without an end of its own; a chat's answer has one

function keep() {
  store.set("turns", JSON.stringify(turns));
  store.set("fields", JSON.stringify(FIELDS.map(id => $(id).value)));
}

function recall(name, otherwise) {
  try { return JSON.parse(store.get(name)) ?? otherwise; } catch { return otherwise; }
}

// -- drawing -------------------------------------------------------------------------------------
function bubble(who, label) {
  const said = make("div", "said " + who);
  said.append(make("span", "hidden", label));
  const parts = {said, box: make("div", "text"), foot: make("div", "foot"), note: make("span", "note"), calls: []};
  parts.foot.append(parts.note);
  return parts;
}

function act(foot, label, does) {
  const button = make("button", "act", label);
  button.type = "button";
  button.onclick = does;
  foot.append(button);
  return button;
}

function draw(turn, at) {
  $("hint")?.remove();
  const user = bubble("user", "You: "), reply = bubble("assistant", "Answer: ");
  user.box.textContent = turn.ask;
  user.said.append(user.box, user.foot);
  act(user.foot, "Copy", event => copy(turn.ask, event.target));
  act(user.foot, "Edit", () => edit(at));
  const thoughts = make("details", "thoughts");
  thoughts.append(make("summary", "", "Thoughts"), make("div"));
  thoughts.hidden = true;
  reply.said.append(thoughts, reply.box, reply.foot);
  act(reply.foot, "Copy", event => copy(plain(turn), event.target));
  const again = act(reply.foot, "Regenerate", () => send(turn.ask, at));
  drawn[at] = {user, reply, thoughts, again};
  $("talk").append(user.said, reply.said);
  redrawAnswer(turn, at);
}

function redrawAnswer(turn, at) {
  const {reply, thoughts} = drawn[at], talk = $("talk"), calls = turn.calls ?? [];
  const atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
  if (turn.mode === "text") reply.box.textContent = turn.answer;
  else render(reply.box, turn.answer);
  reply.box.hidden = calls.length > 0 && !turn.answer;
  drawCalls(reply, calls);
  if (turn.thoughts) {
    if (thoughts.hidden) thoughts.open = !turn.answer;
    else if (turn.answer && !reply.answered) thoughts.open = false;  // the reasoning ended, the answer begins
    thoughts.hidden = false;
    thoughts.lastChild.textContent = turn.thoughts;
  }
  reply.answered = Boolean(turn.answer);
  reply.note.textContent = turn.note;
  reply.note.classList.toggle("bad", turn.bad);
  if (atEnd) talk.scrollTop = talk.scrollHeight;
}

// Tool calls: the model's name of a tool and its arguments, as they are.
function drawCalls(reply, calls) {
  calls.forEach(({name, arguments: given}, at) => {
    const element = reply.calls[at] ??= make("div", "call");
    if (!element.isConnected) {
      element.append(make("span"), make("pre"));
      reply.foot.before(element);
    }
    const [label, code] = element.children;
    if (label.textContent !== `Tool call: ${name}`) label.textContent = `Tool call: ${name}`;
    if (code.textContent !== given) code.textContent = given;
  });
}

function plain({answer, calls = []}) {
  return [answer, ...calls.map(call => `${call.name} ${call.arguments}`)].filter(Boolean).join("\n");
}

function redrawAll() {
  $("talk").replaceChildren();
  drawn.length = 0;
  turns.forEach(draw);
  mark();
  $("talk").scrollTop = $("talk").scrollHeight;
}

// Show which turns an edit replaces; only the last answer can be made again.
function mark() {
  drawn.forEach(({user, reply, again}, at) => {
    for (const {said} of [user, reply]) said.classList.toggle("replaced", editing >= 0 && at >= editing);
    again.hidden = at < turns.length - 1;
  });
  $("cancel").hidden = editing < 0;
  $("send").textContent = running ? "Stop" : "Send";
  $("send").disabled = !running && !ready;
  $("send").title = ready ? "" : "The model is not loaded yet";
  $("most").placeholder = $("mode").value === "text" ? String(TEXT_TOKENS) : "until it ends";
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // no permission, or an address without TLS: the old way
    const area = make("textarea", "hidden", text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

// -- sending -------------------------------------------------------------------------------------
// What is no number is sent as it is: the server's error names the field.
function number(text) { return Number.isFinite(Number(text)) ? Number(text) : text; }

function request(turn, before) {
  const body = {stream: true, stream_options: {include_usage: true}};
  if (!$("models").hidden) body.model = $("served").value;
  const temperature = $("temperature").value.trim(), most = $("most").value.trim();
  if (temperature) body.temperature = number(temperature);
  if (most) body.max_tokens = number(most);
  if (turn.mode === "text") return ["v1/completions", {max_tokens: TEXT_TOKENS, ...body, prompt: turn.ask}];
  const system = $("system").value.trim();
  const messages = system ? [{role: "system", content: system}] : [];
  for (const {mode, ask, answer} of before) {
    if (mode === "chat" && answer) messages.push({role: "user", content: ask}, {role: "assistant", content: answer});
  }
  return ["v1/chat/completions", {...body, messages: [...messages, {role: "user", content: turn.ask}]}];
}

// Send a message as turn number `at`; this and later turns are replaced.
async function send(words, at) {
  if (running || !ready) return;
  const turn = {mode: $("mode").value, ask: words, answer: "", thoughts: "", calls: [], note: "", bad: false};
  turns = [...turns.slice(0, at), turn];
  editing = -1;
  running = new AbortController();
  redrawAll();
  keep();
  const reply = drawn[at].reply;
  reply.said.classList.add("busy");
  $("talk").setAttribute("aria-busy", "true");
  let due = false;
  const show = () => {
    due = false;
    const before = performance.now();
    if (turns[at] === turn) redrawAnswer(turn, at);
    return performance.now() - before;
  };
  let took = 0;
  await stream(turn, ...request(turn, turns.slice(0, at)), running.signal, first => {
    if (first) took = show();  // the first token at once, later ones at a limited rate
    else if (!due) { due = true; setTimeout(() => { took = show(); }, Math.max(30, 5 * took)); }
  });
  show();
  reply.said.classList.remove("busy");
  $("talk").setAttribute("aria-busy", "false");
  running = null;
  $("spoken").textContent = plain(turn).slice(0, 2000) || turn.note;
  if (turn.bad && !turn.answer && !$("words").value) $("words").value = words;  // it can be sent again
  mark();
  keep();
}

function edit(at) {
  if (running) return;
  editing = at;
  $("words").value = turns[at].ask;
  $("mode").value = turns[at].mode;
  $("words").focus();
  mark();
}

function stopEditing() {
  editing = -1;
  $("words").value = "";
  mark();
}

$("ask").onsubmit = event => {
  event.preventDefault();
  if (running) { running.abort(); return; }
  const words = $("words").value.trim();
  if (!words || !ready) return;
  $("words").value = "";
  send(words, editing < 0 ? turns.length : editing);
};

$("words").onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) $("ask").requestSubmit();
  }
};
document.addEventListener("keydown", event => {
  if (event.key !== "Escape" || $("key-dialog").open) return;
  if (running) running.abort();
  else if (editing >= 0) stopEditing();
});
$("cancel").onclick = stopEditing;
$("fresh").onclick = () => {
  running?.abort();
  turns = [];
  editing = -1;
  redrawAll();
  keep();
  $("words").focus();
};
for (const id of FIELDS) $(id).onchange = () => { keep(); mark(); };
addEventListener("pagehide", keep);

// -- the server's state ----------------------------------------------------------------------------
function setReady(now) {
  if (ready === now) return;
  ready = now;
  mark();
}

// The names that a request may have as its model: those of the model, then the adapters.
function listModels(cards) {
  const chosen = $("served").value, names = cards.map(card => card.id);
  $("served").replaceChildren(...names.map(name => new Option(name, name)));
  $("served").value = names.includes(chosen) ? chosen : names[0];
  $("models").hidden = names.length < 2;
}

$("options").ontoggle = async () => {
  if ($("options").open && ready) listModels((await (await ask("v1/models")).json()).data);
};

// Ask until the model is loaded. The status line says how far it is.
async function awaitModel() {
  try {
    const found = await (await ask("v1/models")).json();
    put("model", found.data[0].id);
    listModels(found.data);
    if (!seen) tell("good", "ready");
    setReady(true);
  } catch (error) {
    setReady(false);
    tell(error.status === 503 ? "wait" : "bad", error.status === 401 ? "needs a key" : error.message);
    if (error.status !== 401) setTimeout(awaitModel, 1000);
  }
}

recall("fields", []).forEach((value, at) => { $(FIELDS[at]).value = value; });
turns = recall("turns", []);
if (turns.length) redrawAll();
else mark();
