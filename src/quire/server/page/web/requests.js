// The list of requests: a row for each, with its last seconds as a lane.

import {$, make, put} from "./dom.js";
import {colour, drawLane} from "./draw.js";
import {count, live} from "./live_state.js";
import {ask} from "./server.js";
import {fillSources, sourceWords} from "./tiers.js";

const rows = new Map();  // by request number
const ALIVE = {queued: "queued", prefill: "prefill", decode: "decoding", preempted: "preempted"};

// Draw the list anew. `choose(number)` highlights a request; null: none.
export function drawLives(choose) {
  const order = [...live.seen.lives].sort((a, b) => (a.ended >= 0) - (b.ended >= 0) || b.n - a.n);
  const focused = document.activeElement;
  order.forEach((life, at) => {
    const row = rows.get(life.n) ?? newRow(life, choose);
    if ($("lives").children[at] !== row.item) $("lives").insertBefore(row.item, $("lives").children[at] ?? null);
    update(row, life);  // after its insertion: the lane is drawn as wide as the row
  });
  const here = new Set(order.map(life => life.n));
  for (const [number, row] of rows) {
    if (!here.has(number)) { row.item.remove(); rows.delete(number); if (live.chosen === number) choose(null); }
  }
  if (focused !== document.activeElement && focused?.isConnected) focused.focus();  // moving an element removes its focus
  $("no-requests").hidden = order.length > 0;
  const alive = order.filter(life => life.ended < 0).length, all = live.seen.stats.running + live.seen.stats.waiting;
  put("life-note", all > alive ? `${alive} of ${count(all)} are shown` : "");
}

function newRow(life, choose) {
  const item = make("li"), head = make("button", "life"), chip = make("span", "chip"), more = make("div", "more");
  const row = {item, head, more, state: make("span", "state"), lane: make("canvas", "lane"), count: make("span", "count"),
    about: make("div", "id"), sources: make("div", "sources"), words: null, life};
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
  row.sources.setAttribute("aria-hidden", "true");
  more.append(row.about, row.sources);
  if (!life.foreign) more.append(reveal(row));
  item.append(head, more);
  rows.set(life.n, row);
  return row;
}

const blockCount = blocks => blocks === 1 ? "1 block" : `${count(blocks)} blocks`;

function update(row, life) {
  row.life = life;
  row.dot.style.background = colour(life.n);
  row.item.dataset.state = life.state;
  const state = ALIVE[life.state] ?? (life.finish === "abort" ? "aborted" : life.finish === "error" ? "failed" : "done");
  if (row.state.textContent !== state) row.state.textContent = state;
  let told = blockCount(life.blocks);
  if (!life.foreign) told = life.state === "prefill" || !life.output ? `${count(Math.min(life.computed, life.prompt))} / ${count(life.prompt)} in` : `${count(life.prompt)} in, ${count(life.output)} out`;
  if (row.count.textContent !== told) row.count.textContent = told;
  drawLane(row.lane, life, live.late);
  if (row.more.hidden) return;
  const parts = life.foreign ? ["another key's request"] : [
    `id ${life.id}`, `prompt ${count(life.prompt)} tokens, ${sourceWords(life)}`,
    `output ${count(life.output)} of at most ${count(life.limit)}`,
  ];
  parts.push(blockCount(life.blocks), `preempted ${life.preemptions} times`);
  if (life.drafted) parts.push(`draft tokens: ${count(life.accepted)} accepted, ${count(life.drafted - life.accepted)} refused`);
  if (life.finish) parts.push(`finish: ${life.finish}`);
  row.about.textContent = parts.join(" · ");
  if (!life.foreign) fillSources(row.sources, life);
  if (row.words && performance.now() - row.asked > 1000 && life.ended < 0) fetchWords(row);
}

// The text of a request is fetched and shown only when the viewer opens it.
function reveal(row) {
  const bar = make("div", "bar"), button = make("button", "quiet", "Show prompt and output");
  button.type = "button";
  button.disabled = Boolean(live.seen.no_words);
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
  bar.append(button, live.seen.no_words || "");
  return bar;
}

async function fetchWords(row) {
  row.asked = performance.now();
  try {
    const words = await (await ask(`ui/words?n=${row.life.n}&engine=${live.engine}`)).json();
    const more = left => left ? `, without ${count(left)} tokens` : "";
    row.words?.replaceChildren(
      make("span", "", "Prompt" + (words.prompt_left ? " (its beginning" + more(words.prompt_left) + ")" : "")), make("pre", "", words.prompt),
      make("span", "", "Output" + (words.output_left ? " (its end" + more(words.output_left) + ")" : "")), make("pre", "", words.output),
    );
  } catch (error) {
    row.words?.replaceChildren(make("span", "", error.message));
  }
}


export function forgetRows() {
  for (const row of rows.values()) row.item.remove();
  rows.clear();
}
