"use strict";
// Charts: unpacked with plotly, drawn as they come into view, in the colours of the theme.
// Scripts of single charts add themselves to `page.scripts`: (target, drawing, page) => void,
// where `target` is what plotly drew into. When the theme changes it is told by a "theme" event.
const page = { scripts: {}, drawings: {}, printing: false };

page.unpack = async (name) => {
  const packed = document.getElementById(`packed-${name}`).textContent;
  const letters = atob(packed);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
};

// A script that has an address is compiled beside the page, one written into it before all else.
page.run = (text) => new Promise((done, failed) => {
  const script = document.createElement("script");
  script.src = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
  script.onload = done;
  script.onerror = failed;
  document.head.append(script);
});

page.canUnpack = () => typeof DecompressionStream === "function";

page.say = (text) => { document.getElementById("said").textContent = text; };

page.isDark = () => {
  if (page.printing) return false;
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

page.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// How a figure looks where it does not say so itself.
page.template = () => {
  const [ink, soft, line, rule, panel] = ["--ink", "--soft", "--line", "--rule", "--panel"].map(page.colour);
  const axis = {
    gridcolor: line, linecolor: rule, zerolinecolor: line, tickcolor: rule, automargin: true,
    tickfont: { color: soft }, title: { font: { color: soft, size: 13 }, standoff: 12 }, ticks: "", zeroline: false,
  };
  const bar = { outlinewidth: 0, thickness: 14, tickfont: { color: soft } };
  return {
    data: { pie: [{ marker: { line: { color: panel } } }], heatmap: [{ colorbar: bar }] },
    layout: {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, family: page.colour("--sans"), size: 13 },
      xaxis: axis, yaxis: axis, coloraxis: { colorbar: bar },
      legend: {
        orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)",
        font: { color: ink },
      },
      hoverlabel: {
        bgcolor: panel, bordercolor: rule, align: "left", namelength: -1,
        font: { color: ink, family: page.colour("--sans"), size: 13 },
      },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: rule, activecolor: ink },
      annotationdefaults: { font: { color: soft }, arrowcolor: soft },
      shapedefaults: { line: { color: soft } },
    },
  };
};

page.byFinger = matchMedia("(pointer: coarse)").matches;

page.config = {
  responsive: true, displaylogo: false, displayModeBar: page.byFinger ? false : "hover",
  showSendToCloud: false, plotlyServerURL: "", // a page sends nothing anywhere
  modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
};

page.layout = (drawing) => {
  const layout = { ...drawing.figure.layout, template: page.template(), autosize: true };
  // A finger scrolls the page; it would draw a box otherwise.
  if (page.byFinger) layout.dragmode = false;
  return layout;
};

// A legend above a narrow chart stands in many rows: the chart grows by what they take beyond the
// room that its height leaves for them.
page.LEGEND_PX = 85;
page.makeRoom = (target) => {
  const legend = target._fullLayout.legend;
  const more = Math.ceil(legend?._height ?? 0) - page.LEGEND_PX;
  if (target.offsetWidth >= 520 || more <= 0 || legend.y < 1) return;
  target.style.height = `${target.offsetHeight + more}px`;
  Plotly.Plots.resize(target);
};

page.draw = (figure) => {
  if (figure.dataset.drawn) return;
  figure.dataset.drawn = "yes";
  const drawing = page.drawings[figure.dataset.chart];
  const target = figure.querySelector(".drawing");
  const config = { ...page.config, toImageButtonOptions: { filename: figure.dataset.chart } };
  Plotly.newPlot(target, drawing.figure.data, page.layout(drawing), config).then(() => {
    page.makeRoom(target);
    if (drawing.script) page.scripts[drawing.script](target, drawing, page);
    performance.mark(`drawn ${figure.dataset.chart}`);
  });
};

page.drawn = () => [...document.querySelectorAll("[data-drawn] > .drawing")];

page.near = new Set(); // charts in view, or nearly

// A drawn chart takes the theme's colours; what was zoomed stays so.
page.colourAnew = (target, size = {}) => {
  delete target.parentElement.dataset.stale;
  Plotly.relayout(target, { template: page.template(), ...size });
  target.dispatchEvent(new Event("theme"));
};

// A chart takes tenths of a second, and so those that are not seen wait until they are.
page.recolour = () => {
  for (const target of page.drawn()) {
    if (page.near.has(target.parentElement)) page.colourAnew(target);
    else target.parentElement.dataset.stale = "yes";
  }
};

page.seen = (figure) => {
  if (!figure.dataset.drawn) page.draw(figure);
  else if (figure.dataset.stale) page.colourAnew(figure.querySelector(".drawing"));
};

// While the page scrolls nothing is drawn: what is passed by costs nothing, and the rest follows
// one by one where scrolling rests.
page.REST_MS = 100;
page.scrolled = -page.REST_MS;
addEventListener("scroll", () => { page.scrolled = performance.now(); }, { passive: true });

page.waits = (figure) => !figure.dataset.drawn || figure.dataset.stale;

page.drawNear = () => {
  page.waiting = undefined;
  const rest = page.scrolled + page.REST_MS - performance.now();
  if (rest <= 0) {
    const waiting = [...page.near].find(page.waits);
    if (!waiting) return;
    page.seen(waiting);
  }
  page.waiting = setTimeout(page.drawNear, Math.max(rest, 0));
};

// Charts that were hidden (a tab, a fold) have their width only now.
page.resize = (within) => {
  for (const target of page.drawn()) {
    if (within.contains(target) && target.offsetWidth) Plotly.Plots.resize(target);
  }
};

page.fail = (charts, why) => {
  for (const chart of charts) {
    const said = document.createElement("p");
    said.className = "failed";
    said.textContent = why;
    chart.querySelector(".drawing").replaceWith(said);
  }
};

page.start = async () => {
  const charts = [...document.querySelectorAll("[data-chart]")];
  if (charts.length === 0) return;
  if (!page.canUnpack()) {
    page.fail(charts, "This browser is too old to draw the chart: it has no DecompressionStream "
      + "(Chrome 80, Safari 16.4 and Firefox 113 have it). Text and tables are complete.");
    return;
  }
  const [plotly, drawings] = await Promise.all([page.unpack("plotly"), page.unpack("charts")]);
  await page.run(plotly);
  page.drawings = JSON.parse(drawings);
  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) page.near.add(target); else page.near.delete(target);
    }
    page.waiting ??= setTimeout(page.drawNear);
  }, { rootMargin: "500px" });
  charts.forEach((chart) => seen.observe(chart));
  page.ready = true;
  performance.mark("ready");
};

document.addEventListener("DOMContentLoaded", page.start);
