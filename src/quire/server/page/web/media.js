// Files of messages: pictures, videos and sound. Of which kind they are, how they are shown, and the parts of a request.

import {make} from "./dom.js";

export const NAMES = {image: "pictures", video: "videos", audio: "sound"};
const ENDINGS = {image: /\.(png|jpe?g|webp|gif|bmp)$/i, audio: /\.(wav|flac|mp3|ogg|opus|oga|m4a|aac|weba)$/i, video: /\.(mp4|webm|mkv|mov)$/i};
const ELEMENTS = {image: "img", audio: "audio", video: "video"};
const TYPE = /^(image|audio|video)\/[\w.+-]{1,80}$/;
const urls = new Map();  // blob -> its URL, while it is shown

// The kind of a file for a model that takes `kinds`; null: the model takes no such file. Videos have sound too.
export function kindOf({name, type}, kinds) {
  const found = TYPE.exec(type)?.[1] ?? Object.keys(ENDINGS).find(kind => ENDINGS[kind].test(name));
  if (found === "video" && !kinds.includes("video")) return kinds.includes("audio") ? "audio" : null;
  return kinds.includes(found) ? found : null;
}

export function showMedia({kind, name, blob}) {
  if (!urls.has(blob)) urls.set(blob, URL.createObjectURL(blob));
  const element = make(ELEMENTS[kind], "media");
  if (kind === "image") element.alt = name;
  else {
    element.controls = true;
    element.preload = "metadata";
    element.setAttribute("aria-label", name);
  }
  element.src = urls.get(blob);
  return element;
}

// The files that are not in this list are no longer shown.
export function forgetMedia(kept) {
  const blobs = new Set(kept.map(one => one.blob));
  for (const [blob, url] of urls) if (!blobs.has(blob)) { URL.revokeObjectURL(url); urls.delete(blob); }
}

export function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("the browser cannot read the file any more: attach it again"));
    reader.readAsDataURL(blob);
  });
}

// The part of a chat message that has the file.
export async function mediaPart({kind, name, blob}) {
  const url = await dataUrl(blob);
  if (kind !== "audio") return {type: `${kind}_url`, [`${kind}_url`]: {url}};
  return {type: "input_audio", input_audio: {data: url.slice(url.indexOf(",") + 1), format: name.split(".").pop().toLowerCase()}};
}

// A file of a data URL, as the export of conversations has them. Raises an Error if it is none.
export function blobOf(url) {
  const [, type, data] = /^data:([^;,]*);base64,([A-Za-z0-9+/]*=*)$/.exec(url) ?? [];
  if (!TYPE.test(type)) throw new Error("a file must be a data URL of a picture, a video or sound");
  return new Blob([Uint8Array.from(atob(data), letter => letter.charCodeAt(0))], {type});
}
