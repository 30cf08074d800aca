// ---- charts as files: SVG for figures, CSV for numbers

const SVG_WIDTH = 720, SVG_HEIGHT = 400, EDGE = { left: 78, right: 16, top: 34, bottom: 44 };

function escaped(text) {
  return String(text).replace(/[&<>"']/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[sign]);
}

function tag(name, attributes, inside) {
  const words = Object.entries(attributes).map(([key, value]) => ` ${key}="${escaped(value)}"`).join("");
  return inside === undefined ? `<${name}${words}/>` : `<${name}${words}>${inside}</${name}>`;
}

function words(x, y, text, more) {
  return tag("text", { x, y, fill: colour("ink"), "font-size": 12, "font-family": "system-ui, sans-serif", ...more }, escaped(text));
}

function page(width, height, parts) {
  const paper = tag("rect", { width, height, fill: colour("card") });
  return tag("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` }, paper + parts.join("\n"));
}

// A colour that drawing programs understand: they do not know color-mix.
function solid(stroke, percent) {
  return { colour: stroke, opacity: percent === undefined ? 1 : percent / 100 };
}

function steps(low, high, log) {
  if (log) {
    const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
    return Array.from({ length: to - from + 1 }, (_, i) => 10 ** (from + i)).filter((v) => v >= low && v <= high);
  }
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function svgOfCurves(chart, hidden, log) {
  const shown = chart.series.map((one, number) => [one, number]).filter(([, number]) => !hidden.has(number));
  const all = shown.flatMap(([one]) => [...one.values, ...(one.low || []), ...(one.high || [])]).filter((v) => v !== null && (!log || v > 0));
  const ends = [Math.min(...all), Math.max(...all)], sides = [chart.x[0], chart.x.at(-1)];
  if (!(ends[1] > ends[0])) { ends[0] -= 0.5; ends[1] += 0.5; }
  if (!(sides[1] > sides[0])) { sides[0] -= 1; sides[1] += 1; }
  const scale = log ? Math.log10 : (v) => v;
  const right = SVG_WIDTH - EDGE.right, bottom = SVG_HEIGHT - EDGE.bottom;
  const px = (x) => EDGE.left + (x - sides[0]) / (sides[1] - sides[0]) * (right - EDGE.left);
  const py = (y) => bottom - (scale(y) - scale(ends[0])) / (scale(ends[1]) - scale(ends[0])) * (bottom - EDGE.top);
  const parts = [words(EDGE.left, 20, chart.title, { "font-weight": "bold", "font-size": 14 })];
  for (const v of steps(...ends, log)) {
    parts.push(tag("line", { x1: EDGE.left, x2: right, y1: py(v), y2: py(v), stroke: colour("line") }));
    parts.push(words(EDGE.left - 8, py(v) + 4, written(v, chart.unit), { "text-anchor": "end" }));
  }
  for (const v of steps(...sides)) parts.push(words(px(v), bottom + 18, Number(v.toPrecision(6)), { "text-anchor": "middle" }));
  parts.push(words((EDGE.left + right) / 2, bottom + 36, chart.x_label, { "text-anchor": "middle" }));
  const points = (values) => chart.x.map((x, i) => [x, values[i]]).filter(([, v]) => v !== null && (!log || v > 0)).map(([x, v]) => `${px(x).toFixed(1)},${py(v).toFixed(1)}`);
  for (const [one, number] of shown) {
    if (one.low === null) continue;
    const fill = solid(lineOf(one).stroke, bandOf(chart, number, null).fill);
    parts.push(tag("polygon", { points: [...points(one.high), ...points(one.low).reverse()].join(" "), fill: fill.colour, "fill-opacity": fill.opacity }));
  }
  let y = SVG_HEIGHT + 8;
  for (const [one] of shown) {
    const { stroke, dash } = lineOf(one), look = { stroke, "stroke-width": 2, "stroke-dasharray": dash.join(" ") || "none" };
    parts.push(tag("polyline", { points: points(one.values).join(" "), fill: "none", ...look }));
    parts.push(tag("line", { x1: EDGE.left, x2: EDGE.left + 26, y1: y - 4, y2: y - 4, ...look }), words(EDGE.left + 34, y, one.label));
    y += 20;
  }
  return page(SVG_WIDTH, y, parts);
}

function rowsOfCurves(chart) {
  const banded = (one) => one.low !== null;
  const head = [chart.x_label, ...chart.series.flatMap((one) => banded(one) ? [one.label, `${one.label}, low`, `${one.label}, high`] : [one.label])];
  return [head, ...chart.x.map((x, i) => [x, ...chart.series.flatMap((one) => banded(one) ? [one.values[i], one.low[i], one.high[i]] : [one.values[i]])])];
}

function svgOfHeat(map, rows, columns) {
  const [height, width] = map.size, side = Math.max(4, Math.min(24, 640 / Math.max(height, width)));
  const left = rows ? 130 : 8, top = columns ? 110 : 8, parts = [];
  for (let r = 0; r < height; r++) for (let c = 0; c < width; c++) {
    const [fill, opacity, mark] = map.paint(r, c);
    const box = { x: left + c * side, y: top + r * side, width: side - 0.5, height: side - 0.5 };
    parts.push(tag("rect", { ...box, fill: colour("idle") }));
    if (fill && opacity) parts.push(tag("rect", { ...box, fill, "fill-opacity": opacity }));
    if (mark) parts.push(tag("rect", { ...box, y: box.y + side / 4, height: side / 2, fill: mark }));
  }
  const size = Math.min(12, side);
  if (rows) rows.forEach((name, r) => parts.push(words(left - 6, top + (r + 0.75) * side, name, { "text-anchor": "end", "font-size": size })));
  if (columns) columns.forEach((name, c) => {
    const x = left + (c + 0.7) * side;
    parts.push(words(x, top - 6, name, { transform: `rotate(-60 ${x} ${top - 6})`, "font-size": size }));
  });
  return page(left + width * side + 8, top + height * side + 8, parts);
}

function rowsOfHeat(counts, rows, columns) {
  const head = ["", ...(columns || counts[0].map((_, c) => c))];
  return [head, ...counts.map((row, r) => [rows ? rows[r] : r, ...row])];
}

function csvOf(rows) {
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

function save(name, text, type) {
  const link = element("a", undefined, undefined, { download: name, href: URL.createObjectURL(new Blob([text], { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function saveButtons(bar, title, svg, rows) {
  const name = title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "") || "chart";
  for (const [word, make] of [["SVG", () => save(`${name}.svg`, svg(), "image/svg+xml")], ["CSV", () => save(`${name}.csv`, csvOf(rows()), "text/csv")]]) {
    element("button", bar, word, { type: "button", "aria-label": `save ${title} as ${word}` }).addEventListener("click", make);
  }
}
