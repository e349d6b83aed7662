// What the server says of its model: the default parameters, and what it takes beside text.

import {emit, on} from "./dom.js";
import {isReady} from "./readiness.js";
import {ask} from "./server.js";

// media: of "image", "video" and "audio". speech: it writes sound down, and does not chat. seconds: of the longest sound.
let takes = {media: [], speech: false, seconds: 0, mib: 0};

export const taken = () => takes;

export async function refreshDefaults() {
  if (!isReady()) return;
  const given = await (await ask("ui/defaults")).json();
  takes = given.takes;
  emit("defaults", given);
}

export function startDefaults() { on("ready", now => { if (now) refreshDefaults().catch(() => {}); }); }
