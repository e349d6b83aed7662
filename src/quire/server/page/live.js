// The live view: fetches the engine's state a few times a second while the page is visible.

let seen = null, cells = [], steps = [], late = 0, takenAt = 0;
let history = [];  // {at, output, prompt}: for the speeds
let speeds = [];
let chosen = null;  // the request under the pointer
let held = false, timer = null, looking = false;
let engine = 0;  // which of several engines is shown
const rows = new Map();  // by request number

const count = number => Math.round(number).toLocaleString("en");

function bytes(number) {
  for (const [unit, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (number >= unit) return (number / unit).toFixed(number >= 100 * unit ? 0 : number >= 10 * unit ? 1 : 2) + " " + name;
  }
  return number + " B";
}

// -- new state -----------------------------------------------------------------------------------
function take(found) {
  const now = performance.now(), stats = found.stats;
  if (seen && stats.steps < seen.stats.steps) { steps = []; history = []; }  // another engine process
  // A step that was reported while it ran is reported again when it is done.
  const last = finished();
  steps = [...steps.filter(step => step.step <= last), ...found.steps.filter(step => step.step > last)].slice(-240);
  cells = unrolled(found.blocks.runs);
  history.push({at: now, output: stats.generation_tokens, prompt: stats.prompt_tokens});
  history = history.filter(one => now - one.at < 1600);
  seen = found;
  takenAt = now;
  speeds = [...speeds, speed("output")].slice(-120);
}

function finished() { return steps.findLast(step => step.ms >= 0)?.step ?? 0; }

function speed(kind) {
  const first = history[0], last = history.at(-1), seconds = (last.at - first.at) / 1000;
  return seconds > 0 ? Math.max(0, last[kind] - first[kind]) / seconds : 0;
}

// -- what is shown -------------------------------------------------------------------------------
function put(id, text) { if ($(id).textContent !== text) $(id).textContent = text; }

function redraw() {
  paints = null;
  if (!seen || !shown()) return;
  late = held ? 0 : performance.now() - takenAt;
  numbers();
  blocksAndSteps();
  lives();
}

function shown() { return document.visibilityState === "visible" && $("engine").offsetParent !== null; }

function numbers() {
  const {stats, blocks, memory, limits} = seen, used = blocks.count - blocks.free - blocks.cached;
  put("speed", count(speeds.at(-1) || 0));
  put("prompt-speed", count(speed("prompt")));
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
  drawSpark($("spark"), speeds);
}

function blocksAndSteps() {
  drawBlocks($("blocks"), cells, chosen);
  drawSteps($("steps"), steps, chosen);
  const {blocks, stats} = seen, each = blocks.each > 1 ? `, ${blocks.each} a cell` : "";
  if (!pointed) put("block-note", `${count(blocks.count)} blocks of ${stats.block_size} tokens${each}`);
  const last = steps.at(-1);
  if (!last) { put("step-note", "none yet"); return; }
  const chunks = last.work.filter(([, , isPrompt]) => isPrompt), some = last.work.length - chunks.length;
  const tokens = last.work.reduce((total, [, one]) => total + one, last.rest);
  const parts = [`step ${count(last.step)}`, tokens === 1 ? "1 token" : `${count(tokens)} tokens`];
  if (chunks.length) parts.push(`prompt chunks of ${chunks.slice(0, 4).map(([, one]) => one).join(", ")}${chunks.length > 4 ? " …" : ""}`);
  if (some) parts.push(`${some} decoding`);
  if (last.ms >= 0) parts.push(`${last.ms < 10 ? last.ms.toFixed(1) : count(last.ms)} ms`);
  put("step-note", parts.join(" · "));
}

let pointed = false;
$("blocks").onmousemove = event => {
  const at = Math.floor(event.offsetY / grid.size) * grid.columns + Math.min(grid.columns - 1, Math.floor(event.offsetX / grid.size));
  const what = cells[at];
  pointed = what !== undefined;
  if (!pointed) return;
  const name = ["free", "cached: free, and used again by a request with the same prefix", "shared by several requests"][what] ?? `request ${what - OWNED}`;
  put("block-note", `block ${at * seen.blocks.each + 1}: ${name}`);
  choose(what >= OWNED ? what - OWNED : null);
};
$("blocks").onmouseleave = () => { pointed = false; choose(null); };

function choose(number) {
  if (chosen === number) return;
  chosen = number;
  if (seen) blocksAndSteps();
}

// -- requests ------------------------------------------------------------------------------------
const ALIVE = {queued: "queued", prefill: "prefill", decode: "decoding", preempted: "preempted"};

function lives() {
  const order = [...seen.lives].sort((a, b) => (a.ended >= 0) - (b.ended >= 0) || b.n - a.n);
  const focused = document.activeElement;
  order.forEach((life, at) => {
    const row = rows.get(life.n) ?? newRow(life);
    if ($("lives").children[at] !== row.item) $("lives").insertBefore(row.item, $("lives").children[at] ?? null);
    update(row, life);  // after its insertion: the lane is drawn as wide as the row
  });
  const here = new Set(order.map(life => life.n));
  for (const [number, row] of rows) {
    if (!here.has(number)) { row.item.remove(); rows.delete(number); if (chosen === number) choose(null); }
  }
  if (focused !== document.activeElement && focused?.isConnected) focused.focus();  // moving an element removes its focus
  $("no-requests").hidden = order.length > 0;
  const alive = order.filter(life => life.ended < 0).length, all = seen.stats.running + seen.stats.waiting;
  put("life-note", all > alive ? `${alive} of ${count(all)} are shown` : "");
}

function newRow(life) {
  const item = make("li"), head = make("button", "life"), chip = make("span", "chip"), more = make("div", "more");
  const row = {item, head, more, state: make("span", "state"), lane: make("canvas", "lane"), count: make("span", "count"),
    about: make("div", "id"), words: null, life};
  head.type = "button";
  head.setAttribute("aria-expanded", "false");
  row.dot = make("i");
  chip.append(row.dot, "#" + life.n);
  row.lane.setAttribute("aria-hidden", "true");
  head.append(chip, row.state, row.lane, row.count);
  head.onclick = () => {
    more.hidden = !more.hidden;
    head.setAttribute("aria-expanded", String(!more.hidden));
  };
  head.onmouseenter = head.onfocus = () => choose(life.n);
  head.onmouseleave = head.onblur = () => choose(null);
  more.hidden = true;
  more.append(row.about);
  if (!life.foreign) more.append(reveal(row));
  item.append(head, more);
  rows.set(life.n, row);
  return row;
}

function update(row, life) {
  row.life = life;
  row.dot.style.background = colour(life.n);
  row.item.dataset.state = life.state;
  const state = ALIVE[life.state] ?? (life.finish === "abort" ? "aborted" : life.finish === "error" ? "failed" : "done");
  if (row.state.textContent !== state) row.state.textContent = state;
  let told = `${life.blocks} blocks`;
  if (!life.foreign) told = life.state === "prefill" || !life.output ? `${count(Math.min(life.computed, life.prompt))} / ${count(life.prompt)} in` : `${count(life.prompt)} in, ${count(life.output)} out`;
  if (row.count.textContent !== told) row.count.textContent = told;
  drawLane(row.lane, life, late);
  if (row.more.hidden) return;
  const parts = life.foreign ? ["another key's request"] : [
    `id ${life.id}`, `prompt ${count(life.prompt)} tokens, ${count(life.hit)} of them from the prefix cache`,
    `output ${count(life.output)} of at most ${count(life.limit)}`,
  ];
  parts.push(`${count(life.blocks)} blocks`, `preempted ${life.preemptions} times`);
  if (life.drafted) parts.push(`draft tokens: ${count(life.accepted)} accepted, ${count(life.drafted - life.accepted)} refused`);
  if (life.finish) parts.push(`finish: ${life.finish}`);
  row.about.textContent = parts.join(" · ");
  if (row.words && performance.now() - row.asked > 1000 && life.ended < 0) fetchWords(row);
}

// The text of a request is fetched and shown only when the viewer opens it.
function reveal(row) {
  const bar = make("div", "bar"), button = make("button", "quiet", "Show prompt and output");
  button.type = "button";
  button.disabled = Boolean(seen.no_words);
  button.onclick = () => {
    if (row.words) {
      row.words.remove();
      row.words = null;
      button.textContent = "Show prompt and output";
      return;
    }
    button.textContent = "Hide prompt and output";
    row.words = make("div", "words");
    row.more.append(row.words);
    fetchWords(row);
  };
  bar.append(button, seen.no_words || "");
  return bar;
}

async function fetchWords(row) {
  row.asked = performance.now();
  try {
    const words = await (await ask(`ui/words?n=${row.life.n}&engine=${engine}`)).json();
    const more = left => left ? `, without ${count(left)} tokens` : "";
    row.words?.replaceChildren(
      make("span", "", "Prompt" + (words.prompt_left ? " (its beginning" + more(words.prompt_left) + ")" : "")), make("pre", "", words.prompt),
      make("span", "", "Output" + (words.output_left ? " (its end" + more(words.output_left) + ")" : "")), make("pre", "", words.output),
    );
  } catch (error) {
    row.words?.replaceChildren(make("span", "", error.message));
  }
}

// -- fetching --------------------------------------------------------------------------------------
async function look() {
  timer = null;
  if (looking || held || !shown()) return;  // lookSoon starts it again
  looking = true;
  let wait = 250;
  const which = engine;
  try {
    const found = await (await ask(`ui/state?since=${finished()}&engine=${engine}`)).json();
    wait = found.every_ms;
    setReady(true);
    if (found.busy) tell("wait", "in a long step");
    else if (which === engine) {
      take(found);
      put("model", found.model);
      nameEngines(found.engines);
      tell("good", "live");
      redraw();
    }
  } catch (error) {
    wait = 2000;
    tell(error.status === 503 ? "wait" : "bad", error.status === 401 ? "needs a key" : error.message);
  }
  looking = false;
  timer ??= setTimeout(look, wait);
}

function nameEngines(names) {
  $("engines").hidden = names.length < 2;
  if ($("engine-number").length !== names.length) $("engine-number").replaceChildren(...names.map((name, at) => new Option(name, at)));
}

$("engine-number").onchange = event => {
  engine = Number(event.target.value);
  [seen, steps, history, speeds] = [null, [], [], []];
  for (const row of rows.values()) row.item.remove();
  rows.clear();
  choose(null);
  lookSoon();
};

function lookSoon() {
  clearTimeout(timer);
  timer = setTimeout(look, 0);
}

$("hold").onclick = () => {
  held = !held;
  $("hold").setAttribute("aria-pressed", String(held));
  tell(held ? "wait" : "good", held ? "frozen" : "live");
  if (!held) lookSoon();
};
document.addEventListener("visibilitychange", lookSoon);
addEventListener("resize", redraw);
wear(store.get("theme") || "auto");
lookSoon();
awaitModel();
