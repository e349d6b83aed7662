// Requests to the server, with the API key.

import {$, emit, tab} from "./dom.js";

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

let key = tab.get("key");
let wasAsked = false;

// The server's answer; raises Refused with the server's message, or AbortError.
export async function ask(path, {body, signal} = {}) {
  const headers = {}, used = key;
  if (key) headers.Authorization = "Bearer " + key;
  const isForm = body instanceof FormData;
  if (body && !isForm) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, {method: body ? "POST" : "GET", headers, signal, cache: "no-store", body: isForm ? body : body && JSON.stringify(body)});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the server does not answer");
  }
  if (answer.ok) return answer;
  const text = await answer.text();
  let message = text || answer.statusText;
  try { message = JSON.parse(text).error.message; } catch { /* perhaps a proxy's answer */ }
  if (answer.status === 401 && used === key) needKey();  // not if another key was entered meanwhile
  throw new Refused(answer.status, message);
}

function needKey() {
  $("key-open").hidden = false;
  if (wasAsked) return;
  wasAsked = true;  // opens once by itself, then on request
  $("key-why").textContent = key ? "The server does not know this key." : "This server needs an API key. It is kept in this tab only, and sent to this server only.";
  $("key-dialog").showModal();
}

export const hasKey = () => Boolean(key);

$("key-open").hidden = !key;
$("key-open").onclick = () => $("key-dialog").showModal();
$("key-cancel").onclick = () => $("key-dialog").close();
$("key").value = key;
$("key-form").onsubmit = event => {
  event.preventDefault();
  key = $("key").value.trim();
  tab.set("key", key);
  wasAsked = false;
  $("key-dialog").close();
  emit("key");
};
