"use strict";
// Draws what the page's data block holds. Text reaches the page through textContent only.
const drawn = JSON.parse(document.getElementById("drawn").textContent);
const COLOURS = 8;
const DASHES = [[], [10, 4], [2, 4]];

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function element(tag, parent, text, attributes) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

function written(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "share") return `${(100 * value).toFixed(1)} %`;
  if (unit === "bytes") {
    const power = value >= 1 ? Math.min(Math.floor(Math.log10(value) / 3), 5) : 0;
    return `${Number((value / 1000 ** power).toPrecision(3))} ${["B", "kB", "MB", "GB", "TB", "PB"][power]}`;
  }
  if (unit === "seconds") return value !== 0 && value < 1 ? `${Number((1000 * value).toPrecision(3))} ms` : `${Number(value.toPrecision(3))} s`;
  return String(Number(value.toPrecision(4)));
}

function lastOf(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i];
  return null;
}

// ---- curves

function lineOf(one) {
  return { stroke: colour(`c${one.colour % COLOURS}`), dash: one.dashed ? [5, 5] : DASHES[Math.floor(one.colour / COLOURS) % DASHES.length] };
}

// With many bands, each is faint and has a thin edge; the one whose name is pointed at comes forward.
function bandOf(chart, number, focus) {
  const many = chart.series.filter((one) => one.low !== null).length;
  if (focus === number) return { fill: 30, edge: 70 };
  if (focus !== null) return { fill: 0, edge: 0 };
  return many > 3 ? { fill: 6, edge: 35 } : { fill: many > 1 ? 13 : 18, edge: 0 };
}

function mixed(stroke, percent) {
  return percent ? `color-mix(in srgb, ${stroke} ${percent}%, transparent)` : "transparent";
}

function columnsOf(chart, focus) {
  const data = [chart.x], series = [{}], bands = [], owner = [null];
  chart.series.forEach((one, number) => {
    const behind = focus !== null && focus !== number;
    const { stroke: plain, dash } = lineOf(one), stroke = behind ? mixed(plain, 35) : plain;
    const filled = one.values.filter((v) => v !== null).length;
    series.push({ label: one.label, stroke, dash, width: 2, spanGaps: true, points: { show: filled < 30, size: 5, fill: stroke } });
    data.push(one.values);
    owner.push(number);
    if (one.low === null) return;
    const look = bandOf(chart, number, focus);
    const edge = { stroke: mixed(plain, look.edge), width: 0.75, spanGaps: true, points: { show: false } };
    bands.push({ series: [data.length, data.length + 1], fill: mixed(plain, look.fill) });
    series.push(edge, { ...edge });
    data.push(one.high, one.low);
    owner.push(number, number);
  });
  return { data, series, bands, owner };
}

function optionsOf(chart, parts, width, log, onCursor) {
  const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 }, font: "12px system-ui" };
  const rounds = chart.x_label === "round";
  const incrs = [1, 2, 5].flatMap((n) => [0, 1, 2, 3, 4, 5, 6].map((e) => n * 10 ** e)).sort((a, b) => a - b);
  const padded = (u, low, high) => {
    if (low === null) return [0, 1];
    const margin = (high - low) * 0.08 || Math.abs(high) * 0.1 || 0.5;
    const fromZero = chart.unit === "bytes" || chart.unit === "seconds";
    const floor = low < 0 ? low - margin : fromZero ? 0 : Math.max(0, low - margin);
    return [floor, chart.unit === "share" && high <= 1 ? Math.min(1, high + margin) : high + margin];
  };
  return {
    width, height: 250, series: parts.series, bands: parts.bands, legend: { show: false },
    cursor: { drag: { x: true, y: false }, sync: rounds ? { key: "rounds", setSeries: false } : undefined, points: { size: 7 } },
    scales: {
      x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
      y: log ? { distr: 3 } : { range: padded },
    },
    axes: [
      { ...axis, incrs: rounds ? incrs : undefined, label: chart.x_label, labelSize: 18, labelFont: "12px system-ui", size: 34 },
      { ...axis, size: 64, values: (u, ticks) => ticks.map((v) => (v === null ? null : written(v, chart.unit))) },
    ],
    hooks: { setCursor: [onCursor] },
  };
}

class Curves {
  constructor(place, chart) {
    this.place = place;
    this.chart = chart;
    this.hidden = new Set();
    this.log = false;
    this.focus = null;
    this.tools();
    this.canvas = element("div", place, undefined, { role: "img", "aria-label": this.summary() });
    this.legend = element("div", place, undefined, { class: "legend", role: "group", "aria-label": "Curves shown" });
    this.draw();
    new ResizeObserver(() => this.plot.setSize({ width: this.canvas.clientWidth, height: 250 })).observe(this.canvas);
  }

  summary() {
    const ends = this.chart.series.map((one) => `${one.label} ends at ${written(lastOf(one.values), this.chart.unit)}`);
    return `${this.chart.title}: ${ends.join(", ")}`;
  }

  tools() {
    const bar = element("div", this.place, undefined, { class: "tools" });
    this.where = element("span", bar, "");
    const values = this.chart.series.flatMap((one) => [...one.values, ...(one.low || [])]).filter((v) => v !== null);
    saveButtons(bar, this.chart.title, () => svgOfCurves(this.chart, this.hidden, this.log), () => rowsOfCurves(this.chart));
    if (this.chart.unit === "share" || !values.every((v) => v > 0) || values.length < 2) return;
    const button = element("button", bar, "log scale", { type: "button", "aria-pressed": "false" });
    button.addEventListener("click", () => {
      this.log = !this.log;
      button.setAttribute("aria-pressed", String(this.log));
      this.draw();
    });
    bar.insertBefore(button, this.where.nextSibling);
  }

  draw() {
    if (this.plot) this.plot.destroy();
    this.parts = columnsOf(this.chart, this.focus);
    this.parts.series.forEach((one, i) => { if (i > 0) one.show = !this.hidden.has(this.parts.owner[i]); });
    const options = optionsOf(this.chart, this.parts, this.canvas.clientWidth || 300, this.log, (u) => this.point(u.cursor.idx));
    this.plot = new uPlot(options, this.parts.data, this.canvas);
    if (!this.readouts) this.names();
  }

  // Bring one curve and its band forward; null shows all alike.
  bringForward(number) {
    if (this.focus === number || !this.chart.series.some((one) => one.low !== null)) return;
    this.focus = number;
    this.draw();
  }

  names() {
    this.legend.replaceChildren();
    this.readouts = this.chart.series.map((one, number) => {
      const button = element("button", this.legend, undefined, { type: "button", "aria-pressed": String(!this.hidden.has(number)) });
      this.sample(button, one);
      element("span", button, one.label);
      button.addEventListener("click", () => this.toggle(number, button));
      for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => this.bringForward(number));
      for (const event of ["pointerleave", "blur"]) button.addEventListener(event, () => this.bringForward(null));
      return element("b", button, written(lastOf(one.values), this.chart.unit));
    });
  }

  sample(button, one) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    for (const [key, value] of Object.entries({ width: 18, height: 8, "aria-hidden": "true" })) svg.setAttribute(key, value);
    const dash = one.dashed ? "4 3" : DASHES[Math.floor(one.colour / COLOURS) % DASHES.length].join(" ");
    const look = { x1: 0, x2: 18, y1: 4, y2: 4, "stroke-width": 3, stroke: `var(--c${one.colour % COLOURS})`, "stroke-dasharray": dash };
    for (const [key, value] of Object.entries(look)) line.setAttribute(key, value);
    svg.append(line);
    button.append(svg);
  }

  toggle(number, button) {
    const show = this.hidden.has(number);
    if (show) this.hidden.delete(number); else this.hidden.add(number);
    button.setAttribute("aria-pressed", String(show));
    this.parts.owner.forEach((owner, i) => { if (owner === number) this.plot.setSeries(i, { show }); });
  }

  point(index) {
    const at = index === null || index === undefined ? null : index;
    this.where.textContent = at === null ? "" : `${this.chart.x_label} ${Number(this.chart.x[at].toPrecision(6))}`;
    (this.readouts || []).forEach((place, number) => {
      const values = this.chart.series[number].values;
      place.textContent = written(at === null ? lastOf(values) : values[at], this.chart.unit);
    });
  }
}

function fillValues(place, chart) {
  const box = element("div", place, undefined, { class: "scroll", tabindex: "0" });
  const table = element("table", box);
  const head = element("tr", element("thead", table));
  element("th", head, chart.x_label, { scope: "col" });
  chart.series.forEach((one) => element("th", head, one.label, { scope: "col" }));
  const body = element("tbody", table);
  chart.x.forEach((x, i) => {
    const row = element("tr", body);
    element("th", row, String(Number(x.toPrecision(6))), { scope: "row" });
    chart.series.forEach((one) => element("td", row, written(one.values[i], chart.unit)));
  });
}

// ---- heat maps

class Heat {
  // paint(row, column) gives [fill, opacity, mark]; say(row, column) gives the words for a cell
  constructor(place, size, paint, say, label, tallest = 18) {
    Object.assign(this, { size, paint, say, tallest, at: null });
    this.canvas = element("canvas", place, undefined, { class: "heat", tabindex: "0", role: "img", "aria-label": label });
    this.place = place;
    this.draw();
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  listen(readout) {
    this.readout = readout;
    const pick = (event) => {
      const box = this.canvas.getBoundingClientRect();
      this.move(Math.floor((event.clientY - box.top) / box.height * this.size[0]), Math.floor((event.clientX - box.left) / box.width * this.size[1]));
    };
    this.canvas.addEventListener("pointermove", pick);
    this.canvas.addEventListener("pointerdown", pick);
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      const [row, column] = this.at || [0, 0];
      this.move(row + step[0], column + step[1]);
    });
  }

  move(row, column) {
    const within = (value, most) => Math.max(0, Math.min(value, most - 1));
    this.at = [within(row, this.size[0]), within(column, this.size[1])];
    this.readout.textContent = this.say(...this.at);
    this.draw();
  }

  draw() {
    const ratio = window.devicePixelRatio || 1, [rows, columns] = this.size;
    const width = this.canvas.clientWidth || 300;
    const side = Math.max(3, Math.min(this.tallest, Math.max(width / columns, 120 / rows)));
    const height = Math.round(Math.min(rows * side, this.tallest > 18 ? 720 : 420));
    if (this.canvas.style.height !== `${height}px`) this.canvas.style.height = `${height}px`;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    const pen = this.canvas.getContext("2d"), w = width / columns, h = height / rows;
    const gap = Math.min(w, h) > 5 ? 1 : 0;
    pen.scale(ratio, ratio);
    const cell = (row, column) => [column * w, row * h, Math.max(w - gap, 0.5), Math.max(h - gap, 0.5)];
    pen.fillStyle = colour("idle");
    pen.fillRect(0, 0, width, height);
    for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) {
      const [fill, opacity, mark] = this.paint(row, column);
      if (fill) { pen.globalAlpha = opacity; pen.fillStyle = fill; pen.fillRect(...cell(row, column)); }
      pen.globalAlpha = 1;
      if (mark) { const [x, y, cw, ch] = cell(row, column); pen.fillStyle = mark; pen.fillRect(x, y + ch / 4, cw, Math.max(ch / 2, 1)); }
    }
    if (!this.at) return;
    pen.strokeStyle = colour("ink");
    pen.lineWidth = 1.5;
    pen.strokeRect(...cell(...this.at));
  }
}

function span(first, step, most, one, many) {
  const last = Math.min(first + step - 1, most);
  return last === first ? `${one} ${first}` : `${many} ${first} to ${last}`;
}

function participation(place, facts) {
  const size = [facts.asked.length, facts.asked[0].length];
  const panels = element("div", place, undefined, { class: "panels" });
  return Object.entries(facts.panels).map(([name, counts], number) => {
    const panel = element("div", panels);
    element("h3", panel, name);
    const most = Math.max(1, ...counts.flat());
    const tint = `c${1 + number % (COLOURS - 1)}`;
    const paint = (r, c) => {
      const mark = facts.missing[r][c] ? colour("bad") : null;
      if (counts[r][c]) return [colour(tint), most === 1 ? 1 : 0.25 + 0.75 * Math.sqrt(counts[r][c] / most), mark];
      return [facts.asked[r][c] ? colour("asked") : null, 1, mark];
    };
    const say = (r, c) => {
      const who = span(r * facts.clients_per_row, facts.clients_per_row, facts.clients - 1, "client", "clients");
      const when = span(c * facts.rounds_per_column + 1, facts.rounds_per_column, facts.rounds, "round", "rounds");
      const lost = facts.missing[r][c] ? `, no usable answer ${facts.missing[r][c]} times` : "";
      return `${who}, ${when}: asked ${facts.asked[r][c]} times, sent ${name} ${counts[r][c]} times${lost}`;
    };
    const total = counts.flat().reduce((a, b) => a + b, 0);
    const bar = element("div", panel, undefined, { class: "tools" });
    const map = new Heat(panel, size, paint, say, `${name}: sent ${total} times, by client and round`);
    saveButtons(bar, `participation ${name}`, () => svgOfHeat(map), () => rowsOfHeat(counts));
    const ends = element("div", panel, undefined, { class: "ends" });
    element("span", ends, "round 1");
    element("span", ends, `round ${facts.rounds}`);
    map.listen(element("p", panel, `${total.toLocaleString("en")} times in all. Point at a cell.`, { class: "read", "aria-live": "polite" }));
    return map;
  });
}

function matrix(place, frames, title) {
  const known = frames.tables.flat(2).filter((v) => Number.isFinite(v));
  const low = Math.min(0, ...known), high = Math.max(0, ...known), far = Math.max(-low, high) || 1;
  let values = frames.tables.at(-1);
  const paint = (r, c) => {
    const value = values[r][c];
    return Number.isFinite(value) ? [colour(value < 0 ? "c2" : "heat"), Math.abs(value) / far, null] : [colour("asked"), 1, null];
  };
  const say = (r, c) => `row ${r}, column ${c}: ${written(values[r][c], "number")}`;
  const tools = element("div", place, undefined, { class: "tools" });
  const map = new Heat(place, [values.length, values[0].length], paint, say, `${title}: ${values.length} by ${values[0].length}`);
  saveButtons(tools, title, () => svgOfHeat(map), () => rowsOfHeat(values));
  const scale = element("div", place, undefined, { class: "scale" });
  element("span", scale, written(low, "number"));
  const bar = element("i", scale);
  bar.style.background = `linear-gradient(to right, ${low < 0 ? "var(--c2), " : ""}var(--idle), var(--heat))`;
  element("span", scale, written(high, "number"));
  map.listen(element("p", place, "Point at a cell.", { class: "read", "aria-live": "polite" }));
  map.show = (round) => {
    values = frames.tables[Math.max(0, frames.rounds.findLastIndex((other) => other <= round))];
    map.draw();
  };
  return map;
}

// A grid of counts with names for its rows and columns, shaded by the share of the row.
function grid(place, facts) {
  const sums = facts.counts.map((row) => row.reduce((a, b) => a + b, 0));
  const paint = (r, c) => [colour("heat"), sums[r] && facts.counts[r][c] ? 0.08 + 0.92 * facts.counts[r][c] / sums[r] : 0, null];
  const say = (r, c) => {
    const count = facts.counts[r][c], share = sums[r] ? ` (${written(count / sums[r], "share")} of the row)` : "";
    return `${facts.row_word} ${facts.rows[r]}, ${facts.column_word} ${facts.columns[c]}: ${count.toLocaleString("en")}${share}`;
  };
  const bar = element("div", place, undefined, { class: "tools" });
  const named = facts.rows.length <= 30 && facts.columns.length <= 30 ? element("div", place, undefined, { class: "named" }) : place;
  if (named !== place) {
    const side = element("div", named, undefined, { class: "side" });
    facts.rows.forEach((name) => element("span", side, name, { title: name }));
  }
  const map = new Heat(named, [facts.rows.length, facts.columns.length], paint, say, `${facts.title}: ${facts.rows.length} by ${facts.columns.length}`, named === place ? 18 : 24);
  if (named !== place) {
    const foot = element("div", named, undefined, { class: "foot" });
    facts.columns.forEach((name) => element("span", foot, name, { title: name }));
  }
  map.listen(element("p", place, "Point at a cell.", { class: "read", "aria-live": "polite" }));
  saveButtons(bar, facts.title, () => svgOfHeat(map, facts.rows, facts.columns), () => rowsOfHeat(facts.counts, facts.rows, facts.columns));
  return map;
}

function slide(matrices, tables) {
  const rounds = [...new Set(Object.values(tables).flatMap((frames) => frames.rounds))].sort((a, b) => a - b);
  const input = document.getElementById("matrix-slide"), output = document.getElementById("matrix-round");
  const show = () => {
    output.textContent = rounds[input.value];
    matrices.forEach((map) => map.show(rounds[input.value]));
  };
  input.max = rounds.length - 1;
  input.value = input.max;
  input.addEventListener("input", show);
  show();
}
