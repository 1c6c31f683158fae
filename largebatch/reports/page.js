// Draws the charts of charts.py by Vega, sorts tables, and lights up runs.
const data = JSON.parse(document.getElementById("data").textContent);
const chosen = { axis: "step", hidden: {} };

function add(parent, name, attributes = {}, text = "") {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return parent.appendChild(element);
}

function rowsOf(group, chart, key) {
  const seen = (series) => !chosen.hidden[key + series];
  if (chart.kind !== "curves") return chart.rows.filter((row) => seen(row.series));
  const rows = chart.rows.map((row) => ({ ...group.runs[row.run], ...row, x: group.axes[row.run][chosen.axis] }));
  return rows.filter((row) => seen(row.series));
}

async function draw(section, group, id, key) {
  const chart = group.charts[id], box = section.querySelector(`[data-chart="${CSS.escape(id)}"]`);
  try {
    const text = JSON.stringify(chart.spec).replaceAll("{axis}", data.axes[chosen.axis]);
    const spec = { ...JSON.parse(text), config: data.config, datasets: { rows: rowsOf(group, chart, key) } };
    const drawn = await window.vegaEmbed(box, spec, { ast: true, actions: false, renderer: "svg", logLevel: 1 });
    group.views[id]?.finalize();
    group.views[id] = drawn.view;
    if (chart.kind !== "curves") return;
    // The item is the cell around a point, whose datum holds that of the point.
    drawn.view.addEventListener("pointermove", (_, item) => light(section, group, item?.datum?.datum?.run ?? -1));
    box.onpointerleave = () => light(section, group, -1);
  } catch (error) { // an error in one chart leaves the others
    box.textContent = "This chart could not be drawn.";
    reportError(error);
  }
}

// A run lights up in every chart of its group, and in the table of runs.
function light(section, group, run) {
  if (group.hot === run) return;
  group.hot = run;
  for (const [id, view] of Object.entries(group.views)) if (group.charts[id].kind === "curves") view.signal("hot", run).runAsync();
  for (const row of section.querySelectorAll("tr[data-run]")) row.classList.toggle("hot", Number(row.dataset.run) === run);
}

function legend(parent, entries, redraw) {
  for (const [key, label, colour, style] of entries) {
    const button = add(parent, "button", { type: "button", "aria-pressed": !chosen.hidden[key] });
    add(button, "span", { class: `swatch ${style}` }).style.setProperty("--c", colour);
    add(button, "span", {}, label);
    button.addEventListener("click", () => {
      chosen.hidden[key] = !chosen.hidden[key];
      button.setAttribute("aria-pressed", !chosen.hidden[key]);
      redraw();
    });
  }
}

function segments(parent, options, current, choose) {
  for (const [value, label] of Object.entries(options)) {
    const button = add(parent, "button", { type: "button", "data-value": value, "aria-pressed": value === current() }, label);
    button.addEventListener("click", () => {
      choose(value);
      for (const other of document.querySelectorAll(`.segments [data-value]`)) {
        if (Object.keys(options).includes(other.dataset.value)) other.setAttribute("aria-pressed", other.dataset.value === current());
      }
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
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...cell.childNodes);
    cell.append(button);
    button.addEventListener("click", () => sortTable(table, column, cell.getAttribute("aria-sort") === "ascending" ? -1 : 1));
  });
}

const root = document.documentElement.dataset;
segments(document.getElementById("theme"), { auto: "auto", light: "light", dark: "dark" }, () => root.theme ?? "auto", (value) => { root.theme = value; });
const redraws = data.groups.map((group, index) => {
  const section = document.getElementById(`group-${index}`), key = `g${index}-`;
  Object.assign(group, { views: {}, hot: -1 });
  const curves = () => Object.keys(group.charts).filter((id) => group.charts[id].kind === "curves").forEach((id) => draw(section, group, id, key));
  curves();
  for (const [id, chart] of Object.entries(group.charts)) {
    if (chart.kind === "curves") continue;
    const redraw = () => draw(section, group, id, `${key}${id}-`);
    const box = section.querySelector(`[data-legend="${CSS.escape(id)}"]`);
    if (box) legend(box, chart.legend.map((one) => [`${key}${id}-${one.series}`, one.label, one.colour, one.style]), redraw);
    redraw();
  }
  const runs = section.querySelector(".legend.runs");
  if (runs) {
    segments(section.querySelector(".axis"), data.axes, () => chosen.axis, (value) => { chosen.axis = value; redraws.forEach((redraw) => redraw()); });
    legend(runs, group.legend.map((label, series) => [key + series, label, `var(--c${series % 8})`, ""]), curves);
  }
  for (const row of section.querySelectorAll("tr[data-run]")) {
    row.addEventListener("pointerenter", () => light(section, group, Number(row.dataset.run)));
    row.addEventListener("pointerleave", () => light(section, group, -1));
  }
  return curves;
});
