// The page: its sections, and its state over a reload.
function summarySection() {
  const shown = FIRST_METRICS.filter((tag) => RUNS.some((run) => run.metrics[tag]));
  return section("summary", "Summary",
    RUNS.map((run, i) => [TWO ? el("h3", {}, `${run.name} (${i ? "dashed" : "solid"} lines)`) : null, answersOf(run)]),
    el("div", { class: "charts" }, shown.map(metricChart)), factsTable(), RUNS.map(tracesOf), RUNS.map((run, i) => lazyDetails(`settings-${i}`, `${TWO ? `${run.name}: ` : ""}all settings (${Object.keys(run.settings).length})`, () =>
    el("div", { class: "scroll" }, el("table", {}, Object.entries(run.settings).map(([key, value]) =>
      el("tr", {}, el("td", {}, key), el("td", {}, plain(JSON.stringify(value), 400)))))))));
}

// Is it learning, is it healthy, how long still; a sign is read without color.
function answersOf(run) {
  const signs = { good: "✓", bad: "✗", open: "…" };
  return el("div", { class: "answers" }, run.answers.map(([question, mood, verdict, detail]) => el("div", { class: `answer is-${mood}` },
    el("div", { class: "weak small" }, question), el("div", { class: "verdict" }, el("span", { class: mood }, signs[mood]), ` ${plain(verdict, 200)}`),
    el("div", { class: "small" }, plain(detail, 400)),
    question === "health" && mood === "bad" ? el("button", { type: "button", class: "small", onclick: showEvents }, "show all events") : null)));
}

// What was trained; a value that two runs share is there once.
function factsTable() {
  const rows = DATA.fact_names.map((name, i) => [name, RUNS.map((run) => run.facts[i])])
    .filter(([, values]) => values.some((value) => value !== null));
  const cell = (value, attributes = {}) => el("td", attributes, value === null ? "–" : plain(value, 300));
  return el("div", { class: "scroll" }, el("table", { class: "facts" }, rows.map(([name, values]) => el("tr", {}, el("th", { scope: "row", class: "weak" }, name),
    TWO && values[0] === values[1] ? cell(values[0], { colspan: 2 }) : values.map((value) => cell(value))))));
}

function tracesOf(run) {
  return run.traces.length === 0 ? null : el("p", {}, "traces of profiled steps: ",
    run.traces.map(([name, href], i) => [i ? ", " : null, el("a", { href }, plain(name, 200))]));
}

function notesSection() {
  return section("about", "About this page", RUNS.map((run) => el("div", {}, TWO ? el("h3", {}, run.name) : null,
    el("ul", {}, run.notes.map((note) => el("li", {}, plain(note, 600)))))),
  el("p", { class: "weak" }, `Made ${DATA.made}. The page loads nothing from anywhere, and its policy forbids it.`));
}

const KEPT = `rlmath-report:${document.title}`;

function saveState() {
  const fields = {};
  for (const field of document.querySelectorAll("input[id], select[id]")) fields[field.id] = field.type === "checkbox" ? field.checked : field.value;
  const open = [...document.querySelectorAll("details[id]")].map((box) => [box.id, box.open]);
  const sample = chosen && [chosen.r, chosen.sample.kind, chosen.sample.step, chosen.sample.problem, chosen.sample.index];
  try {
    sessionStorage.setItem(KEPT, JSON.stringify({ fields, open, sample, scroll: window.scrollY }));
  } catch { /* A browser may forbid it for files. */ }
}

function restoreState(samples) {
  let state = null;
  try {
    state = JSON.parse(sessionStorage.getItem(KEPT));
  } catch { /* As above. */ }
  if (!state || performance.getEntriesByType("navigation")[0]?.type !== "reload") return;
  for (const [id, open] of state.open) {
    const box = document.getElementById(id);
    if (box instanceof HTMLDetailsElement) box.open = open;
  }
  for (const [id, value] of Object.entries(state.fields)) {
    const field = document.getElementById(id);
    // A slider that stood at the newest step stays at the newest.
    if (!field || field.type === "range") continue;
    if (field.type === "checkbox") {
      if (field.checked !== value) field.click();
    } else field.value = value;
  }
  document.getElementById("metric-search").dispatchEvent(new Event("input"));
  setAxis(document.getElementById("axis").value);
  samples.refilter();
  const same = state.sample && ENTRIES.find((entry) => JSON.stringify([entry.r, entry.sample.kind, entry.sample.step, entry.sample.problem, entry.sample.index]) === JSON.stringify(state.sample));
  if (same) choose(same);
  window.scrollTo({ top: state.scroll, behavior: "instant" });
}

document.getElementById("title").textContent = document.title;
const samples = samplesSection();
const sections = [summarySection(), ...(TWO ? [compareSection()] : []), curvesSection(), changesSection(), timesSection(), problemsSection(), distributionsSection(), samples, notesSection()];
document.getElementById("main").replaceChildren(...sections);
document.getElementById("nav").append(...sections.map((one) => el("a", { href: `#${one.id}` }, one.querySelector("h2").textContent)));
restoreState(samples);
window.addEventListener("pagehide", saveState);
