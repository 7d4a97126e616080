// Elements, texts and formulas. Nothing here or in the other files reads markup: texts become
// text nodes, and formulas are built element by element from the lists of math_text.py.
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const TWO = RUNS.length > 1;
const SVG = "http://www.w3.org/2000/svg";
const MATHML = "http://www.w3.org/1998/Math/MathML";
const ELEMENTS = new Set(DATA.mathml.elements);
const ATTRIBUTES = new Set(DATA.mathml.attributes);
// Of a kind of samples, for a person.
const kindName = (kind) => kind === "step" ? "training" : kind === "eval" ? "held-out" : kind.slice(5);
const STATUS = {
  correct: ["✓", "good"], wrong: ["✗", "bad"], no_answer: ["∅", "bad"], bad_gold: ["⊘", ""],
  timeout: ["⌛", ""], error: ["!", "bad"], ungraded: ["–", ""],
};

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function number(value) {
  if (value === null || value === undefined) return "none";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(3);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return Number(value.toPrecision(5)).toString();
}

const share = (value) => value === null ? "none" : `${(100 * value).toFixed(1)} %`;

// Characters that show nothing or change the direction of others, by their code.
const CONTROL = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u200b-\\u200f\\u2028-\\u202e" +
  "\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb]", "g");

function appendText(parent, text) {
  let end = 0;
  for (const match of text.matchAll(CONTROL)) {
    if (match.index > end) parent.append(text.slice(end, match.index));
    const code = match[0].charCodeAt(0).toString(16).toUpperCase().padStart(4, "0");
    parent.append(el("span", { class: "control", title: "a character that is not visible" }, `U+${code}`));
    end = match.index + 1;
  }
  if (end < text.length) parent.append(text.slice(end));
}

// A label from data: one line, controls visible, cut.
function plain(text, most = 200) {
  const line = String(text).replace(CONTROL, "·").replace(/\s+/g, " ");
  return line.length > most ? `${line.slice(0, most)}…` : line;
}

function mathNode([tag, content, attributes]) {
  const node = document.createElementNS(MATHML, ELEMENTS.has(tag) ? tag : "mrow");
  for (const [key, value] of Object.entries(attributes || {})) {
    if (ATTRIBUTES.has(key)) node.setAttribute(key, value);
  }
  if (typeof content === "string") node.append(content);
  else node.append(...content.map(mathNode));
  return node;
}

const source = (run, pieces) =>
  pieces.map((piece) => typeof piece === "string" ? piece : run.formulas[piece][0]).join("");

function textBlock(run, pieces, rendered, label) {
  const block = el("div", {
    class: rendered ? "text" : "text raw", dir: "auto", tabindex: "0", role: "group", "aria-label": label,
  });
  if (!rendered) {
    appendText(block, source(run, pieces));
    return block;
  }
  for (const piece of pieces) {
    if (typeof piece === "string") {
      appendText(block, piece);
      continue;
    }
    const [latex, tree, display] = run.formulas[piece];
    const math = mathNode(tree);
    if (display) math.setAttribute("display", "block");
    block.append(el(display ? "span" : "bdi", { class: display ? "display" : null, title: plain(latex, 400) }, math));
  }
  return block;
}

function statusMark(status) {
  const [sign, style] = STATUS[status] || ["?", ""];
  return el("span", { class: style }, `${sign} ${String(status).replace("_", " ")}`);
}

function select(id, label, choices, onchange) {
  const box = el("select", { id, onchange }, choices.map(([value, text]) => el("option", { value }, text)));
  return el("label", {}, label, box);
}

function section(id, title, ...children) {
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...children);
}

// Rendered when it is first opened: a page with hundreds of charts opens at once.
function lazyDetails(id, title, make, open = false) {
  const box = el("details", { id }, el("summary", {}, title));
  const fill = () => {
    if (box.open && box.childElementCount === 1) box.append(make());
  };
  box.addEventListener("toggle", fill);
  if (open) {
    box.open = true;
    fill();
  }
  return box;
}

function factsList(pairs) {
  return el("dl", { class: "facts" }, pairs.map(([name, value]) =>
    [el("dt", {}, name), el("dd", {}, value instanceof Node ? value : plain(value, 600))]));
}
