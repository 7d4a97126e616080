// What the change of a mean between two windows of steps is made of.
const METRIC_NAMES = { reward: "mean reward", accuracy: "accuracy", length: "mean response length" };

function changeTable(run, r, change) {
  const most = Math.max(...change.causes.map((cause) => Math.abs(cause.share)), 1e-12);
  const relevant = change.causes.filter((cause) => Math.abs(cause.share) > 1e-9 || cause.standard_error > 1e-9);
  const others = change.causes.filter((cause) => !relevant.includes(cause));
  const bar = (cause) => {
    const width = 60 * Math.abs(cause.share) / most;
    return svg("svg", { viewBox: "0 0 124 14", width: 124, height: 14, "aria-hidden": "true" },
      svg("line", { class: "grid", x1: 62, x2: 62, y1: 0, y2: 14 }),
      svg("rect", { class: cause.share < 0 ? "fell" : "rose", x: cause.share < 0 ? 62 - width : 62, y: 2, width, height: 10 }));
  };
  const window = ([first, end]) => end - first > 1 ? `${first} to ${end - 1}` : String(first);
  return el("div", {},
    el("h3", {}, `${METRIC_NAMES[change.metric]}: ${number(change.before)} → ${number(change.after)}`),
    el("p", { class: "small" }, `Steps ${window(change.steps)} against steps ${window(change.against)}: ${change.change < 0 ? "▼" : "▲"} ${number(change.change)} ± ${number(change.standard_error)}. ` +
      `${change.shared_problems.toLocaleString("en-US")} problems are in both windows, with ${share(change.shared_samples)} of the samples.`),
    relevant.length ? el("div", { class: "scroll" }, el("table", { class: "causes" },
      el("tr", {}, ["cause", "", "share of the change", "± standard error"].map((name) => el("th", { scope: "col" }, name))),
      relevant.map((cause) => el("tr", {}, el("td", {}, plain(cause.name, 120)), el("td", {}, bar(cause)),
        el("td", { class: "number" }, `${cause.share < 0 ? "▼" : "▲"} ${number(cause.share)}`), el("td", { class: "number" }, number(cause.standard_error)))))) : null,
    others.length ? el("p", { class: "weak small" }, `No part in it: ${others.map((cause) => plain(cause.name, 80)).join(", ")}.`) : null,
    change.moved.length ? el("p", { class: "small" }, "Groups that moved it most: ", change.moved.map((group) => {
      const [step, ...rest] = group.addresses[0].split("/");
      const problem = rest.slice(0, -1).join("/");
      return [el("button", { type: "button", title: `${number(group.before)} before, ${number(group.now)} now`, onclick: () => showGroup(r, step, problem) }, plain(`${step}/${problem}`, 60)), " "];
    })) : null);
}

function changesSection() {
  return section("changes", "What changed", el("p", { class: "weak small" },
    "The last steps against those before, split exactly into causes (rlmath explain; docs/report.md has what each means). A share is real when it is several standard errors from 0."),
  RUNS.map((run, r) => el("div", {}, TWO ? el("h3", {}, run.name) : null, run.changes.length
    ? run.changes.map((change, i) => lazyDetails(`change-${r}-${change.metric}`, METRIC_NAMES[change.metric], () => changeTable(run, r, change), i === 0))
    : el("p", { class: "weak" }, "There are no samples of two steps."))));
}
