// Elements, and the signals between the parts of the page. Text from the server or a model becomes a text node, never markup.

export const $ = id => document.getElementById(id);

export function make(name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}

// Change a text only if it differs: screen readers announce each change.
export function put(id, text) { if ($(id).textContent !== text) $(id).textContent = text; }

export function addButton(parent, label, does, className = "act") {
  const button = make("button", className, label);
  button.type = "button";
  button.onclick = does;
  parent.append(button);
  return button;
}

export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // no permission, or an address without TLS: the old way
    const area = make("textarea", "hidden", text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const label = button.textContent;
  if (label === "Copied") return;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = label; }, 1500);
}

export function download(name, text) {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([text], {type: "application/json"}));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Signals: "key" (another API key), "ready" (whether the server takes requests), "models" (their list), "paint" (draw
// again), "open" (a conversation), "ask" (an example), "defaults" (of the server), "attached" (files, or a recording).
const signals = new EventTarget();
export const emit = (name, detail) => signals.dispatchEvent(new CustomEvent(name, {detail}));
export const on = (name, does) => signals.addEventListener(name, event => does(event.detail));

// What is kept in this tab. A browser may forbid storage; then the page stores nothing.
export const tab = {
  get(name) { try { return sessionStorage.getItem(name) || ""; } catch { return ""; } },
  set(name, value) { try { sessionStorage.setItem(name, value); } catch { /* not stored */ } },
};
