// Draws the blocks, the steps, a request's lane and the speed. Knows canvases. Does not know the server.

const FREE = 0, CACHED = 1, SHARED = 2, OWNED = 3;
const SPAN_MS = 20000;

let paints = null;  // colours of the current theme

function paint(name) {
  paints ??= getComputedStyle(document.documentElement);
  return paints.getPropertyValue("--" + name).trim();
}

// The same request has the same colour everywhere; neighbours in number are far apart in hue.
function colour(number, alpha = 1) {
  return `hsl(${Math.round(number * 137.5) % 360} 62% ${paint("light")} / ${alpha})`;
}

// A clear canvas in CSS pixels, sharp on any screen.
function pen(canvas) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const found = canvas.getContext("2d");
  found.setTransform(ratio, 0, 0, ratio, 0, 0);
  found.clearRect(0, 0, width, height);
  return [found, width, height];
}

// Runs of equal blocks -> one entry for each block.
function unrolled(runs) {
  const cells = [];
  for (let at = 0; at < runs.length; at += 2) for (let i = 0; i < runs[at + 1]; i++) cells.push(runs[at]);
  return cells;
}

const grid = {columns: 1, size: 10};  // as last drawn, to find the block under the pointer

function drawBlocks(canvas, cells, chosen) {
  const width = canvas.clientWidth || 1;
  grid.size = Math.max(3, Math.min(18, Math.floor(Math.sqrt(width * 190 / Math.max(1, cells.length)))));
  grid.columns = Math.max(1, Math.floor(width / grid.size));
  canvas.style.height = Math.max(1, Math.ceil(cells.length / grid.columns)) * grid.size + "px";
  const [to] = pen(canvas), gap = grid.size > 4 ? 1.5 : 1, side = grid.size - gap;
  const plain = [paint("free"), paint("cached"), paint("shared")];
  cells.forEach((what, at) => {
    to.fillStyle = what < OWNED ? plain[what] : colour(what - OWNED);
    to.globalAlpha = chosen === null || what === OWNED + chosen ? 1 : 0.25;
    to.fillRect(at % grid.columns * grid.size, Math.floor(at / grid.columns) * grid.size, side, side);
  });
  to.globalAlpha = 1;
}

// Solid: output. Striped: a chunk of a prompt.
function bar(to, x, y, width, height, number, isPrompt) {
  if (!isPrompt) {
    to.fillStyle = colour(number);
    to.fillRect(x, y, width, height);
    return;
  }
  to.fillStyle = colour(number, 0.4);
  to.fillRect(x, y, width, height);
  to.fillStyle = colour(number);
  for (let at = 0; at < width; at += 4) to.fillRect(x + at, y, Math.min(1.5, width - at), height);
}

function drawSteps(canvas, steps, chosen) {
  const [to, width, height] = pen(canvas), wide = 7, shown = steps.slice(-Math.floor(width / (wide + 1)));
  const sum = step => step.work.reduce((total, [, tokens]) => total + tokens, step.rest);
  const most = Math.max(4, ...shown.map(sum));
  // Logarithmic: a chunk of a prompt has hundreds of tokens, a row that decodes has one.
  shown.forEach((step, at) => {
    const total = sum(step), tall = height * Math.log2(1 + total) / Math.log2(1 + most);
    const x = width - (shown.length - at) * (wide + 1);
    let y = height;
    for (const [number, tokens, isPrompt, refused] of step.work) {
      const share = Math.max(2, tall * tokens / total), wrong = share * (refused || 0) / tokens;
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
      const share = tall * step.rest / total;
      to.fillStyle = paint("queued");
      to.fillRect(x, y - share, wide, share - 1);
    }
  });
  to.fillStyle = paint("line");
  to.fillRect(0, height - 1, width, 1);
}

// One request's last seconds.
function drawLane(canvas, life, late) {
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
      to.fillStyle = colour(life.n, 0.35);
      to.fillRect(from, height / 2 - 4, wide, 8);
    } else {
      bar(to, from, 1, wide - (kind === "prefill" && wide > 3 ? 1 : 0), height - 3, life.n, kind === "prefill");
    }
  });
}

function drawSpark(canvas, values) {
  const [to, width, height] = pen(canvas), most = Math.max(1, ...values), step = width / 120;
  to.beginPath();
  values.forEach((value, at) => to.lineTo(width - (values.length - 1 - at) * step, height - 3 - (height - 14) * value / most));
  to.strokeStyle = paint("accent");
  to.lineWidth = 1.5;
  to.stroke();
  if (values.length < 2) return;
  to.lineTo(width, height);
  to.lineTo(width - (values.length - 1) * step, height);
  to.globalAlpha = 0.15;
  to.fillStyle = paint("accent");
  to.fill();
  to.globalAlpha = 1;
}
