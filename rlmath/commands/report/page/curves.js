// Curves of every metric, with the events on them.
const FIRST_METRICS = ["rollout/rewards", "eval/accuracy", "rollout/response_length", "sft/loss", "sft/lr"];
const MAIN_METRICS = [
  "rollout/accuracy", "rollout/truncated_share", "train/entropy_loss", "train/grad_norm", "train/clip_fraction",
  "train/importance_ratio", "alignment/mean_exp_abs_diff", "timing/step", "throughput/tokens_per_s",
];
const eventFilter = new Set(Object.keys(DATA.event_kinds).filter((kind) => kind !== "decision"));

function metricChart(tag) {
  const series = RUNS.flatMap((run, i) => run.metrics[tag]
    ? [{ run: i, steps: run.steps, values: run.metrics[tag], name: TWO ? run.name : "" }] : []);
  const error = `${tag}_standard_error`;
  const bands = RUNS.flatMap((run, i) => {
    if (!run.metrics[tag] || !run.metrics[error]) return [];
    const [mean, spread] = [run.metrics[tag], run.metrics[error]];
    const edge = (sign) => mean.map((value, j) => value === null || spread[j] === null ? null : value + sign * spread[j]);
    return [{ run: i, steps: run.steps, low: edge(-1), high: edge(1) }];
  });
  return chart({ title: tag, unit: bands.length ? "± standard error" : "", series, bands, events: shownEvents(), onStep: showStep });
}

const shownEvents = () => RUNS.flatMap((run, i) =>
  run.events.filter((event) => eventFilter.has(event[1])).map((event) => [event[0], event[1], TWO ? `${run.name}: ${event[2]}` : event[2], i]))
  .sort((a, b) => a[0] - b[0]);

function showEvents() {
  const list = document.getElementById("event-list");
  list.open = true;
  list.scrollIntoView();
}

function curvesSection() {
  const tags = [...new Set(RUNS.flatMap((run) => Object.keys(run.metrics)))].sort();
  const holder = el("div");
  const opened = new Map([["group-main", true]]);
  const search = el("input", { id: "metric-search", type: "search", placeholder: "part of a metric's name", oninput: draw });
  const kinds = Object.entries(DATA.event_kinds).map(([kind, [sign, name]]) => {
    const count = RUNS.reduce((sum, run) => sum + run.events.filter((event) => event[1] === kind).length, 0);
    return count ? el("label", { class: "inline" }, el("input", {
      type: "checkbox", id: `events-${kind}`, checked: eventFilter.has(kind),
      onchange: (event) => { eventFilter[event.target.checked ? "add" : "delete"](kind); draw(); },
    }), `${sign} ${name} (${count})`) : null;
  });
  function draw() {
    for (const box of holder.querySelectorAll("details")) opened.set(box.id, box.open);
    const wanted = search.value.trim().toLowerCase();
    const grid = (list) => el("div", { class: "charts" }, list.map(metricChart));
    if (wanted) {
      const found = tags.filter((tag) => tag.toLowerCase().includes(wanted));
      holder.replaceChildren(el("p", { class: "weak", role: "status" }, `${found.length} metrics${found.length > 60 ? "; the first 60" : ""}`), grid(found.slice(0, 60)));
      return;
    }
    const groups = new Map([["main", MAIN_METRICS.filter((tag) => tags.includes(tag))]]);
    // Memory has its place beside the time.
    for (const tag of tags.filter((one) => !one.startsWith("memory/"))) {
      const group = tag.split("/")[0];
      groups.set(group, [...(groups.get(group) || []), tag]);
    }
    holder.replaceChildren(...[...groups].filter(([, list]) => list.length).map(([group, list]) => lazyDetails(
      `group-${group}`, group === "main" ? "main metrics" : `${group}/ (${list.length})`,
      () => grid(list), opened.get(`group-${group}`))));
  }
  draw();
  const choice = el("select", { id: "axis", onchange: (event) => setAxis(event.target.value) },
    Object.entries(AXES).map(([name, title]) => el("option", { value: name }, title)));
  const events = RUNS.flatMap((run) => run.events.map((event) => el("tr", {},
    el("td", { class: "number" }, String(event[0])), el("td", {}, DATA.event_kinds[event[1]].join(" ")),
    TWO ? el("td", {}, run.name) : null, el("td", {}, plain(event[2], 600)))));
  return section("curves", "Curves", TWO ? runKey() : null,
    el("div", { class: "row" }, el("label", {}, "find a metric", search), el("label", {}, "axis of all charts", choice), kinds),
    el("p", { class: "weak small" }, "Point at a chart, or focus it and use the arrow keys, to read values; click or Enter shows the step's samples. A curve of more than 300 points is pale, behind its moving mean."),
    holder,
    events.length ? lazyDetails("event-list", `All events (${events.length})`, () => el("div", { class: "scroll" }, el("table", {}, events))) : null);
}
