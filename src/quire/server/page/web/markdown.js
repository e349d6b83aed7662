// Markdown as elements: headings, lists, tables, quotes, code, formulas. HTML in the text stays text.

import {make} from "./dom.js";
import {highlight} from "./highlight.js";
import {DEPTH, spans} from "./inline.js";
import {formula} from "./math.js";

const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +(.*))?$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/, HEADING = /^ {0,3}(#{1,6}) +(.*?)(?: +#+)? *$/;
const MATH_LINES = 200;  // of one formula

// Blocks of some lines: each takes its lines from `lines`, beginning at `at`, and returns where the next one begins.
function code(parent, lines, at) {
  const [, indent, fence, words] = lines[at].match(/^( {0,3})(`{3,}|~{3,}) *([^\s`]*)/);
  let end = at + 1;
  const closes = line => line.trimStart().startsWith(fence) && /^[`~]*$/.test(line.trim());
  while (end < lines.length && !closes(lines[end])) end++;
  const body = lines.slice(at + 1, end).map(line => line.startsWith(indent) ? line.slice(indent.length) : line);
  const box = make("div", "code"), head = make("div", "code-head"), button = make("button", "act copy-code", "Copy"), pre = make("pre");
  button.type = "button";
  button.setAttribute("aria-label", "Copy the code");
  pre.tabIndex = 0;  // it scrolls
  head.append(make("span", "", words.slice(0, 40)), button);
  highlight(pre, body.join("\n"), words.toLowerCase());
  box.append(head, pre);
  parent.append(box);
  return end + 1;
}

function quote(parent, lines, at, depth) {
  let end = at;
  while (end < lines.length && lines[end].startsWith(">")) end++;
  parent.append(blocks(make("blockquote"), lines.slice(at, end).map(line => line.replace(/^> ?/, "")), depth + 1));
  return end;
}

function list(parent, lines, at, depth) {
  const [, indent, mark] = lines[at].match(ITEM), ordered = /\d/.test(mark);
  const box = make(ordered ? "ol" : "ul");
  if (ordered && parseInt(mark) !== 1) box.start = parseInt(mark);
  while (at < lines.length) {
    const item = lines[at].match(ITEM);
    if (!item || item[1].length > indent.length + 1 || /\d/.test(item[2]) !== ordered) break;
    const width = item[1].length + item[2].length + 1;
    const body = [item[3] ?? ""];
    for (at++; at < lines.length; at++) {
      const line = lines[at], inside = line.search(/\S/);
      if (inside > item[1].length && inside >= Math.min(width, item[1].length + 2)) body.push(line.slice(Math.min(inside, width)));
      else if (!line.trim() && lines[at + 1]?.search(/\S/) > item[1].length) body.push("");
      else if (line.trim() && !starts(lines, at) && body.at(-1).trim()) body.push(line.trimStart());
      else break;
    }
    box.append(blocks(task(make("li"), body), body, depth + 1, true));
    while (at + 1 < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1])) at++;
  }
  parent.append(box);
  return at;
}

// "[x] done" as a box with a tick; the words stay in `body`.
function task(item, body) {
  const [mark, state] = body[0].match(/^\[([ xX])\] +/) ?? [];
  if (!mark) return item;
  const box = make("input");
  Object.assign(box, {type: "checkbox", disabled: true});
  box.toggleAttribute("checked", state !== " ");
  box.setAttribute("aria-label", state === " " ? "open" : "done");
  body[0] = body[0].slice(mark.length);
  item.className = "task";
  item.append(box);
  return item;
}

const columns = line => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll("\\|", "|"));
const isTable = (lines, at) => lines[at].includes("|") && /^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?$/.test(lines[at + 1] ?? "") && columns(lines[at]).length === columns(lines[at + 1]).length;

function table(parent, lines, at) {
  const box = make("table"), sides = columns(lines[at + 1]).map(rule => rule.endsWith(":") ? rule.startsWith(":") ? "center" : "right" : "");
  const row = (line, kind) => {
    const cells = columns(line), row = make("tr");
    sides.forEach((side, n) => {
      const cell = spans(make(kind), cells[n] ?? "");
      if (side) cell.style.textAlign = side;
      row.append(cell);
    });
    box.append(row);
  };
  row(lines[at], "th");
  for (at += 2; at < lines.length && lines[at].includes("|"); at++) row(lines[at], "td");
  const scroll = make("div", "scroll");
  scroll.tabIndex = 0;
  scroll.append(box);
  parent.append(scroll);
  return at;
}

// The line after a formula that begins a line with $$ or \[ and ends one; 0: there is none.
function mathEnd(lines, at) {
  const line = lines[at].trim(), close = line.startsWith("$$") ? "$$" : line.startsWith("\\[") ? "\\]" : null;
  if (!close) return 0;
  if (line.length > 4 && line.endsWith(close)) return at + 1;
  if (line.slice(2).includes(close)) return 0;
  for (let end = at + 1; end < Math.min(lines.length, at + MATH_LINES); end++) {
    if (lines[end].trim().endsWith(close)) return end + 1;
    if (lines[end].includes(close)) return 0;
  }
  return 0;
}

function math(parent, lines, at) {
  const end = mathEnd(lines, at), box = make("p", "scroll");
  box.append(formula(lines.slice(at, end).join("\n").trim().slice(2, -2), true));
  parent.append(box);
  return end;
}

// What begins at a line, if it is no paragraph.
function starts(lines, at) {
  const line = lines[at];
  if (/^ {0,3}(`{3,}[^`]*|~{3,}.*)$/.test(line)) return code;
  if (line.startsWith(">")) return quote;
  if (RULE.test(line)) return (parent, _, at) => { parent.append(make("hr")); return at + 1; };
  if (HEADING.test(line)) return (parent, lines, at) => {
    const [, marks, words] = lines[at].match(HEADING);
    parent.append(spans(make("h" + Math.min(marks.length + 2, 6)), words));  // below the page's own h1 and h2
    return at + 1;
  };
  if (ITEM.test(line)) return list;
  if (isTable(lines, at)) return table;
  if (mathEnd(lines, at)) return math;
  return null;
}

function blocks(parent, lines, depth = 0, tight = false) {
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at++; continue; }
    const block = depth < DEPTH ? starts(lines, at) : null;
    if (block) { at = block(parent, lines, at, depth); continue; }
    let end = at + 1;
    while (end < lines.length && lines[end].trim() && (depth >= DEPTH || !starts(lines, end))) end++;
    const inLine = tight && !parent.querySelector(":scope > :not(input)") && !parent.textContent;
    spans(inLine ? parent : parent.appendChild(make("p")), lines.slice(at, end).join("\n"));
    at = end;
  }
  return parent;
}

// Show a Markdown text in an element. Blocks that have not changed stay: a reader may have selected or focused them.
export function render(box, text) {
  const made = [...blocks(make("div"), text.replaceAll("\t", "    ").split("\n")).childNodes];
  made.forEach((node, at) => {
    const old = box.childNodes[at];
    if (!old) box.append(node);
    else if (!old.isEqualNode(node)) old.replaceWith(node);
  });
  while (box.childNodes.length > made.length) box.lastChild.remove();
}
