// The tiers of KV blocks: what each one uses, gave and failed to give; and where a prompt's tokens came from.

import {$, make, put} from "./dom.js";
import {bytes, count} from "./live_state.js";

const NAMES = {device: "KV cache", host: "Swap space", disk: "Disk", redis: "Redis"};
const nameOf = kind => NAMES[kind] ?? kind;
const rows = new Map();  // by kind

// Draw the list, if the engine has tiers. `cache`: {used, limit} bytes of the KV cache.
export function drawTiers(stats, cache) {
  const counts = stats.counts, kinds = Object.keys(counts).filter(name => name.startsWith("kv_tier_queries:")).map(name => name.split(":")[1]);
  $("tiers-panel").hidden = kinds.length === 0;
  if (!kinds.length) return;
  const of = (name, kind) => counts[`${name}:${kind}`] ?? 0;
  const loaded = kinds.reduce((total, kind) => total + of("kv_cached_tokens", kind), 0);
  tell("device", cache.used, cache.limit, [`${count(stats.prefix_hits - loaded)} prompt tokens found`]);
  for (const kind of kinds) {
    const tried = of("kv_tier_queries", kind), told = [
      `${count(of("kv_cached_tokens", kind))} prompt tokens found`,
      `${count(of("kv_tier_hits", kind))} of ${count(tried)} blocks loaded`,
      `${bytes(of("kv_load_bytes", kind))} read`, `${bytes(of("kv_store_bytes", kind))} written`,
    ];
    const errors = of("kv_tier_errors", kind);
    tell(kind, of("kv_tier_bytes", kind), of("kv_tier_limit", kind), told, errors);
  }
  const loads = counts.kv_active_loads, saves = counts.kv_active_saves;
  put("tiers-note", [loads && `${numbered(loads, "request")} loading`, saves && `${numbered(saves, "block")} to be written`].filter(Boolean).join(", "));
  for (const [kind, row] of rows) if (kind !== "device" && !kinds.includes(kind)) { row.item.remove(); rows.delete(kind); }
}

const numbered = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;

function tell(kind, used, limit, told, errors = 0) {
  const row = rows.get(kind) ?? newRow(kind);
  row.meter.hidden = !limit;
  row.meter.value = limit ? Math.min(1, used / limit) : 0;
  set(row.used, limit ? `${bytes(used)} of ${bytes(limit)}` : used ? bytes(used) : "");
  set(row.told, told.join(" · "));
  set(row.errors, errors ? `${count(errors)} unreadable` : "");
}

function set(element, text) { if (element.textContent !== text) element.textContent = text; }

function newRow(kind) {
  const item = make("li"), name = make("b"), row = {item, meter: make("meter"), used: make("span", "used"), told: make("span", "told"), errors: make("span", "errors")};
  name.append(mark(kind), nameOf(kind));
  [row.meter.min, row.meter.max] = [0, 1];
  row.meter.setAttribute("aria-label", `${nameOf(kind)} in use`);
  item.append(name, row.meter, row.used, row.told, row.errors);
  $("tiers").append(item);
  rows.set(kind, row);
  return row;
}

function mark(kind) {
  const square = make("i");
  square.dataset.kind = kind;
  return square;
}

// Where a prompt's tokens came from: [kind, tokens], the nearest first.
export function sources(life) {
  const loaded = Object.entries(life.loaded ?? {}), rest = loaded.reduce((left, [, tokens]) => left - tokens, life.hit);
  return [["device", rest], ...loaded].filter(([, tokens]) => tokens > 0);
}

export function sourceWords(life) {
  const found = sources(life).map(([kind, tokens]) => `${count(tokens)} from ${kind === "device" ? "the KV cache" : kind === "host" ? "the swap space" : nameOf(kind).toLowerCase()}`);
  return found.length ? found.join(", ") : "none of them cached";
}

// A bar of a prompt: its sources, then what was computed.
export function fillSources(bar, life) {
  const parts = [...sources(life), ["computed", life.prompt - life.hit]];
  const text = JSON.stringify(parts);
  if (bar.dataset.parts === text) return;
  bar.dataset.parts = text;
  bar.hidden = !life.hit;
  bar.replaceChildren(...parts.map(([kind, tokens]) => {
    const part = mark(kind);
    part.style.flexGrow = tokens;
    return part;
  }));
}
