// The sample viewer: a list with filters, and one sample, or those of two runs side by side.
const PAGE = 200;
const FINISH = { stop: "the model ended it", length: "truncated at the limit", failed: "its tools did not work" };
let rendered = true;
let chosen = null;
const ENTRIES = RUNS.flatMap((run, r) => run.samples.map((sample, i) => ({ run, r, i, sample, text: null })));

function entryText(entry) {
  if (entry.text === null) {
    entry.text = `${source(entry.run, entry.run.prompts[entry.sample.prompt])}\n${entry.sample.response.map(([, , pieces]) => source(entry.run, pieces)).join("")}\n${entry.sample.answer ?? ""}`.toLowerCase();
  }
  return entry.text;
}

const problemOf = (sample) => sample.problem.replace(/#\d+$/, "");

// A whole id is meant as it is: p:1 is not p:10.
const IDS = new Set(ENTRIES.map((entry) => problemOf(entry.sample)));

function sampleFacts(sample) {
  const rewards = Object.entries(sample.rewards || {}).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const reason = DATA.methods[sample.method];
  const earlier = "not recorded by the version that wrote this sample";
  const decided = sample.method ? `layer “${sample.method}”${reason ? `: ${reason}` : ""}` : sample.method === undefined ? earlier : "no grader looked";
  const { size, right, mean, deviation } = sample.of_group;
  const figures = `${right} of ${size} right, mean reward ${number(mean)}, standard deviation ${number(deviation)}`;
  const group = sample.dropped ? `dropped by the filter: ${sample.dropped.replace(/_/g, " ")}` : "not dropped by the filter";
  return factsList([
    ["status", statusMark(sample.status)],
    ["reward", `${number(sample.reward)}${rewards ? ` (${rewards})` : ""}`],
    ["taken for the answer", sample.answer === null || sample.answer === undefined ? "none found" : sample.answer],
    ["accepted answers", (sample.accepted || []).join("  or  ") || "none"],
    ["decided by", decided],
    ["group", `${figures}; ${sample.dropped === undefined ? `filter ${earlier}` : group}`],
    ["length", `${number(sample.tokens)} tokens, ${FINISH[sample.finish] || sample.finish}`],
    ...(sample.calls ? [["calls", sample.calls.map(([tool, status, seconds]) => `${tool}: ${status}, ${number(seconds)} s`).join("; ") || "none"]] : []),
    ...(sample.failure ? [["failure", sample.failure]] : []),
    ["sampled by", `engine ${sample.engine}, weights version ${sample.version}, seed ${sample.seed}`],
  ]);
}

// The model's turns, and folded what it read between them.
function responseView(run, { response }) {
  let turn = 0;
  return response.map(([own, tokens, pieces]) => {
    if (!own) return el("details", {}, el("summary", {}, `output ${turn}, ${number(tokens)} tokens`), textBlock(run, pieces, false, `output ${turn}`));
    turn += 1;
    return [response.length > 1 ? el("p", { class: "weak small" }, `turn ${turn}, ${number(tokens)} tokens`) : null, textBlock(run, pieces, rendered, response.length > 1 ? `turn ${turn}` : "response")];
  });
}

function sampleView(entry) {
  const { run, sample } = entry;
  const group = ENTRIES.filter((one) => one.r === entry.r && one.sample.kind === sample.kind && one.sample.step === sample.step && one.sample.problem === sample.problem);
  return el("article", { class: "sample" },
    el("h3", {}, `${TWO ? `${run.name}: ` : ""}${kindName(sample.kind)}, step ${sample.step}, ${plain(sample.problem, 120)}, sample ${sample.index}`),
    group.length > 1 ? el("div", { class: "row small" }, el("span", { class: "weak" }, "of this group:"), group.map((one) => el("button", {
      type: "button", "aria-current": one === entry ? "true" : "false", onclick: () => choose(one),
    }, `${one.sample.index} ${(STATUS[one.sample.status] || ["?"])[0]}`))) : null,
    sampleFacts(sample),
    el("h3", {}, "Prompt"), textBlock(run, run.prompts[sample.prompt], rendered, "prompt"),
    el("h3", {}, "Response"), responseView(run, sample),
    sample.by_token ? tokenDetails(sample) : null);
}

// The other run's sample of the same problem: the same index, at the nearest step.
function counterpart(entry) {
  const wanted = problemOf(entry.sample);
  const others = ENTRIES.filter((one) => one.r !== entry.r && one.sample.kind === entry.sample.kind && problemOf(one.sample) === wanted);
  const distance = (one) => Math.abs(one.sample.step - entry.sample.step) * 1000 + Math.abs(one.sample.index - entry.sample.index);
  return others.sort((a, b) => distance(a) - distance(b))[0] || null;
}

let choose = () => {}, showStep = () => {}, showProblem = () => {}, showGroup = () => {};

function samplesSection() {
  const values = (key) => [...new Set(ENTRIES.map((entry) => entry.sample[key]))];
  const kinds = values("kind"), statuses = values("status").sort();
  const input = (id, label, attributes) => el("label", {}, label, el("input", { id, oninput: filter, ...attributes }));
  const controls = {
    text: input("f-text", "text in prompt, response or answer", { type: "search" }),
    run: TWO ? select("f-run", "run", [["", "both"], ...RUNS.map((run, i) => [i, run.name])], filter) : null,
    kind: select("f-kind", "of", [["", "all"], ...kinds.map((kind) => [kind, kindName(kind)])], filter),
    step: input("f-step", "step", { type: "number", min: 0 }),
    problem: input("f-problem", "problem", { type: "search", list: "problem-ids" }),
    status: select("f-status", "status", [["", "any"], ...statuses.map((one) => [one, `${(STATUS[one] || ["?"])[0]} ${one.replace("_", " ")}`])], filter),
    finish: select("f-finish", "end", [["", "any"], ["stop", "ended"], ["length", "truncated"]], filter),
    least: input("f-reward-least", "reward from", { type: "number", step: "any" }),
    most: input("f-reward-most", "reward to", { type: "number", step: "any" }),
    shortest: input("f-tokens-least", "tokens from", { type: "number", min: 0 }),
    longest: input("f-tokens-most", "tokens to", { type: "number", min: 0 }),
  };
  const value = (name) => controls[name]?.querySelector("input, select").value.trim() ?? "";
  const ids = el("datalist", { id: "problem-ids" }, [...IDS].slice(0, 500).map((id) => el("option", { value: id })));
  const list = el("ul", { class: "list", role: "listbox", tabindex: "0", "aria-label": "samples" });
  const said = el("p", { class: "weak small", role: "status" });
  const detail = el("div", { id: "sample-detail", "aria-live": "polite" });
  const viewer = el("div", { class: "viewer" }, el("div", {}, said, list), detail);
  const raw = el("button", { type: "button", id: "raw", "aria-pressed": "false", onclick: () => {
    rendered = !rendered;
    raw.setAttribute("aria-pressed", String(!rendered));
    show();
  } }, "raw text");
  let found = [], length = PAGE;

  function filter() {
    const text = value("text").toLowerCase(), problem = value("problem");
    const limit = (name) => value(name) === "" ? null : Number(value(name));
    const [step, least, most, shortest, longest] = ["step", "least", "most", "shortest", "longest"].map(limit);
    found = ENTRIES.filter((entry) => {
      const sample = entry.sample;
      return (value("run") === "" || entry.r === Number(value("run"))) && (value("kind") === "" || sample.kind === value("kind")) &&
        (step === null || sample.step === step) && (problem === "" || (IDS.has(problem) ? [problemOf(sample), sample.problem].includes(problem) : sample.problem.includes(problem))) &&
        (value("status") === "" || sample.status === value("status")) && (value("finish") === "" || sample.finish === value("finish")) &&
        (least === null || (sample.reward !== null && sample.reward >= least)) && (most === null || (sample.reward !== null && sample.reward <= most)) &&
        (shortest === null || sample.tokens >= shortest) && (longest === null || sample.tokens <= longest) &&
        (text === "" || entryText(entry).includes(text));
    });
    length = PAGE;
    if (!found.includes(chosen)) chosen = found[0] || null;
    show();
  }
  function show() {
    said.textContent = `${found.length.toLocaleString("en-US")} of ${ENTRIES.length.toLocaleString("en-US")} samples`;
    list.replaceChildren(...found.slice(0, length).map((entry) => el("li", {
      role: "option", id: `sample-${entry.r}-${entry.i}`, "aria-selected": String(entry === chosen), onclick: () => choose(entry),
    }, statusMark(entry.sample.status), ` ${TWO ? `${entry.run.name}, ` : ""}step ${entry.sample.step}${entry.sample.kind === "step" ? "" : ` ${kindName(entry.sample.kind)}`}, ${plain(entry.sample.problem, 60)} #${entry.sample.index}, reward ${number(entry.sample.reward)}, ${entry.sample.tokens} tokens`)));
    if (found.length > length) list.append(el("li", { role: "option", "aria-selected": "false", id: "more", onclick: more }, `show ${Math.min(PAGE, found.length - length)} more`));
    mark();
  }
  function more() {
    length += PAGE;
    show();
  }
  function mark() {
    for (const item of list.children) item.setAttribute("aria-selected", String(chosen !== null && item.id === `sample-${chosen.r}-${chosen.i}`));
    const other = chosen && TWO ? counterpart(chosen) : null;
    viewer.classList.toggle("two", Boolean(other));
    viewer.querySelector("#sample-other")?.remove();
    detail.replaceChildren(chosen ? sampleView(chosen) : el("p", { class: "weak" }, ENTRIES.length ? "No sample fits." : "The page has no samples."));
    if (other) viewer.append(el("div", { id: "sample-other" }, sampleView(other)));
    if (chosen) list.setAttribute("aria-activedescendant", `sample-${chosen.r}-${chosen.i}`);
  }
  choose = (entry) => {
    chosen = entry;
    while (found.indexOf(entry) >= length) length += PAGE;
    if (found.includes(entry) && !document.getElementById(`sample-${entry.r}-${entry.i}`)) show();
    else mark();
    // Within the list only: the page stays where it is.
    const item = document.getElementById(`sample-${entry.r}-${entry.i}`);
    if (item && (item.offsetTop < list.scrollTop || item.offsetTop + item.offsetHeight > list.scrollTop + list.clientHeight)) list.scrollTop = item.offsetTop - list.clientHeight / 2;
  };
  list.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 }[event.key];
    if (move === undefined || !found.length) return;
    event.preventDefault();
    choose(found[Math.max(0, Math.min(found.length - 1, found.indexOf(chosen) + move))]);
  });
  const reset = () => {
    for (const control of Object.values(controls)) if (control) control.querySelector("input, select").value = "";
  };
  const go = (changes) => {
    reset();
    for (const [name, wanted] of Object.entries(changes)) controls[name].querySelector("input, select").value = wanted;
    filter();
    document.getElementById("samples").scrollIntoView();
    list.focus({ preventScroll: true });
  };
  showStep = (step, kind = "step") => go({ step, kind: kinds.includes(kind) ? kind : "" });
  showProblem = (run, problem) => go({ problem, ...(TWO && run !== null ? { run } : {}) });
  showGroup = (run, step, problem) => go({ kind: "step", step, problem, ...(TWO ? { run } : {}) });
  const made = section("samples", "Samples", el("div", { class: "row" }, Object.values(controls),
    el("button", { type: "button", id: "f-reset", onclick: () => { reset(); filter(); } }, "clear"), raw), ids, viewer);
  filter();
  made.refilter = filter;
  return made;
}
