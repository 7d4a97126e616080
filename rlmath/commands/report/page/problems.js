// Pass rate per problem over time, and distributions over steps.
const SHOWN_ROWS = 30;

function heatTable(run, index, kind) {
  const heat = run.kinds[kind].heat;
  if (!heat.rows.length) return el("p", { class: "weak" }, "Nothing was graded.");
  const width = Math.max(3, Math.min(14, Math.floor(560 / heat.columns.length)));
  const rate = (cells) => cells.reduce((sum, cell) => sum + cell[1], 0) / cells.reduce((sum, cell) => sum + cell[2], 0);
  const half = heat.columns.length / 2;
  const change = (row) => {
    const [early, late] = [row.cells.filter((cell) => cell[0] < half), row.cells.filter((cell) => cell[0] >= half)];
    return early.length && late.length ? rate(late) - rate(early) : null;
  };
  const orders = {
    often: ["most often sampled", () => 0],
    hardest: ["lowest pass rate", (row) => rate(row.cells)],
    easiest: ["highest pass rate", (row) => -rate(row.cells)],
    worse: ["pass rate fell most", (row) => change(row) ?? 9],
    better: ["pass rate rose most", (row) => -(change(row) ?? -9)],
  };
  let all = false;
  const more = el("button", { type: "button", hidden: heat.rows.length <= SHOWN_ROWS, onclick: () => { all = !all; draw(); } });
  const holder = el("div", { class: "scroll heat", tabindex: "0", role: "group", "aria-label": "pass rates" });
  const order = select(`order-${index}-${kind}`, "order", Object.entries(orders).map(([key, [name]]) => [key, name]), draw);
  function draw() {
    const by = orders[order.querySelector("select").value][1];
    more.textContent = all ? `show ${SHOWN_ROWS}` : `show all ${heat.rows.length}`;
    const rows = [...heat.rows].sort((a, b) => by(a) - by(b));
    holder.replaceChildren(el("table", {},
      el("tr", {}, ["problem", `steps ${heat.columns[0][0]} to ${heat.columns[heat.columns.length - 1][1]}`, "right", "change of halves"].map((name) => el("th", { scope: "col" }, name))),
      rows.slice(0, all ? rows.length : SHOWN_ROWS).map((row) => {
        const right = row.cells.reduce((sum, cell) => sum + cell[1], 0), graded = row.cells.reduce((sum, cell) => sum + cell[2], 0);
        const moved = change(row);
        const spoken = row.cells.map((cell) => `${heat.columns[cell[0]].join("–")}: ${cell[1]} of ${cell[2]}`).join(", ");
        return el("tr", {}, el("td", {}, el("button", { type: "button", title: spoken.slice(0, 600), onclick: () => showProblem(index, row.id) }, plain(row.id, 60))),
          el("td", {}, heatRow(row.cells, heat.columns.length, width)),
          el("td", {}, `${right} of ${graded}`),
          el("td", {}, moved === null ? "" : `${moved < 0 ? "▼" : moved > 0 ? "▲" : "="} ${share(Math.abs(moved))}`));
      })));
  }
  draw();
  return el("div", {}, el("div", { class: "row" }, order, more), el("p", { class: "weak small" },
    "A bar's height is the share of right samples in these steps; a full bar (all right) has another color, a line at the bottom is none right, and an empty place was not sampled. " +
    (heat.left_out ? `${heat.left_out.toLocaleString("en-US")} more problems are not shown. ` : "") + "A problem's button shows its samples."), holder);
}

// The kind whose problems were sampled in most steps says most about change.
function mostRepeated(run) {
  const visits = (kind) => {
    const rows = run.kinds[kind].heat.rows;
    return rows.length ? rows.reduce((sum, row) => sum + row.cells.length, 0) / rows.length : 0;
  };
  return Object.keys(run.kinds).sort((a, b) => visits(b) - visits(a))[0];
}

function problemsSection() {
  return section("problems", "Pass rate per problem", RUNS.map((run, i) => el("div", {}, TWO ? el("h3", {}, run.name) : null,
    Object.keys(run.kinds).map((kind) => lazyDetails(`heat-${i}-${kind}`, `${kindName(kind)} problems`, () => heatTable(run, i, kind), kind === mostRepeated(run))))));
}

function distribution(kind, key, title, unit) {
  const having = RUNS.map((run, i) => [run.kinds[kind], i]).filter(([data]) => data);
  const column = (data, place) => data[key].map((values) => values.length ? values[place] : null);
  return chart({
    title, unit,
    series: having.flatMap(([data, i]) => [[3, "median"], [1, "5 %"], [5, "95 %"], [6, "most"]].map(([place, name]) =>
      ({ run: i, steps: data.steps, values: column(data, place), name: TWO ? `${RUNS[i].name} ${name}` : name, thin: place !== 3 }))),
    bands: having.flatMap(([data, i]) => [{ run: i, steps: data.steps, low: column(data, 1), high: column(data, 5) }, { run: i, steps: data.steps, low: column(data, 2), high: column(data, 4) }]),
    onStep: (step) => showStep(step, kind),
  });
}

function distributionsSection() {
  const kinds = [...new Set(RUNS.flatMap((run) => Object.keys(run.kinds)))];
  const of = (kind) => {
    const having = RUNS.map((run, i) => [run.kinds[kind], i]).filter(([data]) => data);
    const statuses = [...new Set(having.flatMap(([data]) => Object.keys(data.statuses)))];
    const plainChart = (title, values, unit = "") => chart({
      title, unit, onStep: (step) => showStep(step, kind),
      series: having.map(([data, i]) => ({ run: i, steps: data.steps, values: values(data), name: TWO ? RUNS[i].name : "" })),
    });
    return el("div", { class: "charts" },
      distribution(kind, "lengths", "response length", "tokens: median, 25–75 %, 5–95 %, most"),
      distribution(kind, "rewards", "reward", "median, 25–75 %, 5–95 %, most"),
      plainChart("mean reward", (data) => data.mean_reward),
      plainChart("truncated", (data) => data.truncated, "share of responses truncated"),
      statuses.map((status) => plainChart(`status: ${status.replace("_", " ")}`, (data) => data.steps.map((_, i) => (data.statuses[status]?.[i] || 0) / data.samples[i]), "share of samples")));
  };
  return section("distributions", "Lengths, rewards and statuses", TWO ? runKey() : null, kinds.length
    ? kinds.map((kind, place) => lazyDetails(`dist-${kind}`, kindName(kind), () => of(kind), place === 0))
    : el("p", { class: "weak" }, "No samples were read."));
}
