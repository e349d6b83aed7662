// Markdown inside a line: code, emphasis, links, formulas. HTML in the text stays text.

import {make} from "./dom.js";
import {formula} from "./math.js";

export const DEPTH = 6;  // of nested lists, quotes and emphasis; deeper is shown as text

// Each part has a bound on its length, so that the time grows with the length of the text and not with its square.
const INLINE = new RegExp([
  /\\\[(?<display>[^]{1,2000}?)\\\]/, /\\\((?<paren>[^]{1,2000}?)\\\)/,
  /\$\$(?<dollars>[^$]{1,2000})\$\$/, /(?<![\w$])\$(?=[^\s$])(?<dollar>[^$\n]{0,500}?[^\s$\\])\$(?![\w$])/,
  /\\(?<escaped>[\\`*_{}[\]()#+.!|~>$-])/,
  /(?<ticks>`{1,3})(?<code>[^`][^]{0,2000}?)\k<ticks>(?!`)/,
  /\*\*(?=[^\s*])(?<stars>[^]{0,2000}?\S)\*\*/, /(?<!\w)__(?=[^\s_])(?<lines>[^]{0,2000}?\S)__(?!\w)/,
  /(?<!\w)\*(?=[^\s*])(?<star>[^*]{0,2000}[^\s*])\*/, /(?<!\w)_(?=[^\s_])(?<line>[^_]{0,2000}[^\s_])_(?!\w)/,
  /~~(?=\S)(?<gone>[^~]{1,2000})~~/,
  /!?\[(?<label>[^\][]{0,1000})\]\((?<url>(?:https?:\/\/|mailto:)[^\s()<>"]{1,2000})\)/,
  /(?<![\w/])(?<bare>https?:\/\/[^\s<>"'`\\^{|}]{1,2000})/,
].map(part => part.source).join("|"), "g");

function link(url, label) {
  const element = make("a", "", label);
  return Object.assign(element, {href: url, target: "_blank", rel: "noopener noreferrer nofollow"});
}

// A link in a sentence, without the punctuation after it.
function trimmed(url) {
  const short = url.replace(/[.,:;!?*_~]+$/, "");
  return short.endsWith(")") && !short.includes("(") ? trimmed(short.slice(0, -1)) : short;
}

export function spans(parent, text, depth = 0) {
  let from = 0;
  if (depth < DEPTH) {
    for (const found of text.matchAll(INLINE)) {
      const part = found.groups, display = part.display ?? part.dollars, inside = part.paren ?? part.dollar;
      const strong = part.stars ?? part.lines, weak = part.star ?? part.line;
      parent.append(text.slice(from, found.index));
      from = found.index + found[0].length;
      if (display ?? inside) parent.append(formula(display ?? inside, Boolean(display)));
      else if (part.escaped) parent.append(part.escaped);
      else if (part.code !== undefined) parent.append(make("code", "", part.code));
      else if (part.url) parent.append(link(part.url, part.label || part.url));
      else if (part.bare) {
        const url = trimmed(part.bare);
        parent.append(link(url, url));
        from = found.index + url.length;
      } else parent.append(spans(make(part.gone ? "del" : strong ? "strong" : "em"), part.gone ?? strong ?? weak, depth + 1));
    }
  }
  parent.append(text.slice(from));
  return parent;
}
