// Whether the server takes requests, how far the load is, and the names of its models.

import {$, emit, on, put, tab} from "./dom.js";
import {tell} from "./frame.js";
import {ask} from "./server.js";

let ready = false, timer = null;

export const isReady = () => ready;

// The name that a request has as its model; null: the server has a single one.
export const chosenModel = () => $("models").hidden ? null : $("served").value;
export const shownModel = () => chosenModel() ?? $("model").textContent;

export function setReady(now) {
  if (now) $("loading").hidden = true;
  if (ready === now) return;
  ready = now;
  emit("ready", now);
}

function listModels(cards) {
  const wanted = $("served").value || tab.get("model"), names = cards.map(card => card.id);
  const options = list => list.map(card => new Option(card.id, card.id));
  const adapters = cards.filter(card => card.parent);
  const group = document.createElement("optgroup");
  group.label = "Adapters";
  group.append(...options(adapters));
  $("served").replaceChildren(...options(cards.filter(card => !card.parent)), ...(adapters.length ? [group] : []));
  $("served").value = names.includes(wanted) ? wanted : names[0];
  $("models").hidden = names.length < 2;
  $("model").hidden = names.length > 1;
  put("model", names[0]);
  emit("models");
}

$("served").onchange = () => { tab.set("model", $("served").value); emit("models"); };
$("served").onfocus = async () => {  // adapters come and go
  try {
    const cards = (await (await ask("v1/models")).json()).data;
    if (cards.map(card => card.id).join("\n") !== [...$("served").options].map(option => option.value).join("\n")) listModels(cards);
  } catch { /* the list stays */ }
};

// Ask until the model is loaded.
export async function awaitModel() {
  clearTimeout(timer);
  try {
    listModels((await (await ask("v1/models")).json()).data);
    if ($("status").dataset.kind !== "good") tell("good", "ready");
    setReady(true);
  } catch (error) {
    setReady(false);
    tell(error.status === 503 ? "wait" : "bad", error.status === 401 ? "needs a key" : error.message);
    if (error.status === 401) return;
    await showLoading(error);
    timer = setTimeout(awaitModel, 1000);
  }
}

export function lost() { if (ready) awaitModel(); }

// In the middle of the page: the stage of the load and its share, or that the server is gone.
async function showLoading(error) {
  let health = {};
  try { health = await (await fetch("health", {cache: "no-store"})).json(); } catch { /* no body: gone, or ready just now */ }
  const gone = error.status === 0;
  put("loading-title", gone ? "The server does not answer" : "The model is being loaded");
  put("loading-stage", gone ? "This page asks again every second." : health.stage ?? error.message);
  const bar = $("loading-bar");
  bar.hidden = gone;
  if (health.progress > 0) bar.value = health.progress;
  else bar.removeAttribute("value");
  $("loading").hidden = false;
}

on("key", awaitModel);
