// Draws the panels of panels.py as SVG, sorts tables, and remembers over a reload what the reader chose.
"use strict";

const groups = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const storeKey = "report:" + location.pathname;
const AXES = { step: "updates", examples_seen: "training images seen", seconds: "seconds of training" };
const COLOURS = 8;

// ---- what the reader chose -----------------------------------------------------------------------

const chosen = Object.assign({ axis: "step", theme: "auto", hidden: {}, sorts: {} }, load());

function load() {
  try { return JSON.parse(sessionStorage.getItem(storeKey)) || {}; } catch { return {}; }
}

function save() {
  try { sessionStorage.setItem(storeKey, JSON.stringify(chosen)); } catch { /* a page of a file may not be allowed to */ }
}

const isHidden = (key) => Boolean(chosen.hidden[key]);

// ---- elements ------------------------------------------------------------------------------------

function add(parent, name, attributes = {}, text) {
  const svg = parent.namespaceURI.endsWith("svg") || name === "svg";
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) element.setAttribute(key, value);
  }
  if (text !== undefined) element.textContent = text;
  return parent.appendChild(element);
}

function colour(element, index) {
  element.style.setProperty("--c", index === null || index === undefined ? "var(--soft)" : `var(--c${index % COLOURS})`);
  return element;
}

function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 12, innerHeight - box.height - 4))}px`;
}

// A run lights up in every picture and in the table of runs.
function light(section, run) {
  for (const element of section.querySelectorAll(".hot")) element.classList.remove("hot");
  section.classList.toggle("hovering", run !== null);
  if (run === null) return;
  for (const element of section.querySelectorAll(`[data-run="${run}"]`)) element.classList.add("hot");
}

// ---- numbers and scales --------------------------------------------------------------------------

function figure(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e7 || size < 1e-4) return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(4)));
}

function tickText(value, step) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e12 || size < 1e-4) return value.toExponential(0).replace("e+", "e");
  if (size >= 1e9) return `${Number((value / 1e9).toPrecision(3))}B`;
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e5) return `${Number((value / 1e3).toPrecision(4))}k`;
  if (size >= 1e3) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  return step ? value.toFixed(Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9)))) : String(Number(value.toPrecision(3)));
}

function linearTicks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const digits = step / power === 2.5 ? power / 10 : power;
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push([k * step, tickText(k * step, digits)]);
  return ticks;
}

function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 0.6) return linearTicks(low, high, count).filter(([value]) => value > 0);
  const every = Math.ceil(decades / count), steps = decades > count / 2 ? [1] : decades > count / 3.2 ? [1, 3] : [1, 2, 5];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const step of steps) {
      const value = step * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001 && power % every === 0) ticks.push([value, tickText(value)]);
    }
  }
  return ticks;
}

function scale({ scale: kind, ticks }, low, high, from, to, count) {
  const log = kind === "log";
  if (kind === "zero") low = 0;
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) / 2 || 0.5), high + (Math.abs(high) / 2 || 0.5)];
  const f = log ? Math.log : (v) => v;
  const at = (value) => from + ((f(value) - f(low)) / (f(high) - f(low))) * (to - from);
  const given = ticks && ticks.map((value) => [value, tickText(value)]);
  return { at, log, low, high, ticks: given || (log ? logTicks : linearTicks)(low, high, count) };
}

// ---- pictures ------------------------------------------------------------------------------------

// Marks of a curve panel: a line for each visible run over the chosen axis.
function curveMarks(group, panel) {
  return group.runs.flatMap((run, index) => {
    if (isHidden(group.key + run.colour)) return [];
    const xs = run.axes[chosen.axis];
    const points = panel.values[index].map((y, i) => [xs[i], y]).filter(([x, y]) => x !== null && y !== null);
    if (!points.length) return [];
    const marks = [{ kind: "line", colour: run.colour, run: index, points, tip: `${run.label} (${run.status})`, many: group.runs.length > 8 }];
    if (run.status === "diverged") marks.push({ kind: "cross", colour: run.colour, run: index, points: points.slice(-1) });
    else if (points.length === 1 || run.status === "running") marks.push({ kind: "hollow", colour: run.colour, run: index, points: points.slice(-1) });
    return marks;
  });
}

function extent(marks, k) {
  const values = marks.flatMap((mark) => mark.points.map((point) => point[k])).filter((value) => value !== null && value !== undefined);
  return values.length ? [Math.min(...values), Math.max(...values)] : null;
}

function domains(panel, marks) {
  let x = extent(marks, 0), y = panel.y.domain || extent(marks, 1);
  if (!x || !y) return null;
  if (panel.kind === "xy") x = [x[0] / 1.25, x[1] * 1.25];
  else if (panel.x.scale === "linear") x = [Math.min(0, x[0]), x[1]];
  if (!panel.y.domain) {
    const pad = (y[1] - y[0]) * 0.05;
    y = panel.y.scale === "log" ? [y[0] / 1.1, y[1] * 1.1] : [y[0] >= 0 ? Math.max(0, y[0] - pad) : y[0] - pad, y[1] + pad];
  }
  return { x, y };
}

function draw(section, group, panel, box) {
  const marks = panel.kind === "curve" ? curveMarks(group, panel) : panel.marks.filter((mark) => !mark.label || !isHidden(group.key + panel.id + mark.label));
  const shown = panel.kind === "curve" ? { ...panel, x: { label: AXES[chosen.axis], scale: "linear" } } : panel;
  const range = domains(shown, marks);
  box.replaceChildren();
  if (!range) {
    add(box, "p", { class: "soft" }, "Nothing to show: all runs are hidden, or have no values yet.");
    return;
  }
  const width = Math.max(box.clientWidth, 220), wide = panel.kind === "xy";
  const height = Math.round(Math.max(230, Math.min(wide ? 420 : 300, width * 0.6)));
  const y = scale(shown.y, ...range.y, height - 42, 22, 6);
  const left = 12 + 7.2 * Math.max(...y.ticks.map(([, text]) => text.length), 2);
  const x = scale(shown.x, ...range.x, left, width - 10, Math.max(3, Math.floor(width / 90)));
  const svg = add(box, "svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", tabindex: 0, "aria-label": `${panel.title}. ${panel.note} Arrow keys step through the points.` });
  axes(svg, x, y, shown, width, height, left);
  const clip = `clip-${group.key}${group.panels.indexOf(panel)}`;
  add(add(add(svg, "defs"), "clipPath", { id: clip }), "rect", { x: left, y: 16, width: Math.max(width - left - 4, 1), height: height - 52 });
  const inside = add(svg, "g", { "clip-path": `url(#${clip})` }), above = add(svg, "g");
  const spots = marks.flatMap((mark) => drawMark(inside, above, mark, x, y, shown));
  listen(section, svg, spots, shown);
}

function axes(svg, x, y, panel, width, height, left) {
  for (const [value, text] of y.ticks) {
    add(svg, "line", { class: "grid", x1: left, x2: width - 6, y1: y.at(value), y2: y.at(value) });
    add(svg, "text", { x: left - 7, y: y.at(value) + 4, "text-anchor": "end" }, text);
  }
  let end = -Infinity;
  for (const [value, text] of x.ticks) {
    const half = text.length * 3.6, at = x.at(value);
    add(svg, "line", { class: "axis", x1: at, x2: at, y1: height - 42, y2: height - 37 });
    if (at - half < end + 6) continue;
    const middle = Math.min(at, width - half);
    add(svg, "text", { x: middle, y: height - 23, "text-anchor": "middle" }, text);
    end = middle + half;
  }
  add(svg, "line", { class: "axis", x1: left, x2: width - 6, y1: height - 42, y2: height - 42 });
  add(svg, "text", { x: (left + width) / 2, y: height - 5, "text-anchor": "middle" }, panel.x.label + (x.log ? " (log)" : ""));
  add(svg, "text", { x: 0, y: 10 }, panel.y.label + (y.log ? " (log)" : ""));
}

const cross = (cx, cy, r) => `M${cx - r},${cy - r}L${cx + r},${cy + r}M${cx - r},${cy + r}L${cx + r},${cy - r}`;

// Draws one mark; returns the places where the pointer finds its points.
function drawMark(inside, above, mark, x, y, panel) {
  const places = mark.points.map(([px, py]) => [x.at(px), py === null || py === undefined ? null : y.at(py)]);
  const bottom = y.at(y.low), top = y.at(y.high), run = mark.run;
  const put = (parent, name, attributes) => colour(add(parent, name, { "data-run": run, ...attributes }), mark.colour);
  const pale = mark.kind === "points" && mark.label === null ? " pale" : "";
  if (mark.kind === "band") {
    add(inside, "rect", { class: "band", x: places[0][0], y: top, width: Math.max(places[1][0] - places[0][0], 1), height: bottom - top });
    return [];
  }
  if (mark.kind === "rule") {
    put(inside, "line", { class: "rule", x1: places[0][0], x2: places[0][0], y1: top, y2: bottom });
    colour(add(above, "text", { class: "ruletext", x: places[0][0] + 6, y: top + 12 }, mark.label), mark.colour);
    return [];
  }
  if (mark.kind === "line") {
    const path = places.map(([px, py], i) => `${i ? "L" : "M"}${px.toFixed(1)},${py.toFixed(1)}`).join("");
    put(inside, "path", { class: `line ${mark.style || ""}${mark.many ? " many" : ""}`, d: path });
  }
  const dots = mark.kind !== "line" || mark.tips;
  mark.points.forEach(([, , low, high], i) => {
    const [px, py] = places[i];
    if (low !== null && low !== undefined) {
      const open = high === null || high === undefined; // no end was measured
      const from = y.log && low <= 0 ? bottom : y.at(low), to = open ? top : y.at(high);
      const end = open ? "" : `M${px - 4},${to}h8`;
      put(inside, "path", { class: `whisker${pale}`, d: `M${px},${from}V${to}M${px - 4},${from}h8${end}` });
    }
    if (mark.kind === "cross") put(above, "path", { class: "cross", d: cross(px, py === null ? bottom - 9 : py, 4.5) });
    else if (mark.kind === "hollow") put(inside, "circle", { class: "hollow", cx: px, cy: py, r: panel.kind === "xy" ? 5 : 3.5 });
    else if (dots) put(inside, "circle", { class: `dot${pale}`, cx: px, cy: py, r: 4.5 });
  });
  if (!mark.tip && !mark.tips) return [];
  return mark.points.map(([px, py, low, high], i) => {
    const words = (mark.tips ? mark.tips[i] : mark.tip) + `\n${panel.x.label} ${figure(px)}`;
    const last = high === null || high === undefined ? "beyond what was measured" : figure(high);
    const span = low === null || low === undefined ? "" : ` (${figure(low)} to ${last})`;
    const value = py === null || py === undefined ? "" : `\n${panel.y.label} ${figure(py)}${span}`;
    return { x: places[i][0], y: places[i][1] === null ? bottom - 9 : places[i][1], text: words + value, run: run ?? null };
  });
}

function listen(section, svg, spots, panel) {
  let at = -1, ring = null;
  const leave = () => { tip.hidden = true; ring?.remove(); ring = null; if (panel.kind === "curve") light(section, null); };
  const visit = (spot) => {
    const box = svg.getBoundingClientRect(), zoom = box.width / svg.viewBox.baseVal.width;
    ring?.remove();
    ring = add(svg, "circle", { cx: spot.x, cy: spot.y, r: 7, fill: "none", stroke: "var(--ink)", "stroke-width": 1.5 });
    showTip(spot.text, box.left + spot.x * zoom, box.top + spot.y * zoom);
    if (spot.run !== null) light(section, spot.run);
  };
  const move = (event) => {
    const box = svg.getBoundingClientRect(), zoom = svg.viewBox.baseVal.width / box.width;
    const px = (event.clientX - box.left) * zoom, py = (event.clientY - box.top) * zoom;
    let best = -1, least = 45 ** 2;
    spots.forEach((spot, i) => {
      const distance = (spot.x - px) ** 2 + (spot.y - py) ** 2;
      if (distance < least) [least, best] = [distance, i];
    });
    if (best < 0) leave(); else visit(spots[(at = best)]);
  };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerdown", move);
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") leave();
    if (!step || !spots.length) return;
    event.preventDefault();
    at = (at + step + spots.length) % spots.length;
    visit(spots[at]);
  });
}

function bars(section, group, panel, box) {
  box.replaceChildren();
  const seen = panel.sections.map((part) => !isHidden(group.key + panel.id + part.label));
  const total = (values) => values.reduce((sum, value, k) => sum + (seen[k] ? value : 0), 0);
  const most = Math.max(...panel.rows.map(([, , values]) => total(values))) || 1;
  const list = add(box, "div", { class: "sections" });
  for (const [label, run, values] of panel.rows) {
    add(list, "span", { class: "name", title: label }, label);
    const bar = add(list, "span", { class: "bar" });
    panel.sections.forEach((part, k) => {
      if (!seen[k] || !values[k]) return;
      const piece = colour(add(bar, "i"), part.colour);
      piece.style.width = `${(100 * values[k]) / most}%`;
    });
    add(list, "span", { class: "num soft" }, `${figure(total(values))} s`);
    const words = panel.sections.map((part, k) => `${part.label} ${figure(values[k])} s`).join("\n");
    bar.addEventListener("pointermove", (event) => showTip(`${label}\n${words}`, event.clientX, event.clientY));
    bar.addEventListener("pointerleave", () => { tip.hidden = true; });
  }
}

// ---- legends, selectors, tables ------------------------------------------------------------------

function legend(parent, entries, redraw) {
  for (const { key, label, index, kind } of entries) {
    const button = add(parent, "button", { type: "button", "aria-pressed": !isHidden(key) });
    colour(add(button, "span", { class: `swatch ${kind || ""}` }), index);
    add(button, "span", {}, label);
    button.addEventListener("click", () => {
      chosen.hidden[key] = !isHidden(key);
      button.setAttribute("aria-pressed", !isHidden(key));
      save();
      redraw();
    });
  }
}

function segments(parent, options, current, choose) {
  for (const [value, label] of Object.entries(options)) {
    const button = add(parent, "button", { type: "button", "data-value": value, "aria-pressed": value === current() }, label);
    button.addEventListener("click", () => {
      choose(value);
      save();
      for (const other of parent.children) other.setAttribute("aria-pressed", other.dataset.value === current());
    });
  }
}

function sortTable(table, column, direction) {
  const value = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
  const rank = (text) => (text === "" ? [2, 0] : Number.isNaN(Number(text)) ? [1, text] : [0, Number(text)]);
  const rows = [...table.tBodies[0].rows].map((row) => [rank(value(row)), row]);
  rows.sort(([[ka, a]], [[kb, b]]) => {
    if (ka !== kb || ka === 2) return ka - kb; // what has no value stays last, whichever way
    return direction * (ka ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  });
  table.tBodies[0].append(...rows.map(([, row]) => row));
  [...table.tHead.rows[0].cells].forEach((cell, i) => {
    if (i === column) cell.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    else cell.removeAttribute("aria-sort");
  });
  chosen.sorts[table.id] = [column, direction];
}

function sortable(table) {
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...cell.childNodes);
    cell.append(button);
    button.addEventListener("click", () => {
      sortTable(table, column, cell.getAttribute("aria-sort") === "ascending" ? -1 : 1);
      save();
    });
  });
  const [column, direction] = chosen.sorts[table.id] || [];
  if (column < table.tHead.rows[0].cells.length) sortTable(table, column, direction);
}

// ---- start ---------------------------------------------------------------------------------------

// An error in one picture leaves the others, and is told in the console.
function attempt(box, work) {
  try {
    work();
  } catch (error) {
    if (box) box.textContent = "This picture could not be drawn.";
    reportError(error);
  }
}

function startPanel(section, group, panel, box) {
  const paint = () => attempt(box, () => (panel.kind === "bars" ? bars : draw)(section, group, panel, box));
  if (panel.kind !== "curve") {
    const labels = panel.kind === "bars" ? panel.sections : panel.marks.filter((mark) => mark.label && mark.kind !== "rule");
    const entries = labels.map((part) => ({ key: group.key + panel.id + part.label, label: part.label, index: part.colour, kind: part.style || part.kind }));
    const bar = document.createElement("div");
    bar.className = "legend";
    box.before(bar);
    legend(bar, entries, paint);
  }
  let width = 0;
  new ResizeObserver(() => { if (box.clientWidth !== width) { width = box.clientWidth; paint(); } }).observe(box);
  return paint;
}

function startGroup(group, index) {
  group.key = `g${index}-`;
  const section = document.getElementById(`group-${index}`);
  const redraws = [];
  const redraw = () => redraws.forEach((run) => run());
  const controls = section.querySelector(".controls");
  if (controls) {
    segments(add(controls, "span", { class: "segments axis", role: "group", "aria-label": "horizontal axis" }), { step: "updates", examples_seen: "images", seconds: "seconds" }, () => chosen.axis, (value) => { chosen.axis = value; document.dispatchEvent(new Event("axis")); });
    document.addEventListener("axis", () => {
      redraw();
      for (const button of controls.querySelectorAll(".axis button")) button.setAttribute("aria-pressed", button.dataset.value === chosen.axis);
    });
    const entries = group.legend.labels.map((label, colour) => ({ key: group.key + colour, label, index: colour }));
    legend(add(controls, "span", { class: "legend", role: "group", "aria-label": group.legend.title }), entries, redraw);
  }
  for (const panel of group.panels) {
    const box = section.querySelector(`[data-panel="${CSS.escape(panel.id)}"]`);
    attempt(box, () => redraws.push(startPanel(section, group, panel, box)));
  }
  for (const row of section.querySelectorAll("tr[data-run]")) {
    row.addEventListener("pointerenter", () => light(section, row.dataset.run));
    row.addEventListener("pointerleave", () => light(section, null));
  }
}

function applyTheme() {
  if (chosen.theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen.theme;
}

applyTheme();
segments(document.getElementById("theme"), { auto: "auto", light: "light", dark: "dark" }, () => chosen.theme, (value) => { chosen.theme = value; applyTheme(); });
groups.forEach(startGroup);
document.querySelectorAll("table.sortable").forEach(sortable);
