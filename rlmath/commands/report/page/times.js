// Where each step's time goes, and memory.
const PHASES = ["generate", "grade", "teacher", "log_probs", "reference", "values", "advantage", "digests", "update", "weight_sync", "evaluate", "save", "other"];

function phasesOf(run) {
  const names = Object.keys(run.metrics).filter((tag) => tag.startsWith("timing/") && tag !== "timing/step").map((tag) => tag.slice(7));
  const known = PHASES.filter((name) => names.includes(name));
  return [...known.filter((name) => name !== "other"), ...names.filter((name) => !PHASES.includes(name)), ...known.filter((name) => name === "other")];
}

// As in curves.png.
const color = (name) => `var(--p${DATA.phases.includes(name) ? DATA.phases.indexOf(name) : 10})`;

// Colors with lines and dots on them, so that phases differ without color.
function patterns(prefix) {
  return svg("defs", {}, ...PHASES.map((name, i) => {
    const pattern = svg("pattern", { id: `${prefix}-${name}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: `rotate(${[0, 45, 90, 135][i % 4]})` });
    const base = svg("rect", { width: 6, height: 6 });
    base.style.fill = color(name);
    pattern.append(base);
    if (i % 3 !== 0) {
      const mark = i % 3 === 1 ? svg("rect", { width: 2, height: 6 }) : svg("circle", { cx: 3, cy: 3, r: 1.3 });
      mark.style.fill = "var(--page)";
      pattern.append(mark);
    }
    return pattern;
  }));
}

const fill = (prefix, name) => PHASES.includes(name) ? `url(#${prefix}-${name})` : "var(--p10)";

function timesOf(run, index) {
  const phases = phasesOf(run);
  if (!phases.length) return el("p", { class: "weak" }, "No step has ended yet.");
  const prefix = `phase${index}`;
  const seconds = (phase, i) => run.metrics[`timing/${phase}`][i] || 0;
  const totals = phases.map((phase) => run.steps.reduce((sum, _, i) => sum + seconds(phase, i), 0));
  const whole = totals.reduce((sum, one) => sum + one, 0) || 1;
  const width = 900, height = 130, bar = width / run.steps.length;
  const highest = Math.max(...run.steps.map((_, i) => phases.reduce((sum, phase) => sum + seconds(phase, i), 0))) || 1;
  const stack = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true", height });
  stack.style.width = "100%";
  stack.append(patterns(prefix));
  phases.forEach((phase, p) => {
    let path = "";
    run.steps.forEach((_, i) => {
      const below = phases.slice(0, p).reduce((sum, one) => sum + seconds(one, i), 0);
      const size = seconds(phase, i) / highest * height;
      if (size > 0.05) path += `M${(i * bar).toFixed(2)} ${(height - below / highest * height - size).toFixed(1)}h${(bar * 0.92).toFixed(2)}v${size.toFixed(1)}h${(-bar * 0.92).toFixed(2)}z`;
    });
    const drawn = svg("path", { d: path });
    drawn.style.fill = fill(prefix, phase);
    stack.append(drawn);
  });
  const water = el("div", { class: "waterfall" });
  const said = el("output", { for: `time-step-${index}` });
  const slider = el("input", { type: "range", id: `time-step-${index}`, min: 0, max: run.steps.length - 1, value: run.steps.length - 1, oninput: draw });
  function draw() {
    const i = Number(slider.value);
    const sum = phases.reduce((all, phase) => all + seconds(phase, i), 0) || 1;
    said.textContent = `step ${run.steps[i]}: ${number(sum)} s`;
    slider.setAttribute("aria-valuetext", said.textContent);
    let start = 0;
    water.replaceChildren(...phases.filter((phase) => seconds(phase, i)).flatMap((phase) => {
      const rect = svg("rect", { x: 400 * start / sum, y: 1, height: 14, width: Math.max(0.8, 400 * seconds(phase, i) / sum) });
      rect.style.fill = fill(prefix, phase);
      start += seconds(phase, i);
      return [el("span", {}, phase.replace("_", " ")), svg("svg", { viewBox: "0 0 400 16", preserveAspectRatio: "none", "aria-hidden": "true" }, rect),
        el("span", { class: "weak" }, `${number(seconds(phase, i))} s, ${share(seconds(phase, i) / sum)}`)];
    }));
  }
  draw();
  return el("div", {}, TWO ? el("h3", {}, run.name) : null,
    el("p", { class: "weak small" }, `Seconds of each step by phase, steps ${run.steps[0]} to ${run.steps[run.steps.length - 1]}; the highest is ${number(highest)} s.`),
    stack,
    el("p", { class: "small" }, phases.map((phase, p) => {
      const swatch = svg("rect", { width: 26, height: 12 });
      swatch.style.fill = fill(prefix, phase);
      return el("span", { class: "key" }, svg("svg", { viewBox: "0 0 26 12", "aria-hidden": "true" }, swatch), `${phase.replace("_", " ")} ${share(totals[p] / whole)}`);
    })),
    el("h3", {}, "One step"), el("div", { class: "row" }, el("label", {}, "step", slider), said), water);
}

function memory() {
  const tags = [...new Set(RUNS.flatMap((run) => Object.keys(run.metrics)))].filter((tag) => tag.startsWith("memory/")).sort();
  return tags.length ? [el("h3", {}, "Memory by phase"), el("div", { class: "charts" }, tags.map(metricChart))] : null;
}

// Mismatch of engine and actor by the age of the weights that sampled.
function lags(run) {
  const found = [...new Set(Object.keys(run.metrics).map((tag) => /^mismatch\/lag_(\d+)\//.exec(tag)?.[1]).filter((lag) => lag))].map(Number).sort((a, b) => a - b);
  if (!found.length) return null;
  const mean = (tag) => {
    const values = (run.metrics[tag] || []).filter((value) => value !== null);
    return values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null;
  };
  const columns = ["token_count", "mean_w", "p99_w", "k3", "effective_sample_size"];
  return el("div", {}, el("h3", {}, `${TWO ? `${run.name}: m` : "M"}ismatch by version lag`), el("div", { class: "scroll" }, el("table", {},
    el("tr", {}, el("th", { scope: "col" }, "versions behind"), columns.map((name) => el("th", { scope: "col", class: "number" }, `mean ${name}`))),
    found.map((lag) => el("tr", {}, el("td", {}, String(lag)), columns.map((name) => el("td", { class: "number" }, number(mean(`mismatch/lag_${lag}/${name}`)))))))));
}

function timesSection() {
  return section("time", "Time and memory", RUNS.map(timesOf), memory(), RUNS.map(lags));
}
