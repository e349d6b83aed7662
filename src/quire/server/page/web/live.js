// The live view: fetches the engine's state a few times a second while the page is visible.

import {cellAt, drawBlocks, drawShares, nameOf, unrolled} from "./blocks.js";
import {$, make, on, put} from "./dom.js";
import {colour, drawSpark, drawSteps, OWNED} from "./draw.js";
import {tell} from "./frame.js";
import {bytes, count, live} from "./live_state.js";
import {lost, setReady} from "./readiness.js";
import {drawLives, forgetRows} from "./requests.js";
import {ask} from "./server.js";
import {drawTiers} from "./tiers.js";

const SAMPLES = 120, KEPT_STEPS = 240, SAMPLE_S = 0.25;
const WINDOW_MS = 1600;  // over which a speed is measured
const RATED_STEPS = 64;  // of which the last speed is
const NAMED = 8;         // requests whose colours the steps' legend has

let takenAt = 0;
let history = [];  // {at, output, prompt}: for the speeds
let speeds = [];
let held = false, timer = null, looking = false, pointed = false;

// -- new state -----------------------------------------------------------------------------------
function take(state) {
  const now = performance.now(), stats = state.stats;
  if (live.seen && stats.steps < live.seen.stats.steps) { live.steps = []; history = []; }  // another engine process
  // A step that was reported while it ran is reported again when it is done.
  const last = finished();
  live.steps = [...live.steps.filter(step => step.step <= last), ...state.steps.filter(step => step.step > last)].slice(-KEPT_STEPS);
  live.cells = unrolled(state.blocks.runs);
  history.push({at: now, output: stats.generation_tokens, prompt: stats.prompt_tokens});
  history = history.filter((sample, at) => now - sample.at < WINDOW_MS || at === history.length - 2);  // two, for a slow server
  live.seen = state;
  takenAt = now;
  speeds = [...speeds, speed("output")].slice(-SAMPLES);
}

function finished() { return live.steps.findLast(step => step.ms >= 0)?.step ?? 0; }

function speed(kind) {
  const first = history[0], last = history.at(-1), seconds = (last.at - first.at) / 1000;
  return seconds > 0 ? Math.max(0, last[kind] - first[kind]) / seconds : 0;
}

// -- what is shown -------------------------------------------------------------------------------
function redraw() {
  if (!live.seen || !shown()) return;
  live.late = held ? 0 : performance.now() - takenAt;
  tiles();
  blocksAndSteps();
  drawLives(choose);
}

function shown() { return document.visibilityState === "visible" && $("engine").offsetParent !== null; }

// A speed; while nothing runs, the one of the last steps.
function putSpeed(id, kind, words) {
  const idle = !live.seen.stats.running && speedOfSteps(kind) > 0;
  put(id, count(idle ? speedOfSteps(kind) : speed(kind)));
  put(id + "-of", idle ? `${words} in the last steps` : words);
}

// Tokens a second, over the time of the last steps that computed tokens of this kind.
function speedOfSteps(kind) {
  let tokens = 0, ms = 0;
  for (const step of live.steps.filter(step => step.ms >= 0).slice(-RATED_STEPS)) {
    const some = step.work.filter(([, , isPrompt]) => isPrompt === (kind === "prompt")).reduce((total, [, more, , refused]) => total + more - (refused || 0), 0);
    if (some) { tokens += some; ms += step.ms; }
  }
  return ms ? 1000 * tokens / ms : 0;
}

function tiles() {
  const {stats, blocks, memory, limits} = live.seen, used = blocks.count - blocks.free - blocks.cached;
  putSpeed("speed", "output", "tokens per second");
  putSpeed("prompt-speed", "prompt", "prompt tokens per second");
  put("running", `${stats.running} / ${limits.rows}`);
  put("waiting", stats.waiting ? `running, ${count(stats.waiting)} waiting` : "running, none waiting");
  put("kv", (100 * used / Math.max(1, blocks.count)).toFixed(1) + " %");
  put("kv-bytes", memory.block ? `of ${bytes(memory.block * blocks.count)} KV cache in use` : "KV cache in use");
  $("kv-bar").value = used / Math.max(1, blocks.count);
  put("hits", stats.prefix_queries ? (100 * stats.prefix_hits / stats.prefix_queries).toFixed(1) + " %" : "–");
  put("hits-of", stats.prefix_queries ? `prefix-cache hits: ${count(stats.prefix_hits)} of ${count(stats.prefix_queries)} prompt tokens` : "prefix-cache hits");
  put("memory", memory.resident ? bytes(memory.resident) : "–");
  put("memory-of", `memory of ${bytes(memory.machine)}; server ${bytes(memory.server)}`);
  put("preemptions", count(stats.preemptions));
  const drafted = stats.counts.spec_decode_num_draft_tokens, accepted = stats.counts.spec_decode_num_accepted_tokens;
  $("drafts-tile").hidden = $("refused-key").hidden = drafted === undefined;
  put("drafts", drafted ? (100 * accepted / drafted).toFixed(1) + " %" : "–");
  put("drafts-of", drafted ? `draft tokens accepted: ${count(accepted)} of ${count(drafted)}` : "draft tokens accepted");
  put("n-free", `free ${count(blocks.free)}`);
  put("n-cached", `cached ${count(blocks.cached)}`);
  put("n-shared", `shared ${count(blocks.shared)}`);
  put("n-used", `in use, by request ${count(used - blocks.shared)}`);
  drawSpark($("spark"), speeds, SAMPLES, SAMPLES * SAMPLE_S);
  drawTiers(stats, {used: memory.block * used, limit: memory.block * blocks.count});
}

function blocksAndSteps() {
  drawShares($("share"), live.cells);
  const map = drawBlocks($("blocks"), live.cells, live.chosen);
  drawSteps($("steps"), live.steps, live.chosen);
  const {blocks, stats} = live.seen, each = blocks.each * map.each;
  const shares = [`${count(blocks.count)} blocks of ${stats.block_size} tokens`, map.all ? "" : "the map leaves out free ones", each > 1 ? `${each} in a square` : ""];
  if (!pointed) put("block-note", shares.filter(Boolean).join(", "));
  legend();
  stepNote();
}

function stepNote() {
  const last = live.steps.at(-1);
  if (!last) { put("step-note", "none yet"); return; }
  const chunks = last.work.filter(([, , isPrompt]) => isPrompt), decoding = last.work.length - chunks.length;
  const tokens = last.work.reduce((total, [, tokens]) => total + tokens, last.rest);
  const parts = [`step ${count(last.step)}`, tokens === 1 ? "1 token" : `${count(tokens)} tokens`];
  if (chunks.length) parts.push(`prompt chunks of ${chunks.slice(0, 4).map(([, tokens]) => tokens).join(", ")}${chunks.length > 4 ? " …" : ""}`);
  if (decoding) parts.push(`${decoding} decoding`);
  if (last.ms >= 0) parts.push(`${last.ms < 10 ? last.ms.toFixed(1) : count(last.ms)} ms`);
  put("step-note", parts.join(" · "));
}

// The marks of the legends have the colours of requests that are shown.
function legend() {
  const numbers = live.seen.lives.map(life => life.n).sort((a, b) => b - a), named = numbers.slice(0, NAMED).reverse();
  for (const id of ["legend", "step-key", "life-key"]) {
    $(id).style.setProperty("--mark", colour(numbers[0] ?? 0));
    $(id).style.setProperty("--mark-2", colour(numbers[1] ?? (numbers[0] ?? 0) + 1));
  }
  const text = named.map(number => number + colour(number)).join(" ");
  if ($("step-requests").dataset.named === text) return;
  $("step-requests").dataset.named = text;
  $("step-requests").replaceChildren(...named.map(number => {
    const chip = make("span", "chip"), mark = make("i");
    mark.style.background = colour(number);
    chip.append(mark, "#" + number);
    return chip;
  }));
}

function choose(number) {
  if (live.chosen === number) return;
  live.chosen = number;
  if (live.seen) blocksAndSteps();
}

function point(event) {
  const cell = cellAt(event.offsetX, event.offsetY);
  pointed = cell !== undefined;
  if (!pointed) return;
  put("block-note", `block ${count(cell.at * live.seen.blocks.each + 1)}: ${nameOf(cell.what)}`);
  choose(cell.what >= OWNED ? cell.what - OWNED : null);
}

// -- fetching --------------------------------------------------------------------------------------
async function look() {
  timer = null;
  if (looking || held || !shown()) return;  // lookSoon starts it again
  looking = true;
  let wait = 250;
  const which = live.engine;
  try {
    const state = await (await ask(`ui/state?since=${finished()}&engine=${live.engine}`)).json();
    wait = state.every_ms;
    setReady(true);
    if (state.busy) tell("wait", "in a long step");
    else if (which === live.engine) {
      take(state);
      nameEngines(state.engines);
      tell("good", "live");
      redraw();
    }
  } catch (error) {
    wait = 2000;
    if (error.status === 0) lost();  // the chat says so too, and asks until it is back
    tell(error.status === 503 ? "wait" : "bad", error.status === 401 ? "needs a key" : error.message);
  }
  looking = false;
  timer ??= setTimeout(look, wait);
}

function nameEngines(names) {
  $("engines").hidden = names.length < 2;
  if ($("engine-number").length !== names.length) $("engine-number").replaceChildren(...names.map((name, at) => new Option(name, at)));
}

function lookSoon() {
  clearTimeout(timer);
  timer = setTimeout(look, 0);
}

function showEngine(event) {
  live.engine = Number(event.target.value);
  live.seen = null;
  [live.steps, history, speeds] = [[], [], []];
  forgetRows();
  choose(null);
  lookSoon();
}

function hold() {
  held = !held;
  $("hold").setAttribute("aria-pressed", String(held));
  tell(held ? "wait" : "good", held ? "frozen" : "live");
  if (!held) lookSoon();
}

export function startLive() {
  $("blocks").onmousemove = point;
  $("blocks").onmouseleave = () => { pointed = false; choose(null); };
  $("engine-number").onchange = showEngine;
  $("hold").onclick = hold;
  document.addEventListener("visibilitychange", lookSoon);
  addEventListener("resize", redraw);
  on("paint", () => { redraw(); lookSoon(); });
  on("key", lookSoon);
  lookSoon();
}
