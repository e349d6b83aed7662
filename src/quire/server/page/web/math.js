// LaTeX formulas as MathML. A command that is not known is shown as its name.

const SPACE = "http://www.w3.org/1998/Math/MathML";
const DEPTH = 24, MOST_TOKENS = 4000;

const pairs = text => new Map(text.trim().split(/\s+/).map(pair => pair.split(":")));
const LETTERS = pairs(`alpha:α beta:β gamma:γ delta:δ epsilon:ϵ varepsilon:ε zeta:ζ eta:η theta:θ vartheta:ϑ iota:ι kappa:κ
  lambda:λ mu:μ nu:ν xi:ξ pi:π varpi:ϖ rho:ρ varrho:ϱ sigma:σ varsigma:ς tau:τ upsilon:υ phi:ϕ varphi:φ chi:χ psi:ψ omega:ω Gamma:Γ
  Delta:Δ Theta:Θ Lambda:Λ Xi:Ξ Pi:Π Sigma:Σ Upsilon:Υ Phi:Φ Psi:Ψ Omega:Ω infty:∞ partial:∂ nabla:∇ hbar:ℏ ell:ℓ Re:ℜ Im:ℑ aleph:ℵ
  emptyset:∅ varnothing:∅ angle:∠ dots:… ldots:… cdots:⋯ vdots:⋮ ddots:⋱ prime:′ degree:°`);
const OPERATORS = pairs(`times:× cdot:⋅ div:÷ pm:± mp:∓ ast:∗ star:⋆ circ:∘ bullet:∙ oplus:⊕ otimes:⊗ leq:≤ le:≤ geq:≥ ge:≥ neq:≠ ne:≠
  approx:≈ equiv:≡ sim:∼ simeq:≃ cong:≅ propto:∝ ll:≪ gg:≫ in:∈ notin:∉ ni:∋ subset:⊂ subseteq:⊆ supset:⊃ supseteq:⊇ cup:∪ cap:∩
  setminus:∖ land:∧ wedge:∧ lor:∨ vee:∨ lnot:¬ neg:¬ forall:∀ exists:∃ to:→ rightarrow:→ leftarrow:← leftrightarrow:↔ Rightarrow:⇒
  Leftarrow:⇐ Leftrightarrow:⇔ iff:⟺ implies:⟹ mapsto:↦ uparrow:↑ downarrow:↓ longrightarrow:⟶ perp:⊥ parallel:∥ mid:∣ vert:| Vert:‖
  langle:⟨ rangle:⟩ lfloor:⌊ rfloor:⌋ lceil:⌈ rceil:⌉ colon:: therefore:∴ because:∵ top:⊤ bot:⊥ vdash:⊢ models:⊨ dagger:†`);
const BIG = pairs("sum:∑ prod:∏ coprod:∐ bigcup:⋃ bigcap:⋂ bigoplus:⨁ bigotimes:⨂ bigvee:⋁ bigwedge:⋀ int:∫ iint:∬ iiint:∭ oint:∮");
const UNDER = new Set(["lim", "max", "min", "sup", "inf", "limsup", "liminf", "argmax", "argmin", "det", "gcd", "Pr"]);
const NAMED = new Set(["sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log", "ln", "lg", "exp", "dim", "ker", "deg", "arg", "hom"]);
const ACCENTS = pairs("hat:^ widehat:^ bar:¯ overline:¯ vec:→ tilde:~ widetilde:~ dot:˙ ddot:¨ overrightarrow:→");
const BELOW = pairs("underline:_ underbrace:⏟");
const SPACES = pairs(",:0.17em ::0.22em ;:0.28em !:0em quad:1em qquad:2em enspace:0.5em");
const TEXTS = new Set(["text", "textrm", "textbf", "textit", "mbox", "mathrm", "operatorname", "mathsf", "mathtt"]);
const FENCES = {matrix: ["", ""], smallmatrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"],
  cases: ["{", ""], array: ["", ""], aligned: ["", ""], align: ["", ""], "align*": ["", ""], gathered: ["", ""], split: ["", ""], equation: ["", ""], "equation*": ["", ""]};
const BOARD = {C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ", E: "𝔼", F: "𝔽"};

function element(name, ...children) {
  const made = document.createElementNS(SPACE, name);
  made.append(...children);
  return made;
}
const row = nodes => nodes.length === 1 ? nodes[0] : element("mrow", ...nodes);

class Parser {
  constructor(source) {
    this.tokens = source.match(/\\(?:[a-zA-Z]+|[^])|\d+(?:\.\d+)?|\s+|[^]/gu) ?? [];
    this.at = 0;
    this.depth = 0;
  }

  blanks() { while (/^\s/.test(this.tokens[this.at] ?? "")) this.at++; }
  peek() { this.blanks(); return this.tokens[this.at]; }
  next() { this.blanks(); return this.tokens[this.at++]; }

  // Atoms with their scripts until one of the tokens in `ends`, which is left.
  until(...ends) {
    const nodes = [];
    if (++this.depth > DEPTH) throw new Error("too deep");
    while (this.peek() !== undefined && !ends.includes(this.peek())) nodes.push(this.scripts(this.atom()));
    this.depth--;
    return nodes;
  }

  scripts(base) {
    let under, over;
    for (;;) {
      const mark = this.peek();
      if (mark === "_" && !under) { this.at++; under = this.argument(); }
      else if (mark === "^" && !over) { this.at++; over = this.argument(); }
      else if (mark === "'" && !over) { this.at++; over = element("mo", "′"); }
      else if (mark === "\\limits" || mark === "\\nolimits") this.at++;
      else break;
    }
    if (!under && !over) return base;
    const names = base.isBig ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    return element(names[under && over ? 2 : under ? 0 : 1], base, ...[under, over].filter(Boolean));
  }

  // What a command or script applies to: a group or a single atom.
  argument() {
    if (this.peek() === undefined) return element("mrow");
    if (++this.depth > DEPTH) throw new Error("too deep");
    const node = this.atom();
    this.depth--;
    return node;
  }

  group(end) {
    const nodes = this.until(end);
    this.at++;
    return row(nodes);
  }

  // The plain text of a group in braces.
  words() {
    if (this.peek() !== "{") return this.next() ?? "";
    let open = 0, text = "";
    for (; this.at < this.tokens.length; this.at++) {
      const token = this.tokens[this.at];
      if (token === "{") { if (open++) text += token; }
      else if (token === "}") { if (!--open) { this.at++; break; } text += token; }
      else text += token.replace(/^\\(?=[^a-zA-Z])/, "");
    }
    return text;
  }

  atom() {
    const token = this.next();
    if (token === "{") return this.group("}");
    if (token.startsWith("\\")) return this.command(token.slice(1));
    if (/^\d/.test(token)) return element("mn", token);
    if (/^\p{L}$/u.test(token)) return element("mi", token);
    const sign = element("mo", token === "-" ? "−" : token);
    if ("()[]|/".includes(token)) sign.setAttribute("stretchy", "false");
    return sign;
  }

  command(name) {
    if (LETTERS.has(name)) return element("mi", LETTERS.get(name));
    if (OPERATORS.has(name)) return element("mo", OPERATORS.get(name));
    if (BIG.has(name)) return Object.assign(element("mo", BIG.get(name)), {isBig: !name.includes("int")});
    if (UNDER.has(name)) return this.limit(name);
    if (NAMED.has(name)) return element("mi", name);
    if (TEXTS.has(name)) return element("mtext", this.words());
    if (ACCENTS.has(name)) return this.marked("mover", "accent", ACCENTS.get(name));
    if (BELOW.has(name)) return Object.assign(this.marked("munder", "accentunder", BELOW.get(name)), {isBig: name === "underbrace"});
    if (SPACES.has(name)) return this.gap(SPACES.get(name));
    return this.structure(name);
  }

  limit(name) {
    const made = element("mo", name);
    made.setAttribute("movablelimits", "true");
    made.isBig = true;
    return made;
  }

  marked(kind, flag, mark) {
    const made = element(kind, this.argument(), element("mo", mark));
    made.setAttribute(flag, "true");
    return made;
  }

  gap(width) {
    const made = element("mspace");
    made.setAttribute("width", width);
    return made;
  }

  structure(name) {
    switch (name) {
      case "frac": case "dfrac": case "tfrac": case "cfrac": return element("mfrac", this.argument(), this.argument());
      case "binom": {
        const made = element("mfrac", this.argument(), this.argument());
        made.setAttribute("linethickness", "0");
        return element("mrow", element("mo", "("), made, element("mo", ")"));
      }
      case "sqrt": {
        if (this.peek() !== "[") return element("msqrt", this.argument());
        this.at++;
        const degree = this.group("]");
        return element("mroot", this.argument(), degree);
      }
      case "left": return this.fenced();
      case "begin": return this.environment(this.words());
      case "mathbb": return element("mi", [...this.words()].map(letter => BOARD[letter] ?? letter).join(""));
      case "mathbf": case "boldsymbol": case "bm": { const made = element("mrow", this.argument()); made.setAttribute("class", "bold"); return made; }
      case "mathcal": case "mathscr": case "mathfrak": case "mathit": case "displaystyle": case "textstyle": return name.endsWith("style") ? element("mrow") : this.argument();
      case "boxed": case "tag": return this.argument();
      case "big": case "Big": case "bigg": case "Bigg": case "bigl": case "bigr": case "Bigl": case "Bigr": return this.argument();
      case "right": case "end": return element("mtext", "\\" + name);
      case "\\": return element("mspace");
      case " ": return this.gap("0.25em");
      case "|": return element("mo", "‖");
      default: return element(name.length > 1 ? "mtext" : "mo", name.length > 1 ? "\\" + name : name);
    }
  }

  fence() {
    const token = this.next() ?? "", name = token.slice(1);
    return token === "." ? "" : token.startsWith("\\") ? OPERATORS.get(name) ?? (name === "|" ? "‖" : name) : token;
  }

  fenced() {
    const open = this.fence(), nodes = this.until("\\right");
    this.at++;
    const close = this.fence();
    return element("mrow", element("mo", open), ...nodes, element("mo", close));
  }

  environment(name) {
    const [open, close] = FENCES[name] ?? ["", ""], table = element("mtable");
    if (name === "array" && this.peek() === "{") this.words();
    let line = element("mtr");
    table.append(line);
    while (this.peek() !== undefined) {
      line.append(element("mtd", ...this.until("&", "\\\\", "\\end")));
      const mark = this.next();
      if (mark === "\\\\") table.append(line = element("mtr"));
      else if (mark !== "&") { this.words(); break; }
    }
    if (!line.textContent && table.childNodes.length > 1) line.remove();
    return element("mrow", element("mo", open), table, element("mo", close));
  }
}

// A formula; `display`: on a line of its own. What cannot be read is shown as it is written.
export function formula(source, display) {
  const math = element("math");
  if (display) math.setAttribute("display", "block");
  const parser = new Parser(source);
  try {
    if (parser.tokens.length > MOST_TOKENS) throw new Error("too long");
    const nodes = [];
    while (parser.peek() !== undefined) {
      nodes.push(...parser.until("}", "\\right"));
      if (parser.peek() !== undefined) parser.at++;  // a brace that nothing opened
    }
    math.append(row(nodes));
  } catch {
    math.replaceChildren(element("mtext", source));
  }
  return math;
}
