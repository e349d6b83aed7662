"""GET /: a page with a chat box and a live view of the engine. Self-contained; nothing is fetched from elsewhere.

The page holds no data: it asks the routes that everybody asks, with the key that its reader types in. Knows HTML and
the shape of `engine/view.py`. Prompts of others are not in it.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from quire.server.bodies import json_response
from quire.server.health import state_of

STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8882;--mark:#3b82f6}
*{box-sizing:border-box}
body{margin:0;font:15px/1.45 system-ui,sans-serif;display:grid;grid-template-columns:minmax(20em,1fr) minmax(24em,1fr);height:100vh}
section{padding:1em;overflow:auto;display:flex;flex-direction:column;gap:.7em;min-width:0}
section+section{border-left:1px solid var(--line)}
h1{font-size:1.1em;margin:0}
#talk{flex:1;overflow:auto;display:flex;flex-direction:column;gap:.5em}
.said{padding:.5em .8em;border-radius:.6em;white-space:pre-wrap;overflow-wrap:anywhere;max-width:90%}
.user{align-self:flex-end;background:var(--mark);color:#fff}
.assistant{align-self:flex-start;background:var(--soft)}
.error{color:#dc2626}
form{display:flex;gap:.5em}
textarea,input{font:inherit;padding:.4em;border:1px solid var(--line);border-radius:.4em;background:transparent;color:inherit}
textarea{flex:1;resize:none}
button{font:inherit;padding:.4em 1em;border:0;border-radius:.4em;background:var(--mark);color:#fff}
#tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(9em,1fr));gap:.5em}
#tiles div{background:var(--soft);border-radius:.5em;padding:.4em .7em}
#tiles b{display:block;font-size:1.25em}
canvas{width:100%;border:1px solid var(--line);border-radius:.3em}
table{border-collapse:collapse;width:100%;font-size:.85em}
td,th{text-align:left;padding:.15em .6em .15em 0;border-bottom:1px solid var(--line)}
progress{width:7em}
@media(max-width:50em){body{grid-template-columns:1fr;height:auto}section+section{border-left:0}}
"""

BODY = """
<section><h1>Quire <small id="name"></small></h1><div id="talk"></div>
<form id="ask"><textarea id="words" rows="2" placeholder="Say something" autofocus></textarea><button id="go">Send</button></form>
<form id="keyed"><input id="key" type="password" placeholder="API key, if the server needs one" autocomplete="off"><button type="button" id="forget">New conversation</button></form></section>
<section><h1>Engine <small id="how"></small></h1><div id="tiles"></div>
<canvas id="speed" height="60"></canvas><small>tokens a second</small>
<canvas id="blocks" height="160"></canvas><small id="legend"></small>
<table><thead><tr><th>row<th>request<th>state<th>prompt<th>output<th></tr></thead><tbody id="requests"></tbody></table></section>
"""

SCRIPT = """
const at = id => document.getElementById(id), key = at("key"), talk = at("talk");
key.value = sessionStorage.getItem("key") || "";
key.onchange = () => { sessionStorage.setItem("key", key.value); start(); };
const headers = () => key.value ? {"Content-Type": "application/json", "Authorization": "Bearer " + key.value} : {"Content-Type": "application/json"};
let messages = [], model = null, running = null;

function say(who, text) {
  const box = document.createElement("div");
  box.className = "said " + who; box.textContent = text;
  talk.append(box); talk.scrollTop = talk.scrollHeight;
  return box;
}

async function start() {
  try {
    const found = await fetch("v1/models", {headers: headers()});
    model = found.ok ? (await found.json()).data[0].id : null;
    at("name").textContent = model || (found.status === 401 ? "needs a key" : "not ready");
  } catch { at("name").textContent = "does not answer"; }
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    left += value;
    let end;
    while ((end = left.indexOf("\\n\\n")) >= 0) {
      const event = left.slice(0, end); left = left.slice(end + 2);
      if (event.startsWith("data: ") && event !== "data: [DONE]") yield JSON.parse(event.slice(6));
    }
  }
}

at("ask").onsubmit = async submit => {
  submit.preventDefault();
  if (running) { running.abort(); return; }
  const words = at("words").value.trim();
  if (!words) return;
  if (!model) await start();
  at("words").value = "";
  say("user", words);
  messages.push({role: "user", content: words});
  const box = say("assistant", "");
  running = new AbortController(); at("go").textContent = "Stop";
  try {
    const answer = await fetch("v1/chat/completions", {method: "POST", headers: headers(), signal: running.signal,
      body: JSON.stringify({model, messages, stream: true})});
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      box.textContent += event.choices[0]?.delta.content ?? "";
      talk.scrollTop = talk.scrollHeight;
    }
    messages.push({role: "assistant", content: box.textContent});
  } catch (error) {
    if (error.name === "AbortError") messages.push({role: "assistant", content: box.textContent});
    else { messages.pop(); box.classList.add("error"); box.textContent += " " + error.message; }
  }
  running = null; at("go").textContent = "Send";
};
at("words").onkeydown = press => { if (press.key === "Enter" && !press.shiftKey) { press.preventDefault(); at("ask").requestSubmit(); } };
at("keyed").onsubmit = submit => submit.preventDefault();
at("forget").onclick = () => { messages = []; talk.replaceChildren(); };

const colour = row => `hsl(${(row * 137) % 360} 70% 55%)`;
function context(canvas) {
  canvas.width = canvas.clientWidth; const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, canvas.width, canvas.height); return pen;
}
function drawBlocks(cells) {
  const canvas = at("blocks"), pen = context(canvas);
  const size = Math.max(2, Math.floor(Math.sqrt(canvas.width * canvas.height / cells.length)));
  const columns = Math.max(1, Math.floor(canvas.width / size));
  cells.forEach((cell, i) => {
    pen.fillStyle = cell >= 0 ? colour(cell) : cell === -1 ? "#8882" : cell === -2 ? "#888a" : "#111";
    pen.fillRect(i % columns * size, Math.floor(i / columns) * size, size - 1, size - 1);
  });
}
const speeds = [];
function drawSpeed() {
  const canvas = at("speed"), pen = context(canvas), most = Math.max(1, ...speeds);
  pen.fillStyle = "#3b82f6";
  speeds.forEach((speed, i) => pen.fillRect(i * canvas.width / 120, canvas.height * (1 - speed / most), canvas.width / 120 - 1, canvas.height));
}
function cell(row, content) { const box = row.insertCell(); if (content instanceof Node) box.append(content); else box.textContent = content; }
function drawRequests(requests) {
  const body = at("requests"); body.replaceChildren();
  for (const one of requests.slice(0, 60)) {
    const row = body.insertRow(), bar = document.createElement("progress");
    bar.max = one.limit; bar.value = one.output;
    cell(row, one.row < 0 ? "" : one.row); cell(row, one.id.slice(0, 22)); cell(row, one.state);
    cell(row, `${Math.min(one.computed, one.prompt)} / ${one.prompt}` + (one.cached ? ` (${one.cached} cached)` : ""));
    cell(row, `${one.output} / ${one.limit}`); cell(row, bar);
    if (one.row >= 0) row.cells[0].style.color = colour(one.row);
  }
}
function tiles(found) {
  const box = at("tiles"); box.replaceChildren();
  for (const [name, value] of found) {
    const tile = document.createElement("div"), number = document.createElement("b");
    number.textContent = value; tile.append(number, name); box.append(tile);
  }
}
let before = null;
async function look() {
  if (document.visibilityState === "visible") try {
    const found = await fetch("ui/state", {headers: headers()});
    if (!found.ok) { at("how").textContent = found.status === 401 ? "needs a key" : "not ready"; }
    else {
      const {engine, memory} = await found.json(), stats = engine.stats, now = performance.now();
      if (before) {
        const seconds = (now - before.now) / 1000;
        speeds.push(Math.max(0, stats.generation_tokens - before.tokens) / seconds);
        if (speeds.length > 120) speeds.shift();
      }
      before = {now, tokens: stats.generation_tokens};
      const hits = stats.prefix_queries ? 100 * stats.prefix_hits / stats.prefix_queries : 0;
      at("how").textContent = "";
      tiles([["running", stats.running], ["waiting", stats.waiting], ["tokens a second", Math.round(speeds.at(-1) || 0)],
        ["KV blocks in use", (100 * stats.kv_usage).toFixed(1) + " %"], ["prefix cache hits", hits.toFixed(1) + " %"],
        ["preemptions", stats.preemptions], ["steps", stats.steps], ["memory", (memory / 2 ** 30).toFixed(2) + " GiB"]]);
      at("legend").textContent = `${stats.num_blocks} KV blocks of ${stats.block_size} tokens` + (engine.blocks_a_cell > 1 ? `, ${engine.blocks_a_cell} a cell` : "") + ": by request; black shared, dark cached, light free";
      drawBlocks(engine.cells); drawSpeed(); drawRequests(engine.requests);
    }
  } catch { at("how").textContent = "does not answer"; }
  setTimeout(look, 500);
}
start(); look();
"""


async def page(request: Request) -> Response:
    """A page to chat, and to watch the engine."""
    nonce = secrets.token_urlsafe(16)
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Quire</title>'
        '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f'<style nonce="{nonce}">{STYLE}</style></head><body>{BODY}'
        f'<script nonce="{nonce}">{SCRIPT}</script></body></html>'
    )
    policy = (
        f"default-src 'none'; style-src 'nonce-{nonce}' 'unsafe-inline'; script-src 'nonce-{nonce}';"
        " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
    return Response(text, media_type="text/html", headers=headers)


async def ui_state(request: Request) -> Response:
    """What the page shows of the engine."""
    state = state_of(request)
    engine = state.serving()
    found = await engine.call("view")
    return json_response({"engine": found, "memory": resident_bytes(engine.pid)})


def resident_bytes(pid: int) -> int:
    """Memory of the engine's process; 0 where it cannot be known."""
    try:
        for line in Path(f"/proc/{pid or 'self'}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0
