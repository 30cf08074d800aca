// ---- start

const pictures = [];

// A chart is drawn when it comes near the screen, so that a page with many charts opens at once.
const makers = new Map();
const near = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => make(entry.target)), { rootMargin: "400px" });

function make(place) {
  near.unobserve(place);
  const maker = makers.get(place);
  makers.delete(place);
  if (maker) pictures.push(...[maker(place)].flat());
}

function later(name, maker) {
  for (const place of document.querySelectorAll(`[data-${name}]`)) {
    makers.set(place, maker);
    near.observe(place);
  }
}

later("chart", (place) => new Curves(place, drawn.charts[Number(place.dataset.chart)]));
later("participation", (place) => participation(place, drawn.participation));
later("grid", (place) => grid(place, drawn.grids[place.dataset.grid]));
window.addEventListener("beforeprint", () => [...makers.keys()].forEach(make));
for (const place of document.querySelectorAll("[data-values]")) {
  place.addEventListener("toggle", () => {
    if (place.open && place.childElementCount === 1) fillValues(place, drawn.charts[Number(place.dataset.values)]);
  });
}
const matrices = [...document.querySelectorAll("[data-table]")].map((place) => matrix(place, drawn.tables[place.dataset.table], place.dataset.table));
if (matrices.length) slide(matrices, drawn.tables);
pictures.push(...matrices);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => pictures.forEach((picture) => picture.draw()));
