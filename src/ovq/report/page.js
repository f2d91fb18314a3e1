"use strict";
const specs = JSON.parse(document.getElementById("specs").textContent);
const root = document.documentElement, button = document.getElementById("theme");
const dark = window.matchMedia("(prefers-color-scheme: dark)");
let theme = dark.matches ? "dark" : "light", drawnWidth = 0;

// --- charts ---------------------------------------------------------------------------------
function colours() {
  const style = getComputedStyle(root), of = name => style.getPropertyValue("--" + name).trim();
  const ink = of("ink"), muted = of("muted"), line = of("line");
  return {
    axis: {labelColor: muted, titleColor: ink, gridColor: line, domainColor: muted, tickColor: muted},
    legend: {labelColor: ink, titleColor: muted, symbolStrokeColor: muted},
  };
}

function sized(spec, width) {
  const own = structuredClone(spec), shade = colours();
  delete own.title;  // stands above the chart
  own.background = "transparent";
  own.width = width;
  own.autosize = {type: "fit-x", contains: "padding"};
  own.config.axis = {...own.config.axis, ...shade.axis};
  own.config.legend = {...own.config.legend, ...shade.legend,
    columns: Math.max(1, Math.floor(width / 165)), labelLimit: Math.min(220, width - 60)};
  return own;
}

async function draw() {
  drawnWidth = root.clientWidth;
  for (const place of document.querySelectorAll("[data-chart]")) {
    const spec = sized(specs[place.dataset.chart], place.clientWidth);
    await vegaEmbed(place, spec, {actions: false, ast: true, renderer: "svg", tooltip: {theme}});
  }
  root.dataset.drawn = theme;
}

function choose(name) {
  theme = name;
  root.dataset.theme = theme;
  button.textContent = theme === "dark" ? "Light" : "Dark";
  button.setAttribute("aria-label", "Switch to " + button.textContent.toLowerCase() + " colours");
  return draw();
}

button.addEventListener("click", () => choose(theme === "dark" ? "light" : "dark"));
dark.addEventListener("change", () => choose(dark.matches ? "dark" : "light"));
let waiting;
window.addEventListener("resize", () => {
  clearTimeout(waiting);
  if (root.clientWidth !== drawnWidth) waiting = setTimeout(draw, 200);
});

// --- tables ---------------------------------------------------------------------------------
function compare(one, other) {
  const [a, b] = [one.dataset.value, other.dataset.value];
  if (a !== undefined && b !== undefined) return Number(a) - Number(b);
  if (a !== undefined || b !== undefined) return a === undefined ? 1 : -1;
  return one.textContent.localeCompare(other.textContent, "en", {numeric: true});
}

function sort(head) {
  const at = head.cellIndex, body = head.closest("table").tBodies[0];
  const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  const known = row => row.cells[at].dataset.value !== undefined || !head.classList.contains("number");
  const rows = Array.from(body.rows).sort((one, other) =>
    Number(known(other)) - Number(known(one)) || sign * compare(one.cells[at], other.cells[at]));
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  body.append(...rows);
}

for (const head of document.querySelectorAll("th")) head.firstChild.addEventListener("click", () => sort(head));
choose(theme);
