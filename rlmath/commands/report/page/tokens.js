// A response token by token, marked by one of the values that are known of each. Lines above mean
// more than 0 and lines below less, and their kind how much, so that nothing is told by color alone.
const UP = ["u1", "u2", "u3"], DOWN = ["d1", "d2", "d3"], MORE = ["m1", "m2", "m3"];
const USES = ["trained on", "not in the loss", "left out by the correction or the entropy share", "clipped: the loss has no gradient here"];
const USE_STYLES = ["", "out", "left", "clip"];
const nats = (value) => `${number(value)} nats`;
const signed = (levels, unit) => ({
  style: (value) => {
    const level = levels.filter((least) => Math.abs(value) >= least).length;
    return level ? (value > 0 ? UP : DOWN)[level - 1] : "";
  },
  key: [["", `within ±${levels[0]}${unit}`], ...levels.map((least, i) => [UP[i], `+${least}${unit} or more`]), ...levels.map((least, i) => [DOWN[i], `−${least}${unit} or less`])],
});
const unsigned = (levels, unit) => ({
  style: (value) => ["", ...MORE][levels.filter((least) => value >= least).length],
  key: [["", `less than ${levels[0]}${unit}`], ...levels.map((least, i) => [MORE[i], `${least}${unit} or more`])],
});
// By the largest pull in the response: a token's is a share of the step's loss, and small.
const PULLS = ["a tenth", "a third", "two thirds"];
const relative = (largest) => {
  const levels = [0.1, 1 / 3, 2 / 3].map((one) => one * largest);
  const { style } = signed(levels, "");
  return {
    style: largest ? style : () => "",
    key: [["", "less"], ...PULLS.map((name, i) => [UP[i], `up, ${name} of the largest or more`]), ...PULLS.map((name, i) => [DOWN[i], `down, ${name} or more`])],
  };
};
// What can be shown, by column: its name, what it means, how it is written, its marks, and what orders the table.
const MEASURES = {
  log_prob: { name: "probability when sampled", mean: "Of the engine's distribution, temperature applied.", write: (v) => `log-prob ${v === null ? "minus infinity" : number(v)}`, order: (v) => -(v ?? -Infinity), title: "least likely tokens",
    marks: () => ({ style: (v) => ["m3", "m2", "m1", "m0", ""][[0.01, 0.1, 0.5, 0.9].filter((least) => Math.exp(v ?? -Infinity) >= least).length], key: [["", "0.9 or more"], ["m0", "0.5 to 0.9"], ["m1", "0.1 to 0.5"], ["m2", "0.01 to 0.1"], ["m3", "less than 0.01"]] }) },
  difference: { name: "actor minus engine", mean: "Log-prob by the actor before the update minus the rollout log-prob: 0 if both compute the same model.", write: nats, order: Math.abs, title: "tokens that differ most", marks: () => signed([0.01, 0.1, 0.5], " nats") },
  reference: { name: "actor minus reference", mean: "Log-prob by the actor before the update minus that of the reference model.", write: nats, order: Math.abs, title: "tokens that differ most", marks: () => signed([0.1, 0.5, 2], " nats") },
  teacher: { name: "actor minus teacher", mean: "Log-prob by the actor before the update minus the teacher's: an estimate of the reverse KL at the token.", write: nats, order: Math.abs, title: "tokens that differ most", marks: () => signed([0.1, 0.5, 2], " nats") },
  entropy: { name: "entropy", mean: "Of the actor's distribution, in the update.", write: nats, order: (v) => v, title: "highest entropies", marks: () => unsigned([0.1, 0.7, 1.5], " nats") },
  advantage: { name: "advantage", mean: "As the update read it.", write: number, order: Math.abs, title: "largest advantages", marks: () => signed([0.1, 0.7, 1.5], "") },
  value: { name: "value", mean: "Of the value model, before the token.", write: number, order: Math.abs, title: "largest values", marks: () => signed([0.1, 0.7, 1.5], "") },
  pull: { name: "pull of the update", mean: "Minus the derivative of the loss by the token's log-prob: above 0, the update makes the token likelier.", write: number, order: Math.abs, title: "strongest pulls", marks: (values) => relative(Math.max(0, ...values.map((v) => Math.abs(v ?? 0)))) },
  use: { name: "clipped or masked", mean: "What became of the token in the update.", write: (v) => USES[v], order: (v) => v, title: "tokens that were not trained on", marks: () => ({ style: (v) => USE_STYLES[v], key: USES.map((name, i) => [USE_STYLES[i], name]) }) },
  version: { name: "weights version", mean: "Which weights sampled the token; a box with the version stands where they change.", write: (v) => `version ${v}`, order: (v) => -v, title: "tokens of the oldest weights",
    marks: (values) => {
      const versions = [...new Set(values)].sort((a, b) => b - a);
      const styles = ["", ...MORE];
      return { style: (v) => styles[Math.min(3, versions.indexOf(v))], key: versions.slice(0, 4).map((v, i) => [styles[i], i === 3 && versions.length > 4 ? `version ${v} and older` : `version ${v}`]) };
    } },
};
const MEASURE_ORDER = ["log_prob", "advantage", "difference", "entropy", "use", "pull", "version", "reference", "teacher", "value"];
let measure = "log_prob", tokensOpen = false;

function tokenView(table) {
  const has = MEASURE_ORDER.filter((name) => table.columns.includes(name));
  const at = (name) => table.columns.indexOf(name);
  const holder = el("div", {});
  const choice = el("select", { class: "measure", onchange: () => {
    measure = choice.value;
    draw();
  } }, has.map((name) => el("option", { value: name }, MEASURES[name].name)));
  choice.value = has.includes(measure) ? measure : has[0];
  const said = el("p", { class: "small read", role: "status" }, "Click a token, or focus the text and press the left and right arrow keys.");
  let spans = [], place = -1;

  function go(to) {
    if (!spans.length) return;
    if (place >= 0) spans[place].classList.remove("at");
    place = Math.max(0, Math.min(spans.length - 1, to));
    spans[place].classList.add("at");
    spans[place].scrollIntoView({ block: "nearest" });
    const row = table.rows[place];
    said.textContent = `token ${place}, ${JSON.stringify(plain(row[0], 40))}: ${has.map((name) => `${MEASURES[name].name} ${MEASURES[name].write(row[at(name)])}`).join("; ")}`;
  }
  function draw() {
    const shown = MEASURES[choice.value], column = at(choice.value);
    const values = table.rows.map((row) => row[column]);
    const marks = shown.marks(values);
    const block = el("div", { class: "text raw tokens", dir: "auto", tabindex: "0", role: "group", "aria-label": "response by token", onkeydown: (event) => {
      const to = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: spans.length - 1 }[event.key];
      if (to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      go(to);
    } });
    spans = table.rows.map(([text], i) => {
      const value = values[i];
      const span = el("span", { class: (value === null && choice.value !== "log_prob" ? "" : marks.style(value)) || null, title: shown.write(value), onclick: () => go(i) });
      appendText(span, text);
      if (choice.value === "version" && value !== values[i - 1]) block.append(el("span", { class: "control" }, `version ${value}`));
      block.append(span);
      return span;
    });
    const top = table.rows.map((row, i) => [i, row]).filter(([, row]) => choice.value !== "use" || row[column]).sort((a, b) => shown.order(b[1][column]) - shown.order(a[1][column])).slice(0, 10);
    holder.replaceChildren(
      el("p", { class: "small" }, `${shown.mean} `, marks.key.map(([style, name]) => [el("span", { class: style || null }, name), "  "])),
      block, said,
      top.length ? el("div", { class: "scroll" }, el("table", { class: "by-token" },
        el("tr", {}, [shown.title, "place", ...has.map((name) => name === "log_prob" ? "log-prob when sampled" : MEASURES[name].name)].map((name) => el("th", { scope: "col" }, name))),
        top.map(([i, row]) => el("tr", {}, el("td", {}, JSON.stringify(plain(row[0], 40))), el("td", { class: "number" }, String(i)),
          has.map((name) => el("td", { class: name === "use" ? null : "number" }, ["use", "version"].includes(name) ? MEASURES[name].write(row[at(name)]) : number(row[at(name)]))))))) : el("p", { class: "small weak" }, "Every token was trained on."));
    if (place >= 0) go(place);
  }
  draw();
  return el("div", {}, el("div", { class: "row" }, el("label", {}, "mark tokens by", choice), el("span", { class: "weak small" }, table.note)), holder);
}

function tokenDetails(sample) {
  const box = lazyDetails(null, `By token (${sample.by_token.rows.length})`, () => tokenView(sample.by_token), tokensOpen);
  box.addEventListener("toggle", () => tokensOpen = box.open);
  return box;
}
