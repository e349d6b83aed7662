// Colours of code: comments, strings, numbers and keywords. It is a guess by words, not a parser.

import {make} from "./dom.js";

const MOST = 100000;  // characters that are coloured

const C_LIKE = "abstract async await auto bool boolean break byte case catch char class const constexpr continue default defer delete do double else enum explicit export extends extern final finally float fn for friend from func function go goto if impl implements import in inline instanceof int interface internal let long loop map match mod move mut namespace native new noexcept null nullptr of operator override package private protected pub public range ref return sealed select self short signed sizeof static string struct super switch template this throw throws trait true false try type typedef typename typeof undefined union unsafe unsigned use using var virtual void volatile when where while yield";
const PYTHON = "and as assert async await break case class continue def del elif else except False finally for from global if import in is lambda match None nonlocal not or pass raise return self True try while with yield";
const SHELL = "case do done echo elif else end esac exit export false fi for function if in local null return set source then true unset until while def module require class";
const SQL = "add all alter and as asc between by case column create cross default delete desc distinct drop else end exists foreign from full group having in index inner insert into is join key left like limit not null offset on or order outer primary references returning right select set table then union unique update values view when where with";

const NUMBER = String.raw`(?<number>\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\w*)`, WORD = String.raw`(?<word>[A-Za-z_$][\w$]*)`;
const QUOTED = String.raw`"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?`;
const pattern = (comment, string) => new RegExp(`(?<comment>${comment})|(?<string>${string})|${NUMBER}|${WORD}`, "g");

const FAMILIES = {
  c: [pattern(String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$(?![^]))`, QUOTED + "|`(?:\\\\.|[^`\\\\])*`?"), C_LIKE],
  python: [pattern("#[^\\n]*", String.raw`"""[^]*?(?:"""|$(?![^]))|'''[^]*?(?:'''|$(?![^]))|` + QUOTED), PYTHON],
  shell: [pattern(String.raw`(?<![^\s])#[^\n]*`, QUOTED), SHELL],
  sql: [pattern(String.raw`--[^\n]*|\/\*[^]*?(?:\*\/|$(?![^]))`, QUOTED), SQL],
  markup: [pattern(String.raw`<!--[^]*?(?:-->|$(?![^]))`, QUOTED), ""],
};
const NAMES = {
  c: "c h cpp c++ cc hpp cs csharp java javascript js jsx ts tsx typescript go golang rust rs swift kotlin kt scala php dart json json5 jsonc css scss zig cuda glsl proto",
  python: "python py python3 starlark", shell: "sh bash shell zsh fish console yaml yml toml ini ruby rb perl make makefile dockerfile r powershell", sql: "sql sqlite postgresql mysql", markup: "html xml svg vue",
};
const FAMILY = new Map(Object.entries(NAMES).flatMap(([family, names]) => names.split(" ").map(name => [name, family])));
const KEYWORDS = new Map(Object.entries(FAMILIES).map(([family, [, words]]) => [family, new Set(words.split(" "))]));

// Put the code into an element, coloured if its language is known.
export function highlight(parent, code, language) {
  const family = FAMILY.get(language);
  if (!family || code.length > MOST) { parent.append(code); return; }
  const keywords = KEYWORDS.get(family);
  let from = 0;
  for (const found of code.matchAll(FAMILIES[family][0])) {
    const {comment, string, number, word} = found.groups;
    const isKeyword = word && (keywords.has(word) || (family === "sql" && keywords.has(word.toLowerCase())));
    const kind = comment ? "comment" : string ? "string" : number ? "number" : isKeyword ? "keyword" : null;
    if (!kind) continue;
    parent.append(code.slice(from, found.index), make("span", "code-" + kind, found[0]));
    from = found.index + found[0].length;
  }
  parent.append(code.slice(from));
}
