// The chat: sends messages, edits them, makes answers again, and keeps the conversation.

import {attachments, isRecording, setAttachments} from "./attachments.js";
import {taken} from "./defaults.js";
import {$, copy, emit, on, put, tab} from "./dom.js";
import {askForResults, byTouch, drawTurns, fade, markBusy, plain, redrawAnswer} from "./messages.js";
import {forgetMedia} from "./media.js";
import {requestFields, set, speechFields, value} from "./options.js";
import {chosenModel, isReady, shownModel} from "./readiness.js";
import {load, save} from "./storage.js";
import {stream} from "./stream.js";
import {checked, LIMITS, messages, newConversation, newTurn, path, show} from "./tree.js";

let conversation = newConversation();
let running = null;   // an AbortController while an answer streams
let editing = -1;     // the turn whose message is in the box, to be sent again

// -- what is shown -------------------------------------------------------------------------------
function redraw() {
  forgetMedia([...attachments(), ...path(conversation).flatMap(at => conversation.turns[at].media)]);
  drawTurns(conversation, path(conversation), {
    edit, sendResults,
    regenerate: at => { const {mode, ask, media, results, parent} = conversation.turns[at]; send({mode, ask, media, results, parent}); },
    show: at => { if (!running) { show(conversation, at); redraw(); keep(); } },
  });
  mark();
}

function mark() {
  fade(editing);
  $("cancel").hidden = editing < 0;
  const {speech} = taken();
  put("send", running ? "Stop" : speech ? "Write down" : "Send");
  $("send").classList.toggle("stop", Boolean(running));
  $("send").disabled = !running && (!isReady() || isRecording());
  $("send").hidden = speech && !running && !attachments().length;
  $("words").hidden = speech;
  $("send").title = isReady() ? "" : "The model is not loaded yet";
  $("welcome").hidden = !isReady() || conversation.leaf >= 0;
  $("words").placeholder = byTouch() ? "Message" : "Message (Enter sends, Shift+Enter breaks the line)";
}

// -- keeping -------------------------------------------------------------------------------------
async function keep() {
  tab.set("open", conversation.id);
  emit("current", conversation.id);
  if (!conversation.turns.length) return;
  conversation.changed = Date.now();
  try { await save(conversation); } catch (error) { put("spoken", `The conversation is not kept: ${error.message}`); }
}

function open(given) {
  running?.abort();
  stopEditing();
  conversation = given ? {...checked(given), id: given.id} : newConversation();
  tab.set("open", conversation.id);
  emit("current", conversation.id);
  redraw();
}

async function recall() {
  const kept = await load(tab.get("open") || "-").catch(() => null);
  if (!kept || conversation.turns.length) return;
  try { open(kept); } catch { /* of another version */ }
}

// -- sending -------------------------------------------------------------------------------------
async function request(turn, before) {
  if (turn.mode === "speech") return speechRequest(turn);
  const body = {stream: true, stream_options: {include_usage: true, continuous_usage_stats: true}, ...requestFields(turn.mode)};
  if (chosenModel() !== null) body.model = chosenModel();
  if (turn.mode === "text") return ["v1/completions", {...body, prompt: turn.ask}];
  return ["v1/chat/completions", {...body, messages: await messages([...before, turn], value("system"))}];
}

function speechRequest({media: [{name, blob}]}) {
  const form = new FormData();
  form.append("file", blob, name);
  for (const [field, given] of Object.entries({stream: "true", ...speechFields()})) form.append(field, given);
  if (chosenModel() !== null) form.append("model", chosenModel());
  return [`v1/audio/${value("task")}`, form];
}

// Send a message after turn number `parent`, as a branch of its own if that has an answer already.
async function send({ask, media = [], mode = value("mode"), results = [], parent, expected}) {
  if (running || !isReady() || conversation.turns.length >= LIMITS.turns) return;
  const turn = newTurn({parent, mode, ask, media, results, model: shownModel()});
  if (expected) Object.defineProperty(turn, "expected", {value: expected});  // of an example; not kept
  const talk = conversation, at = talk.turns.push(turn) - 1;
  talk.leaf = at;
  talk.title ||= (ask || media[0]?.name || "").slice(0, 80).split("\n")[0];
  editing = -1;
  running = new AbortController();
  redraw();
  keep();
  markBusy(turn, true);
  await receive(turn, path(talk).slice(0, -1).map(number => talk.turns[number]));
  running = null;
  markBusy(turn, false);
  askForResults(turn);
  put("spoken", plain(turn).slice(0, 2000) || turn.note);
  if (turn.bad && !turn.answer && mode !== "speech" && !$("words").value && !attachments().length) {  // it can be sent again
    $("words").value = ask;
    setAttachments(media);
  }
  mark();
  if (talk === conversation) keep();
  else save(talk).catch(() => {});
}

// Stream the answer. The first piece is shown at once, later ones at a limited rate.
async function receive(turn, before) {
  let due = false, took = 0;
  const draw = () => {
    due = false;
    const began = performance.now();
    redrawAnswer(turn);
    took = performance.now() - began;
  };
  try {
    await stream(turn, ...await request(turn, before), running.signal, first => {
      if (first) draw();
      else if (!due) { due = true; setTimeout(draw, Math.max(30, 5 * took)); }
    });
  } catch (error) {  // an option that is no JSON
    turn.bad = true;
    turn.note = error.message;
  }
  draw();
}

function sendResults(at, results) { send({ask: "", mode: "chat", results, parent: at}); }

function edit(at) {
  if (running) return;
  editing = at;
  $("words").value = conversation.turns[at].ask;
  setAttachments(conversation.turns[at].media);
  if (conversation.turns[at].mode !== "speech") set("mode", conversation.turns[at].mode);
  $(taken().speech ? "send" : "words").focus();
  mark();
}

function stopEditing() {
  if (editing >= 0) {
    $("words").value = "";
    setAttachments([]);
  }
  editing = -1;
  mark();
}

// -- events --------------------------------------------------------------------------------------
function submit(event) {
  event.preventDefault();
  if (running) { running.abort(); return; }
  const ask = $("words").value.trim(), media = attachments(), parent = editing < 0 ? conversation.leaf : conversation.turns[editing].parent;
  if (!(ask || media.length) || !isReady() || isRecording()) return;
  $("words").value = "";
  setAttachments([]);
  if (taken().speech) sendSpeech(media, parent);
  else send({ask, media, parent, mode: media.length ? "chat" : undefined});
}

// Files to write down, one after the other.
async function sendSpeech(media, parent) {
  for (const one of media) {
    await send({ask: "", media: [one], mode: "speech", parent});
    parent = conversation.leaf;
  }
}

// Sound for a model that writes it down needs no message: it is sent at once.
function onAttached() {
  mark();
  if (taken().speech && !running && editing < 0 && attachments().length && !isRecording() && isReady()) $("ask").requestSubmit();
}

function sendExample({ask, tools, result}) {
  set("mode", "chat");
  if (tools) set("tools", JSON.stringify(tools));
  send({ask, parent: conversation.leaf, expected: result && [result]});
}

export function startChat() {
  $("ask").onsubmit = submit;
  $("words").onkeydown = event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || byTouch()) return;
    event.preventDefault();
    if (!running) $("ask").requestSubmit();
  };
  document.addEventListener("keydown", event => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    if (running) running.abort();
    else stopEditing();
  });
  $("talk").addEventListener("click", event => {
    const button = event.target.closest("button.copy-code");
    if (button) copy(button.closest(".code").querySelector("pre").textContent, button);
  });
  $("cancel").onclick = stopEditing;
  $("fresh").onclick = () => { open(null); $("words").focus(); };
  on("open", open);
  on("ask", sendExample);
  on("ready", mark);
  on("defaults", mark);
  on("attached", onAttached);
  addEventListener("pagehide", keep);
  mark();
  recall();
}
