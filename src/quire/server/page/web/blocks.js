// Draws the KV blocks: a bar of shares, and a map of what is used.

import {CACHED, colour, FREE, OWNED, paint, pen, SHARED} from "./draw.js";

const MAX_SIDE = 18, MIN_SIDE = 7, MAX_HEIGHT = 210;  // px

// Runs of equal blocks -> one entry for each cell.
export function unrolled(runs) {
  const cells = [];
  for (let at = 0; at < runs.length; at += 2) for (let i = 0; i < runs[at + 1]; i++) cells.push(runs[at]);
  return cells;
}

const grid = {columns: 1, side: MIN_SIDE, cells: []};  // as last drawn, to find the block under the pointer

// How the cells fit: all of them if there is space, else the used ones; if they are too many, several in a square.
function layout(width, cells) {
  const fits = count => Math.floor(Math.sqrt(width * MAX_HEIGHT / Math.max(1, count)));
  const numbered = cells.map((what, at) => ({what, at}));
  let shown = fits(cells.length) > MIN_SIDE ? numbered : numbered.filter(({what}) => what !== FREE);
  const most = Math.floor(width / MIN_SIDE) * Math.floor(MAX_HEIGHT / MIN_SIDE), each = Math.ceil(shown.length / Math.max(1, most));
  if (each > 1) shown = shown.filter((_, at) => at % each === 0);
  return {shown, each, all: shown.length === cells.length, side: Math.max(MIN_SIDE, Math.min(MAX_SIDE, fits(shown.length)))};
}

// Returns what the map shows: {each: cells in a square, all: whether free ones are shown too}.
export function drawBlocks(canvas, cells, chosen) {
  canvas.hidden = false;
  const width = canvas.clientWidth || 1, {shown, each, all, side} = layout(width, cells);
  canvas.hidden = shown.length === 0;
  grid.side = side;
  grid.columns = Math.max(1, Math.floor(width / side));
  grid.cells = shown;
  canvas.style.height = Math.max(1, Math.ceil(shown.length / grid.columns)) * side + "px";
  const [to] = pen(canvas), inner = side - 1.5, plain = [paint("free"), paint("cached"), paint("shared")];
  shown.forEach(({what}, at) => {
    to.fillStyle = what < OWNED ? plain[what] : colour(what - OWNED);
    to.globalAlpha = chosen === null || what === OWNED + chosen ? 1 : 0.25;
    to.fillRect(at % grid.columns * side, Math.floor(at / grid.columns) * side, inner, inner);
  });
  to.globalAlpha = 1;
  return {each, all};
}

// The cell under a point of the map: {what, at}; undefined: none.
export function cellAt(x, y) {
  const column = Math.min(grid.columns - 1, Math.floor(x / grid.side));
  return grid.cells[Math.floor(y / grid.side) * grid.columns + column];
}

// One bar: in use, by request; shared; cached; free.
export function drawShares(canvas, cells) {
  const [to, width, height] = pen(canvas), counts = new Map();
  for (const what of cells) counts.set(what, (counts.get(what) ?? 0) + 1);
  const owned = [...counts.keys()].filter(what => what >= OWNED).sort((a, b) => a - b);
  let x = 0;
  for (const what of [...owned, SHARED, CACHED, FREE]) {
    const wide = width * (counts.get(what) ?? 0) / Math.max(1, cells.length);
    to.fillStyle = what >= OWNED ? colour(what - OWNED) : paint(["free", "cached", "shared"][what]);
    to.fillRect(x, 0, what === FREE ? width - x : wide, height);
    x += wide;
  }
}

export const nameOf = what => ["free", "cached: free, and used again by a request with the same prefix", "shared by several requests"][what] ?? `request ${what - OWNED}`;
