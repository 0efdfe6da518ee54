"use strict";
// What the page does beside showing itself: unpack and draw charts, tabs, copying, sorting, theme.
// Scripts of single charts add themselves to `page.scripts`: (element, drawing, page) => void.
const page = { scripts: {}, drawings: {} };

page.unpack = async (id) => {
  const packed = document.getElementById(id).textContent;
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
};

page.isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

// Colours of a figure that are the page's own; what a figure sets itself comes first.
page.template = () => {
  const style = getComputedStyle(document.documentElement);
  const [ink, line] = ["--ink", "--line"].map((name) => style.getPropertyValue(name).trim());
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true };
  return { layout: {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, family: "system-ui, DejaVu Sans, sans-serif", size: 13 },
    xaxis: axis, yaxis: axis,
  } };
};

page.draw = async (element) => {
  const drawing = page.drawings[element.dataset.chart];
  const target = element.querySelector(".drawing");
  const layout = { ...drawing.figure.layout, template: page.template(), autosize: true };
  await Plotly.react(target, drawing.figure.data, layout, { responsive: true, displaylogo: false });
  if (drawing.script && !target.dataset.scripted) {
    target.dataset.scripted = "yes";
    page.scripts[drawing.script](target, drawing, page);
  }
  element.dataset.drawn = "yes";
};

page.start = async () => {
  const charts = [...document.querySelectorAll("[data-chart]")];
  if (charts.length === 0) return;
  const [plotly, data] = await Promise.all([page.unpack("plotly"), page.unpack("data")]);
  const script = document.createElement("script");
  script.textContent = plotly;
  document.head.append(script);
  page.drawings = JSON.parse(data);
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((e) => e.isIntersecting)) {
      seen.unobserve(entry.target);
      page.draw(entry.target);
    }
  }, { rootMargin: "400px" });
  charts.forEach((chart) => seen.observe(chart));
};

document.addEventListener("DOMContentLoaded", page.start);
