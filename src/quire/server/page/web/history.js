// The drawer of kept conversations: search, open, export, import, delete.

import {$, addButton, download, emit, make, on, put} from "./dom.js";
import {isKept, loadAll, remove, removeAll, save} from "./storage.js";
import {checked, LIMITS, plainCopy} from "./tree.js";

const SHOWN = 200;
const MAX_FILE = 256 << 20;  // bytes of an import
let kept = [], current = "";

const text = conversation => [conversation.title, ...conversation.turns.flatMap(turn => [turn.ask, turn.answer])].join("\n").toLowerCase();

async function refresh() {
  kept = (await loadAll()).sort((a, b) => b.changed - a.changed);
  if (!await isKept()) put("history-about", "This browser keeps nothing (a private window?): they are gone with this tab.");
  list();
}

function list() {
  const wanted = $("history-search").value.trim().toLowerCase();
  const matching = wanted ? kept.filter(conversation => text(conversation).includes(wanted)) : kept;
  $("history-list").replaceChildren(...matching.slice(0, SHOWN).map(entry));
  $("history-empty").hidden = matching.length > 0;
  put("history-empty", wanted ? "No conversation has this text." : "No conversation.");
  if (matching.length > SHOWN) put("history-note", `The newest ${SHOWN} of ${matching.length} are shown; search for others.`);
}

function entry(conversation) {
  const item = make("li"), title = conversation.title || "(no title)";
  const open = addButton(item, "", () => { $("history").close(); emit("open", conversation); }, "entry");
  open.append(make("b", "", title), make("span", "", new Date(conversation.changed).toLocaleString()));
  if (conversation.id === current) open.setAttribute("aria-current", "true");
  addButton(item, "Export", () => exportAs(`quire-${conversation.id.slice(0, 8)}.json`, [conversation])).setAttribute("aria-label", `Export ${title}`);
  addButton(item, "Delete", async () => {
    await remove(conversation.id);
    if (conversation.id === current) emit("open", null);
    await refresh();
    $("history-search").focus();
  }).setAttribute("aria-label", `Delete ${title}`);
  return item;
}

async function exportAs(name, conversations) {
  try {
    download(name, JSON.stringify({quire: 1, conversations: await Promise.all(conversations.map(plainCopy))}, null, 1));
  } catch (error) { put("history-note", `Nothing was exported: ${error.message}`); }
}

async function importFile(file) {
  if (file.size > MAX_FILE) throw new Error(`the file has more than ${MAX_FILE >> 20} MiB`);
  let given;
  try { given = JSON.parse(await file.text()); } catch { throw new Error("the file is not JSON"); }
  if (!Array.isArray(given?.conversations) || given.conversations.length > LIMITS.conversations) throw new Error("the file has no list of conversations; export makes such files");
  const read = given.conversations.map(checked);  // all or none
  for (const conversation of read) await save(conversation);
  return read.length;
}

export function startHistory() {
  on("current", id => { current = id; });
  $("history-open").onclick = () => { put("history-note", ""); $("history").showModal(); refresh(); };
  $("history-close").onclick = () => $("history").close();
  $("history-search").oninput = list;
  $("history-export").onclick = () => exportAs("quire-conversations.json", kept);
  $("history-import").onclick = () => $("history-file").click();
  $("history-file").onchange = async event => {
    const [file] = event.target.files;
    event.target.value = "";
    if (!file) return;
    try { put("history-note", `Imported: ${await importFile(file)}.`); } catch (error) { put("history-note", `Nothing was imported: ${error.message}.`); }
    await refresh();
  };
  const clear = $("history-clear");
  clear.onclick = async () => {  // the second press deletes
    if (clear.textContent !== "Really delete all?") { clear.textContent = "Really delete all?"; return; }
    clear.textContent = "Delete all";
    await removeAll();
    emit("open", null);
    await refresh();
  };
  clear.onblur = () => { clear.textContent = "Delete all"; };
}
