// Shared by the chat and the live view: elements, the key, requests, theme, tabs.
// Text from the server or a model becomes a text node, never markup.

const $ = id => document.getElementById(id);

function make(name, className = "", text = "") {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = text;
  return element;
}

// A browser may forbid storage; then the page stores nothing.
const store = {
  get(name) { try { return sessionStorage.getItem(name) || ""; } catch { return ""; } },
  set(name, value) { try { sessionStorage.setItem(name, value); } catch { /* not stored */ } },
};

class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

let key = store.get("key");

// The server's answer; raises Refused with the server's message, or AbortError.
async function ask(path, {body, signal} = {}) {
  const headers = {};
  if (key) headers.Authorization = "Bearer " + key;
  if (body) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, {method: body ? "POST" : "GET", headers, signal, cache: "no-store", body: body && JSON.stringify(body)});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the server does not answer");
  }
  if (answer.ok) return answer;
  const text = await answer.text();
  let message = text || answer.statusText;
  try { message = JSON.parse(text).error.message; } catch { /* perhaps a proxy's answer */ }
  if (answer.status === 401) needKey();
  throw new Refused(answer.status, message);
}

function tell(kind, text) {
  const status = $("status");
  if (status.textContent !== text) status.textContent = text;
  status.dataset.kind = kind;
}

// -- the key -------------------------------------------------------------------------------------
let asked = false;

function needKey() {
  if (asked) return;
  asked = true;  // opens once by itself, then on request
  $("key-why").textContent = key ? "The server does not know this key." : "This server needs an API key. It is kept in this tab only, and sent to this server only.";
  $("key-dialog").showModal();
}

$("key-open").onclick = () => $("key-dialog").showModal();
$("key-cancel").onclick = () => $("key-dialog").close();
$("key-form").onsubmit = event => {
  event.preventDefault();
  key = $("key").value.trim();
  store.set("key", key);
  asked = false;
  $("key-dialog").close();
  lookSoon();
  awaitModel();
};
$("key").value = key;

// -- theme and tabs ------------------------------------------------------------------------------
const THEMES = ["auto", "light", "dark"];

function wear(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").textContent = "◐ " + theme;
  $("theme").setAttribute("aria-label", "Theme: " + theme);
  store.set("theme", theme);
  redraw();
}

$("theme").onclick = () => wear(THEMES[(THEMES.indexOf(store.get("theme") || "auto") + 1) % THEMES.length]);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());

for (const button of $("tabs").children) {
  button.onclick = () => {
    document.body.dataset.tab = button.dataset.to;
    for (const other of $("tabs").children) other.setAttribute("aria-pressed", String(other === button));
    lookSoon();
  };
}
