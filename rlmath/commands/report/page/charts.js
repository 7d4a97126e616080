// A chart of lines over steps: pointer or arrow keys read its values.
const W = 360, H = 150, LEFT = 44, RIGHT = 8, TOP = 14, BOTTOM = 20;

function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) {
    found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  }
  return found;
}

function short(value, digits = 4) {
  const size = Math.abs(value);
  if (size >= 1e6 || (size && size < 1e-3)) return value.toExponential(digits - 4);
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(digits - 1))}k`;
  return String(Number(value.toPrecision(digits)));
}

// Labels of ticks, with as many digits as tell them apart: a ratio between 0.9998 and 1.0001.
function labels(values) {
  for (let digits = 4; ; digits++) {
    const found = values.map((value) => short(value, digits));
    if (digits > 8 || new Set(found).size === found.length) return found;
  }
}

// A curve of more points than this is drawn pale, behind its moving mean.
const MANY = 300;

function smoothed(points) {
  const reach = Math.round(points.length / 100);
  return points.map((p, i) => {
    const near = points.slice(Math.max(0, i - reach), i + reach + 1);
    return [p[0], near.reduce((sum, one) => sum + one[1], 0) / near.length];
  });
}

// What the horizontal axis counts; another choice draws all charts again.
const AXES = { step: "steps", tokens: "sampled tokens", hours: "hours of steps" };
let axis = "step";
let CHARTS = [];

// Where a step is on the axis of its run; a step without a line of metrics is where the last one before it is.
function position(run, step) {
  if (axis === "step") return step;
  const { steps, axes } = RUNS[run];
  let below = -1;
  for (let low = 0, high = steps.length - 1; low <= high;) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) { below = middle; low = middle + 1; } else high = middle - 1;
  }
  return below < 0 ? 0 : axes[axis][below];
}

function setAxis(name) {
  axis = name;
  const drawn = CHARTS;
  CHARTS = [];
  for (const [figure, options] of drawn) if (figure.isConnected) figure.replaceWith(chart(options));
}

// series: {run, steps, values, name}; bands: {run, steps, low, high}; events: [step, kind, text, run].
function chart(options) {
  const { title, unit = "", series, bands = [], events = [], floor = null, ceiling = null, onStep = null } = options;
  const all = [...series.flatMap((one) => one.values), ...bands.flatMap((one) => [...one.low, ...one.high])]
    .filter((value) => value !== null && value !== undefined);
  const steps = [...new Set(series.flatMap((one) => one.steps.filter((_, i) => one.values[i] !== null)))]
    .sort((a, b) => a - b);
  const figure = el("figure", { class: "chart", tabindex: "0" });
  CHARTS.push([figure, options]);
  if (!all.length) {
    figure.append(el("figcaption", {}, title, el("div", { class: "read" }, "no finite value")));
    return figure;
  }
  let low = floor ?? Math.min(...all), high = ceiling ?? Math.max(...all);
  if (high - low < 1e-12 * Math.max(1, Math.abs(high))) {
    const pad = Math.abs(high) * 0.1 || 1;
    low = high === 0 ? 0 : low - pad;
    high += pad;
  } else {
    const pad = 0.05 * (high - low);
    low = floor ?? low - pad;
    high = ceiling ?? high + pad;
  }
  const places = series.flatMap((one) => one.steps.filter((_, i) => one.values[i] !== null).map((step) => position(one.run, step)));
  const first = Math.min(...places), last = Math.max(...places);
  const xAt = (place) => LEFT + (last === first ? 0.5 : (place - first) / (last - first)) * (W - LEFT - RIGHT);
  const x = (run, step) => xAt(position(run, step));
  // The run whose point the cursor is at.
  const runAt = (step) => (series.find((one) => one.steps.includes(step)) || series[0]).run;
  const y = (value) => TOP + (1 - (Math.min(high, Math.max(low, value)) - low) / (high - low)) * (H - TOP - BOTTOM);
  const drawing = svg("svg", { viewBox: `0 0 ${W} ${H}`, "aria-hidden": "true" });
  const heights = ticks(low, high, 4), names = labels(heights);
  heights.forEach((tick, i) => drawing.append(
    svg("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: y(tick), y2: y(tick) }),
    svg("text", { x: LEFT - 4, y: y(tick) + 3, "text-anchor": "end" }, names[i])));
  for (const tick of ticks(first, last, 5).filter((one) => axis !== "step" || Number.isInteger(one))) {
    const label = short(tick), half = 3.3 * label.length;
    const middle = Math.min(Math.max(xAt(tick), half), W - half);
    drawing.append(svg("text", { x: middle, y: H - 6, "text-anchor": "middle" }, label));
  }
  for (const band of bands) {
    const points = band.steps.map((step, i) => [step, band.low[i], band.high[i]]).filter((p) => p[1] !== null && p[1] !== undefined && p[2] !== null);
    const upper = points.map((p) => `${x(band.run, p[0]).toFixed(1)},${y(p[2]).toFixed(1)}`);
    const lower = points.map((p) => `${x(band.run, p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).reverse();
    if (points.length > 1) drawing.append(svg("polygon", { class: `band${band.run}`, points: [...upper, ...lower].join(" ") }));
  }
  let lastSign = -100;
  for (const [step, kind, , run = 0] of events) {
    const place = position(run, step);
    if (place < first || place > last) continue;
    drawing.append(svg("line", { class: "event", x1: xAt(place), x2: xAt(place), y1: TOP, y2: H - BOTTOM }));
    if (xAt(place) - lastSign < 7) continue;
    lastSign = xAt(place);
    drawing.append(svg("text", { class: "event-sign", x: lastSign, y: 10 }, DATA.event_kinds[kind][0]));
  }
  for (const one of series) {
    const points = one.steps.map((step, i) => [step, one.values[i]]).filter((p) => p[1] !== null);
    const draw = (line, style) => drawing.append(svg("polyline", {
      class: `line run${one.run}${style}`, points: line.map((p) => `${x(one.run, p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" "),
    }));
    const isSmoothed = points.length > MANY && !one.thin;
    draw(points, isSmoothed ? " pale" : one.thin ? " thin" : "");
    if (isSmoothed) draw(smoothed(points), "");
    const alone = points.length === 1;
    if (alone || (points.length <= 25 && !one.thin)) {
      for (const p of points) drawing.append(svg("circle", { class: `dot${one.run}${alone ? " alone" : ""}`, cx: x(one.run, p[0]), cy: y(p[1]), r: alone ? 5 : 2.2 }));
    }
  }
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: H - BOTTOM, x1: -9, x2: -9 });
  drawing.append(cursor);
  const read = el("div", { class: "read", "aria-live": "polite" });
  const at = series.map((one) => new Map(one.steps.map((step, i) => [step, one.values[i]])));
  let place = steps.length - 1;
  const show = (index, moved) => {
    place = Math.max(0, Math.min(steps.length - 1, index));
    const step = steps[place];
    const values = series.map((one, i) => at[i].has(step) && at[i].get(step) !== null
      ? `${one.name ? `${one.name} ` : ""}${number(at[i].get(step))}` : null).filter((text) => text);
    // Until a chart is pointed at, it names no event: all charts would name the same one.
    const here = events.filter((event) => moved && event[0] === step).map((event) => `${DATA.event_kinds[event[1]][0]} ${plain(event[2], 160)}`);
    const where = axis === "step" ? "" : ` (${short(position(runAt(step), step))} ${AXES[axis]})`;
    const only = steps.length === 1 ? ", the only value" : "";
    read.textContent = [`step ${step}${where}: ${values.join(" · ")}${only}`, ...here].join(" — ");
    if (moved) {
      cursor.setAttribute("x1", x(runAt(step), step));
      cursor.setAttribute("x2", x(runAt(step), step));
    }
  };
  show(place, false);
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * W;
    const away = (step) => Math.abs(x(runAt(step), step) - at);
    let best = 0;
    steps.forEach((one, i) => { if (away(one) < away(steps[best])) best = i; });
    show(best, true);
  });
  const open = () => onStep && onStep(steps[place]);
  drawing.addEventListener("click", open);
  figure.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 }[event.key];
    if (event.key === "Enter") open();
    if (move === undefined) return;
    event.preventDefault();
    show(place + move, true);
  });
  figure.setAttribute("role", "group");
  figure.setAttribute("aria-label", `${title}. Arrow keys read values${onStep ? ", Enter shows the step's samples" : ""}.`);
  figure.append(el("figcaption", {}, title, unit ? el("span", { class: "unit" }, ` ${unit}`) : null, read), drawing);
  return figure;
}

function runKey() {
  return el("p", { class: "small" }, RUNS.map((run, i) => el("span", { class: "key" },
    svg("svg", { viewBox: "0 0 26 12", "aria-hidden": "true" }, svg("line", { class: `line run${i}`, x1: 0, x2: 26, y1: 6, y2: 6 })),
    `${run.name} (${i ? "dashed" : "solid"})`)));
}

// One row of cells: a bar's height is the share of right samples, a full bar has another color.
function heatRow(cells, columns, width) {
  const drawing = svg("svg", { viewBox: `0 0 ${columns * width} 14`, width: columns * width, height: 14, "aria-hidden": "true" });
  let seen = "", bars = "", full = "";
  for (const [column, right, graded] of cells) {
    const x = column * width, height = 13 * right / graded;
    seen += `M${x} 13h${width - 1}v1h${1 - width}z`;
    const bar = `M${x} 14v${-height.toFixed(1)}h${width - 1}v${height.toFixed(1)}z`;
    if (right === graded) full += bar;
    else if (right) bars += bar;
  }
  drawing.append(svg("rect", { class: "frame", x: 0, y: 0, width: columns * width, height: 14 }),
    svg("path", { class: "seen", d: seen }), svg("path", { class: "bar", d: bars }), svg("path", { class: "bar all", d: full }));
  return drawing;
}
