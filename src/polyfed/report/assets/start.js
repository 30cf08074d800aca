// ---- start

const pictures = [...document.querySelectorAll("[data-chart]")].map((place) => new Curves(place, drawn.charts[Number(place.dataset.chart)]));
for (const place of document.querySelectorAll("[data-values]")) {
  place.addEventListener("toggle", () => {
    if (place.open && place.childElementCount === 1) fillValues(place, drawn.charts[Number(place.dataset.values)]);
  });
}
for (const place of document.querySelectorAll("[data-participation]")) pictures.push(...participation(place, drawn.participation));
for (const place of document.querySelectorAll("[data-grid]")) pictures.push(grid(place, drawn.grids[place.dataset.grid]));
const matrices = [...document.querySelectorAll("[data-table]")].map((place) => matrix(place, drawn.tables[place.dataset.table], place.dataset.table));
if (matrices.length) slide(matrices, drawn.tables);
pictures.push(...matrices);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => pictures.forEach((picture) => picture.draw()));
