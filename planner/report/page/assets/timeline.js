"use strict";
// A step point by point: whole arrays lie in the page, as many points are drawn as the chart is
// wide. Each column keeps the point with the most alive and that with the most reserved.
page.timeline = { sources: new Map() };

// Arrays of differences to arrays of values.
page.timeline.source = (key) => {
  const known = page.timeline.sources.get(key);
  if (known) return known;
  const data = page.drawings[key].data;
  const sum = (differences) => {
    let value = 0;
    return Float64Array.from(differences, (each) => (value += each));
  };
  const source = { ...data, values: {} };
  for (const [name, each] of Object.entries(data.series)) source.values[name] = sum(each);
  const live = new Float64Array(source.values.reserved.length);
  for (const name of data.stack) source.values[name].forEach((value, i) => { live[i] += value; });
  source.values.live = live;
  page.timeline.sources.set(key, source);
  return source;
};

page.timeline.pointAt = (count, x) => Math.min(Math.max(Math.ceil(x), 0), count - 1);

// Points from `first` to `last` in `columns` columns: the maxima of each, and both ends.
page.timeline.thin = (values, first, last, columns) => {
  const count = last - first + 1;
  const chosen = new Set([first, last]);
  const wanted = Math.min(columns, count);
  for (let column = 0; column < wanted; column++) {
    const start = first + Math.floor((count * column) / wanted);
    const stop = first + Math.floor((count * (column + 1)) / wanted);
    for (const series of [values.live, values.reserved]) {
      let best = start;
      for (let i = start + 1; i < stop; i++) if (series[i] > series[best]) best = i;
      chosen.add(best);
    }
  }
  return Int32Array.from(chosen).sort();
};

page.timeline.bytes = (units, source) => {
  let size = units * source.unit_bytes;
  for (const [name, scale] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (Math.abs(size) >= scale) return `${(size / scale).toFixed(2)} ${name}`;
  }
  return `${size} B`;
};

// What the pointer says of a point.
page.timeline.text = (source, point) => {
  const { words, values } = source;
  const bytes = (units) => page.timeline.bytes(units, source);
  const phase = source.phases.find((each) => point < each.stop) ?? source.phases.at(-1);
  const count = values.live.length - 1;
  const lines = [`<b>${phase.name}</b>, event ${point.toLocaleString("en")} of ${count.toLocaleString("en")}`];
  if (point === 0) lines.push("before the step");
  else {
    const [of, label, path, category] = ["bytes", "label", "path", "category"].map((name) =>
        name === "bytes" ? source.bytes[point - 1] : words[source[name][point - 1]]);
    const named = (operation, module) => [operation, module].filter(Boolean).join(" in ");
    if (of > 0) lines.push(`allocates ${bytes(of)} of ${category}`, `by ${named(label, path)}`);
    else {
      lines.push(`frees ${bytes(-of)} of ${category}`, `that ${named(label, path)} asked for`);
    }
  }
  lines.push(`<b>alive ${bytes(values.live[point])}</b>`);
  for (const name of source.stack) lines.push(`  ${name.replace("_", " ")} ${bytes(values[name][point])}`);
  lines.push(`allocated ${bytes(values.allocated[point])}`, `reserved ${bytes(values.reserved[point])}`);
  return lines.join("<br>");
};

// What is drawn: the stack of what is alive, the allocator's lines, the peak, and the limit where it
// would not squeeze the picture; a band for each phase. The points come with the first resampling.
page.timeline.figure = (source) => {
  const { values, colours, peak } = source;
  const count = values.live.length;
  const per = source.scale_bytes / source.unit_bytes;
  const said = (units) => page.timeline.bytes(units, source);
  const line = (series, name, style) => ({
    type: "scatter", mode: "lines", x: [], y: [], hoverinfo: "skip", meta: { series }, name, ...style,
  });
  const fixed = (name, points, units, style) => ({
    type: "scatter", x: points, y: points.map(() => units / per), hoverinfo: "skip",
    meta: { points }, name: `${name}, ${said(units)}`, ...style,
  });
  const top = values.reserved.reduce((a, b) => Math.max(a, b));
  const limit = source.limit_bytes === null ? null : source.limit_bytes / source.unit_bytes;
  const isNear = limit !== null && limit > 0 && limit <= 2 * top;
  const traces = source.stack.map((name) => line(name,
    `${name.replace("_", " ")}, ${said(values[name][peak])}`,
    { stackgroup: "live", line: { width: 0, shape: "hv" }, fillcolor: colours[name] }));
  traces.push(
    line("live", "live", { showlegend: false, hoverinfo: "text",
      line: { width: 1, shape: "hv", color: "rgba(128, 128, 128, 0.75)" } }),
    line("allocated", "allocated", { line: { width: 1, shape: "hv", dash: "dot", color: colours.allocator } }),
    line("reserved", `reserved, ${said(top)}`, { line: { width: 2, shape: "hv", color: colours.allocator } }),
    fixed("peak", [peak], values.live[peak], { mode: "markers", cliponaxis: false, marker: {
      symbol: "triangle-down", size: 13, color: "#ffffff", line: { width: 2, color: "#000000" } } }));
  if (isNear) traces.push(fixed("limit for torch", [0, count - 1], limit, {
    mode: "lines", line: { width: 2, dash: "dash", color: colours.limit } }));
  const layout = {
    hovermode: "x", hoverdistance: -1, dragmode: page.byFinger ? false : "zoom",
    "xaxis.title.text": "allocations and releases", "xaxis.range": [0, count - 1],
    "xaxis.showspikes": true, "xaxis.spikemode": "across", "xaxis.spikethickness": 1,
    "xaxis.spikedash": "solid", "xaxis.spikecolor": "rgba(128, 128, 128, 0.75)",
    "xaxis.spikesnap": "hovered data", "xaxis.showgrid": false, "xaxis.hoverformat": ",.0f",
    "xaxis.tickformat": ",d", "xaxis.minallowed": 0, "xaxis.maxallowed": count - 1,
    "yaxis.title.text": `${source.scale} of memory`, "yaxis.fixedrange": true,
    "yaxis.range": [0, (1.2 * Math.max(top, isNear ? limit : 0)) / per], // names stand above
    shapes: source.phases.map(({ start, stop }, i) => ({
      type: "rect", xref: "x", yref: "paper", x0: start, x1: stop, y0: 0, y1: 1, layer: "below",
      line: { width: 0 }, fillcolor: i % 2 ? "rgba(128, 128, 128, 0.11)" : "rgba(0, 0, 0, 0)" })),
    annotations: source.phases.map(({ name, start }) => ({
      xref: "x", yref: "paper", x: start, y: 1, yanchor: "top", text: name, showarrow: false,
      font: { size: 11 }, visible: false })),
  };
  return { traces, layout };
};

page.scripts.timeline = async (target, drawing) => {
  const source = page.timeline.source(drawing.key ?? target.closest("[data-chart]").dataset.chart);
  const count = source.values.live.length;
  const per = source.scale_bytes / source.unit_bytes;
  const end = count - 1;
  const { traces, layout } = page.timeline.figure(source);
  await Plotly.addTraces(target, traces);
  await Plotly.relayout(target, layout);
  page.makeRoom(target);

  const resample = () => {
    const [low, high] = target.layout.xaxis.range;
    const first = Math.max(page.timeline.pointAt(count, low) - 1, 0);
    const last = Math.max(page.timeline.pointAt(count, high), first);
    const columns = Math.max(Math.floor(target._fullLayout?._size?.w ?? 600), 100);
    const points = page.timeline.thin(source.values, first, last, columns);
    const x = Array.from(points);
    const update = { x: [], y: [], text: [] };
    const traces = [];
    target.data.forEach((trace, number) => {
      const { series, points: fixed } = trace.meta;
      traces.push(number);
      update.x.push(fixed ?? x);
      update.y.push(fixed ? trace.y : Array.from(points, (i) => source.values[series][i] / per));
      update.text.push(trace.hoverinfo === "text" ? Array.from(points, (i) => page.timeline.text(source, i)) : null);
    });
    return Plotly.restyle(target, update, traces);
  };

  // Bands lie where their phases do; a name stands in the middle of what is seen of its phase,
  // upright where that is narrow.
  const letter = 7, line = 12; // px that a name takes at most: for each letter, and in height
  const bands = () => {
    const [low, high] = target.layout.xaxis.range;
    const update = {};
    source.phases.forEach((phase, i) => {
      const [start, stop] = [phase.start, Math.min(phase.stop, end)];
      const [left, right] = [Math.max(start, low), Math.min(stop, high)];
      const width = ((right - left) / (high - low)) * (target._fullLayout?._size?.w ?? 600);
      Object.assign(update, {
        [`shapes[${i}].x0`]: start, [`shapes[${i}].x1`]: stop,
        [`annotations[${i}].x`]: (left + right) / 2,
        [`annotations[${i}].textangle`]: width > phase.name.length * letter ? 0 : 90,
        [`annotations[${i}].visible`]: width > line,
      });
    });
    return update;
  };

  let busy = false;
  const redraw = async (range) => {
    busy = true;
    if (range) await Plotly.relayout(target, { "xaxis.range": range });
    await resample();
    await Plotly.relayout(target, bands());
    busy = false;
    target.dataset.resampled = Number(target.dataset.resampled ?? 0) + 1;
  };
  target.on("plotly_relayout", (change) => {
    if (busy || !Object.keys(change).some((name) => /^xaxis\.(range|autorange)/.test(name))) return;
    redraw(change["xaxis.autorange"] ? [0, end] : null);
  });
  target.on("plotly_doubleclick", () => { redraw([0, end]); return false; });

  // The same with the keyboard.
  const tools = document.createElement("div");
  tools.className = "tools zooms";
  tools.setAttribute("role", "group");
  tools.setAttribute("aria-label", "Show");
  const add = (name, act) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", () => act(button));
    tools.append(button);
    return button;
  };
  add("whole step", () => redraw([0, end]));
  source.phases.forEach((phase) => {
    if (phase.stop - phase.start < 2) return;
    add(phase.name, () => redraw([phase.start, Math.min(phase.stop, end)]));
  });
  target.before(tools);
  redraw();
};
