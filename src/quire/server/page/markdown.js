// Markdown as elements: headings, lists, tables, quotes, code, emphasis, links. HTML in the text stays text.

const DEPTH = 6;  // of nested lists, quotes and emphasis; deeper is shown as text
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +(.*))?$/;
const INLINE = /\\([\\`*_{}[\]()#+.!|~>-])|(`{1,3})([^`][^]{0,2000}?)\2(?!`)|\*\*(?=[^\s*])([^]{0,2000}?\S)\*\*|(?<!\w)__(?=[^\s_])([^]{0,2000}?\S)__(?!\w)|(?<!\w)\*(?=[^\s*])([^*]{0,2000}[^\s*])\*|(?<!\w)_(?=[^\s_])([^_]{0,2000}[^\s_])_(?!\w)|~~(?=\S)([^~]{1,2000})~~|!?\[([^\][]{0,1000})\]\(((?:https?:\/\/|mailto:)[^\s()<>"]{1,2000})\)/g;

function spans(parent, text, depth = 0) {
  let from = 0;
  if (depth < DEPTH) {
    for (const found of text.matchAll(INLINE)) {
      const [all, escaped, , code, strong, strong2, em, em2, gone, label, url] = found;
      parent.append(text.slice(from, found.index));
      from = found.index + all.length;
      const inner = strong ?? strong2 ?? em ?? em2 ?? gone;
      if (escaped) parent.append(escaped);
      else if (code !== undefined) parent.append(make("code", "", code));
      else if (url) {
        const link = make("a", "", label || url);
        Object.assign(link, {href: url, target: "_blank", rel: "noopener noreferrer nofollow"});
        parent.append(link);
      } else parent.append(spans(make(gone ? "del" : strong ?? strong2 ? "strong" : "em"), inner, depth + 1));
    }
  }
  parent.append(text.slice(from));
  return parent;
}

// Blocks of some lines: each takes its lines from `lines`, beginning at `at`, and returns where the next one begins.
function code(parent, lines, at) {
  const [, indent, fence] = lines[at].match(/^( {0,3})(`{3,}|~{3,})/);
  let end = at + 1;
  const closes = line => line.trimStart().startsWith(fence) && /^[`~]*$/.test(line.trim());
  while (end < lines.length && !closes(lines[end])) end++;
  const body = lines.slice(at + 1, end).map(line => line.startsWith(indent) ? line.slice(indent.length) : line);
  parent.append(make("pre", "", body.join("\n")));
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
    box.append(blocks(make("li"), body, depth + 1, true));
    while (at + 1 < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1])) at++;
  }
  parent.append(box);
  return at;
}

const columns = line => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll("\\|", "|"));
const isTable = (lines, at) => lines[at].includes("|") && /^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?$/.test(lines[at + 1] ?? "") && columns(lines[at]).length === columns(lines[at + 1]).length;

function table(parent, lines, at) {
  const box = make("table"), sides = columns(lines[at + 1]).map(rule => rule.endsWith(":") ? rule.startsWith(":") ? "center" : "right" : "");
  const row = (line, kind) => {
    const found = columns(line), line_ = make("tr");
    sides.forEach((side, n) => {
      const cell = spans(make(kind), found[n] ?? "");
      if (side) cell.style.textAlign = side;
      line_.append(cell);
    });
    box.append(line_);
  };
  row(lines[at], "th");
  for (at += 2; at < lines.length && lines[at].includes("|"); at++) row(lines[at], "td");
  const scroll = make("div", "scroll");
  scroll.append(box);
  parent.append(scroll);
  return at;
}

const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/, HEADING = /^ {0,3}(#{1,6}) +(.*?)(?: +#+)? *$/;

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
  return null;
}

function blocks(parent, lines, depth = 0, tight = false) {
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at++; continue; }
    const block = depth < DEPTH ? starts(lines, at) : null;
    if (block) { at = block(parent, lines, at, depth); continue; }
    let end = at + 1;
    while (end < lines.length && lines[end].trim() && (depth >= DEPTH || !starts(lines, end))) end++;
    spans(tight && !parent.childNodes.length ? parent : parent.appendChild(make("p")), lines.slice(at, end).join("\n"));
    at = end;
  }
  return parent;
}

// Show a Markdown text in an element.
function render(box, text) { box.replaceChildren(...blocks(make("div"), text.replaceAll("\t", "    ").split("\n")).childNodes); }
