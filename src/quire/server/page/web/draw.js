// Draws the steps, a request's lane and the speed. Knows canvases. Does not know the server.

import {on} from "./dom.js";

export const FREE = 0, CACHED = 1, SHARED = 2, OWNED = 3;
const HUES = 8, SPAN_MS = 20000, GUTTER = 34;  // of the y axis, in px

let paints = null;  // colours of the current theme
on("paint", () => { paints = null; });

export function paint(name) {
  paints ??= getComputedStyle(document.documentElement);
  return paints.getPropertyValue("--" + name).trim();
}

// The same request has the same colour everywhere; the next eight have others.
export const colour = number => paint("hue-" + number % HUES);
const pale = number => `color-mix(in srgb, ${colour(number)} 38%, transparent)`;

// A clear canvas in CSS pixels, sharp on any screen.
export function pen(canvas) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const to = canvas.getContext("2d");
  to.setTransform(ratio, 0, 0, ratio, 0, 0);
  to.clearRect(0, 0, width, height);
  return [to, width, height];
}

// Solid: output. Striped: a chunk of a prompt.
function bar(to, x, y, width, height, number, isPrompt) {
  to.fillStyle = isPrompt ? pale(number) : colour(number);
  to.fillRect(x, y, width, height);
  if (!isPrompt) return;
  to.fillStyle = colour(number);
  for (let at = 0; at < width; at += 4) to.fillRect(x + at, y, Math.min(1.5, width - at), height);
}

function write(to, text, x, y, align) {
  to.font = "11px system-ui, sans-serif";
  to.textAlign = align;
  to.textBaseline = "middle";
  to.fillStyle = paint("dim");
  to.fillText(text, x, y);
}

// Logarithmic: a chunk of a prompt has hundreds of tokens, a row that decodes has one.
function axis(to, width, height, y, most) {
  const ticks = [1, 10, 100, 1000, 10000].filter(tokens => tokens <= most);
  if (ticks.length < 2) ticks.push(most);
  for (const tokens of ticks) {
    to.fillStyle = paint("line");
    to.fillRect(GUTTER, Math.round(y(tokens)), width - GUTTER, 1);
    write(to, String(tokens), GUTTER - 6, Math.max(6, y(tokens)), "right");
  }
  to.fillStyle = paint("line");
  to.fillRect(GUTTER, height - 1, width - GUTTER, 1);
}

export function drawSteps(canvas, steps, chosen) {
  const [to, width, height] = pen(canvas), wide = 7, shown = steps.slice(-Math.max(1, Math.floor((width - GUTTER) / (wide + 1))));
  const sum = step => step.work.reduce((total, [, tokens]) => total + tokens, step.rest);
  const most = Math.max(4, ...shown.map(sum)), tall = tokens => (height - 8) * Math.log2(1 + tokens) / Math.log2(1 + most);
  axis(to, width, height, tokens => height - tall(tokens), most);
  shown.forEach((step, at) => {
    const total = sum(step), high = tall(total), x = width - (shown.length - at) * (wide + 1);
    let y = height;
    for (const [number, tokens, isPrompt, refused] of step.work) {
      const share = Math.max(2, high * tokens / total), wrong = share * (refused || 0) / tokens;
      y -= share;
      to.globalAlpha = chosen === null || chosen === number ? 1 : 0.2;
      bar(to, x, y + wrong, wide, Math.max(1, share - wrong - 1), number, isPrompt);
      if (wrong) {  // hollow: draft tokens that were refused
        to.strokeStyle = colour(number);
        to.strokeRect(x + 0.5, y + 0.5, wide - 1, Math.max(1, wrong - 1));
      }
    }
    to.globalAlpha = 1;
    if (step.rest) {
      const share = high * step.rest / total;
      to.fillStyle = paint("queued");
      to.fillRect(x, y - share, wide, share - 1);
    }
  });
}

// One request's last seconds.
export function drawLane(canvas, life, late) {
  const [to, width, height] = pen(canvas);
  const x = ago => width * (1 - Math.min(SPAN_MS, Math.max(0, ago + late)) / SPAN_MS);
  const end = life.ended < 0 ? -late : life.ended;
  to.fillStyle = paint("free");
  to.fillRect(0, height - 1, width, 1);
  life.phases.forEach(([kind, ago], at) => {
    const next = life.phases[at + 1], from = x(ago), until = x(next ? next[1] : end), wide = Math.max(1.5, until - from);
    if (until <= 0) return;
    if (kind === "queued" || kind === "preempted") {
      to.fillStyle = paint(kind === "queued" ? "queued" : "bad");
      to.fillRect(from, height / 2 - 2, wide, 4);
    } else if (kind === "unseen") {
      to.fillStyle = pale(life.n);
      to.fillRect(from, height / 2 - 4, wide, 8);
    } else {
      bar(to, from, 1, wide - (kind === "prefill" && wide > 3 ? 1 : 0), height - 3, life.n, kind === "prefill");
    }
  });
}

// The speed of the last `span` samples, with its scale and its time.
export function drawSpark(canvas, values, span, seconds) {
  const [to, width, height] = pen(canvas), most = Math.max(1, ...values), step = width / span, foot = 15, top = 14;
  const y = value => height - foot - (height - foot - top) * value / most;
  write(to, `${Math.round(most).toLocaleString("en")}`, width - 4, 7, "right");
  write(to, `${seconds} s ago`, 0, height - 7, "left");
  write(to, "now", width - 4, height - 7, "right");
  to.fillStyle = paint("line");
  to.fillRect(0, height - foot, width, 1);
  if (values.length < 2) return;
  to.beginPath();
  values.forEach((value, at) => to.lineTo(width - (values.length - 1 - at) * step, y(value)));
  to.strokeStyle = paint("accent");
  to.lineWidth = 1.5;
  to.stroke();
  to.lineTo(width, height - foot);
  to.lineTo(width - (values.length - 1) * step, height - foot);
  to.globalAlpha = 0.15;
  to.fillStyle = paint("accent");
  to.fill();
  to.globalAlpha = 1;
}
