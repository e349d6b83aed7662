// The files beside the message box: chosen, dropped, pasted or recorded.

import {$, addButton, emit, make, on, put} from "./dom.js";
import {taken} from "./defaults.js";
import {kindOf, NAMES, showMedia} from "./media.js";
import {record} from "./recorder.js";

const MOST = 16, MIB = 1 << 20, MOST_MIB = 64;
let attached = [];
let recording = null;  // what `record` gives, while it runs
let starting = false;

export const attachments = () => attached;
export const isRecording = () => recording !== null;

// Attach these in the place of all others.
export function setAttachments(media) {
  attached = [...media];
  $("attached").replaceChildren(...attached.map(chip));
  emit("attached");
}

// `{kind, name, blob}` as a small picture or player, with a button that removes it.
function chip(one) {
  const item = make("li");
  item.append(showMedia(one), make("span", "", `${one.name} · ${size(one.blob.size)}`));
  addButton(item, "Remove", () => {
    setAttachments(attached.filter(other => other !== one));
    ($("attached").querySelector("button") ?? $("attach")).focus();
  }, "quiet").setAttribute("aria-label", `Remove ${one.name}`);
  return item;
}

const size = bytes => bytes < MIB ? `${Math.ceil(bytes / 1024)} KiB` : `${(bytes / MIB).toFixed(1)} MiB`;
const tell = text => put("attach-note", text);

function takes() {
  const {media, speech} = taken();
  return speech ? ["audio"] : media;
}

export function attach(files) {
  const kinds = takes(), added = [];
  tell("");
  for (const file of files) {
    const kind = kindOf(file, kinds), most = kind === "audio" ? taken().mib : MOST_MIB;
    if (!kind) tell(`${file.name}: this model takes ${kinds.map(one => NAMES[one]).join(", ") || "text only"}`);
    else if (file.size > most * MIB) tell(`${file.name} has ${size(file.size)}; the most is ${most} MiB`);
    else if (!file.size) tell(`${file.name} is empty`);
    else if (attached.length + added.length >= MOST) tell(`a message has at most ${MOST} files`);
    else added.push({kind, name: file.name.slice(-200), blob: file});
  }
  if (added.length) setAttachments([...attached, ...added]);
}

// -- the microphone ------------------------------------------------------------------------------
const clock = seconds => `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;

async function toggleRecording() {
  if (recording) { await stopRecording(); return; }
  if (starting) return;
  starting = true;  // until the reader allows it; a button that is disabled would lose the focus
  tell("");
  try {
    recording = await record((seconds, peak) => {
      if (!recording) return;
      put("record", `Stop ${clock(seconds)}`);
      $("level").value = Math.sqrt(peak);
      if (seconds >= taken().seconds) stopRecording().then(() => tell(`the recording ended after ${taken().seconds} s: the model hears no more at once`));
    });
  } catch (error) {
    tell(`No recording: ${error.message}`);
  }
  starting = false;
  markRecording();
}

async function stopRecording() {
  const ending = recording;
  recording = null;
  markRecording();
  const blob = await ending.stop(), name = `recording ${new Date().toLocaleTimeString()}.wav`;
  attach([new File([blob], name, {type: blob.type})]);
}

function cancelRecording() {
  recording.cancel();
  recording = null;
  markRecording();
  tell("The recording is dropped.");
}

function markRecording() {
  $("record").classList.toggle("stop", isRecording());
  put("record", isRecording() ? "Stop 0:00" : "Record");
  $("level").hidden = !isRecording();
  emit("attached");
}

// -- events --------------------------------------------------------------------------------------
function show() {
  const kinds = takes();
  $("attach").hidden = !kinds.length;
  $("record").hidden = !kinds.includes("audio");
  $("attach").title = `Choose ${kinds.map(kind => NAMES[kind]).join(", ")}; or drop or paste files`;
  $("attach-file").accept = [...kinds.map(kind => `${kind}/*`), ...(kinds.includes("audio") ? [".flac", ".ogg", ".opus", ".m4a", "video/mp4", "video/webm"] : [])].join();
}

export function startAttachments() {
  $("attach").onclick = () => $("attach-file").click();
  $("attach-file").onchange = event => {
    attach([...event.target.files]);
    event.target.value = "";
  };
  $("record").onclick = toggleRecording;
  $("chat").addEventListener("dragover", event => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();  // else the browser opens the file in the place of the page
    $("chat").classList.add("drop");
  });
  for (const name of ["dragleave", "drop"]) $("chat").addEventListener(name, () => $("chat").classList.remove("drop"));
  $("chat").addEventListener("drop", event => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    attach([...event.dataTransfer.files]);
  });
  document.addEventListener("paste", event => {
    const {files, types} = event.clipboardData;
    if (!files.length || types.includes("text/plain") || document.querySelector("dialog[open]")) return;
    event.preventDefault();
    attach([...files]);
  });
  document.addEventListener("keydown", event => {
    if (event.key === "Escape" && recording && !document.querySelector("dialog[open]")) cancelRecording();
  });
  addEventListener("pagehide", () => recording?.cancel());
  on("defaults", show);
  show();
}
