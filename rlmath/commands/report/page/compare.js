// Two runs: settings that differ, and problems that one of them solves.
function compareSection() {
  const { settings, problems } = DATA.comparison;
  const value = (one) => plain(typeof one === "string" ? one : JSON.stringify(one), 300);
  const solvers = (kind, r) => {
    const ids = problems[kind].only[r], more = problems[kind].more[r];
    return lazyDetails(`only-${kind}-${r}`, `${kindName(kind)}: ${(ids.length + more).toLocaleString("en-US")} solved by ${RUNS[r].name} alone`, () => el("div", {},
      el("p", { class: "small" }, ids.map((id) => [el("button", { type: "button", onclick: () => showProblem(null, id) }, plain(id, 80)), " "])),
      more ? el("p", { class: "weak small" }, `${more} more are left out.`) : null));
  };
  return section("compare", "What differs", el("h3", {}, `Settings (${settings.length})`),
    settings.length ? el("div", { class: "scroll" }, el("table", {},
      el("tr", {}, ["setting", ...RUNS.map((run) => run.name)].map((name) => el("th", { scope: "col" }, name))),
      settings.map(([key, ...both]) => el("tr", {}, el("td", {}, key), both.map((one) => el("td", {}, value(one)))))))
      : el("p", { class: "weak" }, "None, except where the runs are written."),
    el("h3", {}, "Problems"), el("p", { class: "weak small" },
      "Problems that both runs sampled, each in the newest step of each run that did; solved is at least one right sample. A problem's button shows the samples of both side by side."),
    Object.keys(problems).map((kind) => el("div", {}, el("p", {}, `${kindName(kind)}: solved by both ${problems[kind].both}, by neither ${problems[kind].neither}`),
      RUNS.map((_, r) => solvers(kind, r)))));
}
