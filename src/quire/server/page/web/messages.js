// Draws the turns of a conversation: bubbles, thoughts, tool calls and their results, branches.

import {$, addButton, copy, make} from "./dom.js";
import {render} from "./markdown.js";
import {showMedia} from "./media.js";
import {branches, callId} from "./tree.js";

const drawn = new Map();  // turn -> its elements
const BY_TOUCH = matchMedia("(pointer: coarse)");
export const byTouch = () => BY_TOUCH.matches;

export function plain({answer, calls}) {
  return [answer, ...calls.map(call => `${call.name} ${call.arguments}`)].filter(Boolean).join("\n");
}

// Draw the turns of a path. `does`: regenerate(at), edit(at), show(at), sendResults(at, results).
export function drawTurns(conversation, numbers, does) {
  drawn.clear();
  $("turns").replaceChildren();
  for (const at of numbers) draw(conversation, at, does, at === numbers.at(-1));
  const talk = $("talk");
  talk.scrollTop = talk.scrollHeight;
}

function bubble(who, label) {
  const parts = {said: make("div", "said " + who), box: make("div", "text"), foot: make("div", "foot")};
  parts.said.append(make("span", "hidden", label), parts.box, parts.foot);
  return parts;
}

function draw(conversation, at, does, isLast) {
  const turn = conversation.turns[at], user = bubble("user", "You: "), reply = bubble("assistant", "Answer: ");
  const {answers, messages} = branches(conversation, at);
  drawQuestion(user, turn, at === conversation.leaf);
  switcher(user.foot, "message", messages, at, does.show);
  if (turn.ask) addButton(user.foot, "Copy", event => copy(turn.ask, event.target));
  if (!turn.results.length && turn.mode !== "speech") addButton(user.foot, "Edit", () => does.edit(at));
  const thoughts = make("details", "thoughts");
  thoughts.append(make("summary"), make("div"));
  thoughts.hidden = true;
  reply.box.before(thoughts);
  const note = make("span", "note"), calls = make("div", "calls");
  reply.box.after(calls);
  const facts = make("span", "facts");
  if (turn.model) facts.append(make("span", "by", turn.model));
  facts.append(note);
  reply.foot.append(facts);
  switcher(reply.foot, "answer", answers, at, does.show);
  addButton(reply.foot, "Copy", event => copy(plain(turn), event.target));
  addButton(reply.foot, "Regenerate", () => does.regenerate(at));
  drawn.set(turn, {user, reply, thoughts, note, calls, isLast, does, at, answered: false});
  $("turns").append(user.said, reply.said);
  redrawAnswer(turn);
  askForResults(turn);
}

function drawQuestion({box}, turn, isLast) {
  if (turn.mode === "text") box.classList.add("as-is");
  const media = turn.media.map(showMedia), talk = $("talk");
  if (isLast) for (const one of media) one.onload = one.onloadedmetadata = () => { talk.scrollTop = talk.scrollHeight; };  // it has its height now
  if (turn.results.length) {
    for (const {name, content} of turn.results) box.append(make("div", "call-name", `Result of ${name}`), make("pre", "", content));
  } else if (turn.mode === "text") box.textContent = turn.ask;
  else render(box, turn.ask);
  box.prepend(...media);
}

// ‹ 2 / 3 ›
function switcher(foot, what, numbers, at, show) {
  if (numbers.length < 2) return;
  const place = numbers.indexOf(at), box = make("span", "switch");
  const step = (label, name, to) => {
    const button = addButton(box, label, () => show(numbers[to]));
    button.setAttribute("aria-label", `${name} ${what}`);
    button.disabled = to < 0 || to >= numbers.length;
  };
  step("‹", "Previous", place - 1);
  box.append(`${place + 1} / ${numbers.length}`);
  step("›", "Next", place + 1);
  foot.append(box);
}

export function redrawAnswer(turn) {
  const parts = drawn.get(turn);
  if (!parts) return;  // another conversation is shown
  const {reply, thoughts, note, calls} = parts, talk = $("talk");
  const atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
  reply.box.classList.toggle("as-is", turn.mode !== "chat");
  if (turn.mode !== "chat") reply.box.textContent = turn.answer;
  else render(reply.box, turn.answer);
  reply.box.hidden = !turn.answer && (turn.calls.length > 0 || Boolean(turn.thoughts));
  drawCalls(calls, turn.calls);
  if (turn.thoughts) drawThoughts(parts, turn, thoughts);
  parts.answered = Boolean(turn.answer);
  note.textContent = turn.note;
  note.classList.toggle("bad", turn.bad);
  if (atEnd) talk.scrollTop = talk.scrollHeight;
}

function drawThoughts(parts, turn, thoughts) {
  if (thoughts.hidden) thoughts.open = !turn.answer && !turn.calls.length && !turn.note.startsWith("stopped");
  else if (turn.answer && !parts.answered) thoughts.open = false;  // the reasoning ended, the answer begins
  thoughts.hidden = false;
  thoughts.firstChild.textContent = turn.thoughtMs >= 1 ? `Thought for ${duration(turn.thoughtMs)}` : "Thoughts";
  thoughts.lastChild.textContent = turn.thoughts;
}

const duration = ms => ms < 1000 ? `${Math.round(ms)} ms` : ms < 10000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms / 1000)} s`;

// The model's name of a tool and its arguments, as they are.
function drawCalls(box, calls) {
  calls.forEach(({name, arguments: given}, at) => {
    const element = box.children[at] ?? box.appendChild(make("div", "call"));
    if (!element.children.length) element.append(make("div", "call-name"), make("pre"));
    const [label, code] = element.children;
    if (label.textContent !== `Tool call: ${name}`) label.textContent = `Tool call: ${name}`;
    if (code.textContent !== given) code.textContent = given;
  });
}

// Under the last turn's calls: a box for the result of each, and a button that sends them.
export function askForResults(turn) {
  const parts = drawn.get(turn);
  if (!parts?.isLast || !turn.calls.length || parts.reply.said.classList.contains("busy") || parts.results) return;
  const form = parts.results = make("form", "results");
  const boxes = turn.calls.map(({name}, n) => {
    const label = make("label", "", `Result of ${name}`), box = make("textarea");
    box.rows = 2;
    box.value = turn.expected?.[n] ?? "";
    label.append(box);
    form.append(label);
    return box;
  });
  form.append(make("button", "", turn.calls.length > 1 ? "Send results" : "Send result"));
  form.onsubmit = event => {
    event.preventDefault();
    parts.does.sendResults(parts.at, turn.calls.map((call, n) => ({id: callId(call, n), name: call.name, content: boxes[n].value})));
  };
  parts.calls.after(form);
}

export function markBusy(turn, busy) {
  drawn.get(turn)?.reply.said.classList.toggle("busy", busy);
  $("talk").setAttribute("aria-busy", String(busy));
}

// Fade the turns that an edit leaves, from turn number `from` on; -1: none.
export function fade(from) {
  let after = false;
  for (const {user, reply, at} of drawn.values()) {
    after ||= at === from;
    for (const {said} of [user, reply]) said.classList.toggle("replaced", after);
  }
}
