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
  if (data.nanoseconds.length) source.clock = sum(data.nanoseconds).map((each) => each / 1e6);
  page.timeline.sources.set(key, source);
  return source;
};

// The first point at or after `x`, in order or on the clock.
page.timeline.pointAt = (clock, count, x) => {
  if (!clock) return Math.min(Math.max(Math.ceil(x), 0), count - 1);
  let [low, high] = [0, count - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (clock[middle] < x) low = middle + 1; else high = middle;
  }
  return low;
};

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
  const kind = source.stretches.find(([, start, stop]) => start <= point && point < stop)?.[0];
  const where = phase.name + (phase.micro_batch ? `, micro-batch ${phase.micro_batch}` : "")
    + (kind ? ` (${kind})` : "");
  const count = values.live.length - 1;
  const lines = [`<b>${where}</b>, event ${point.toLocaleString("en")} of ${count.toLocaleString("en")}`];
  if (source.clock) lines[0] += `, ${source.clock[point].toFixed(2)} ms`;
  if (point === 0) lines.push("before the step");
  else {
    const [of, label, path, during, at, category, stream] =
      ["bytes", "label", "path", "during", "at", "category", "stream"].map((name) =>
        name === "bytes" ? source.bytes[point - 1] : words[source[name][point - 1]]);
    const named = (operation, module) => [operation, module].filter(Boolean).join(" in ");
    const pool = stream ? `, of the stream ${stream}` : "";
    if (of > 0) lines.push(`allocates ${bytes(of)} of ${category}${pool}`, `by ${named(label, path)}`);
    else {
      lines.push(`frees ${bytes(-of)} of ${category}${pool}`, `that ${named(label, path)} asked for`);
      if (during) lines.push(`after ${named(during, at)}`);
    }
  }
  lines.push(`<b>alive ${bytes(values.live[point])}</b>`);
  for (const name of source.stack) lines.push(`  ${name.replace("_", " ")} ${bytes(values[name][point])}`);
  lines.push(`allocated ${bytes(values.allocated[point])}`, `reserved ${bytes(values.reserved[point])}`);
  return lines.join("<br>");
};

page.scripts.timeline = (target, drawing) => {
  const source = page.timeline.source(drawing.key ?? target.closest("[data-chart]").dataset.chart);
  const count = source.values.live.length;
  const per = source.scale_bytes / source.unit_bytes;
  let clock = null; // the point's time, where the axis is time
  const xOf = (point) => (point === null ? null : clock ? clock[point] : point);
  const end = () => xOf(count - 1);

  const resample = () => {
    const [low, high] = target.layout.xaxis.range;
    const first = Math.max(page.timeline.pointAt(clock, count, low) - 1, 0);
    const last = Math.max(page.timeline.pointAt(clock, count, high), first);
    const columns = Math.max(Math.floor(target._fullLayout?._size?.w ?? 600), 100);
    const points = page.timeline.thin(source.values, first, last, columns);
    const x = Array.from(points, xOf);
    const update = { x: [], y: [], text: [] };
    const traces = [];
    target.data.forEach((trace, number) => {
      const { series, points: fixed } = trace.meta;
      traces.push(number);
      update.x.push(fixed ? fixed.map(xOf) : x);
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
      const [start, stop] = [xOf(phase.start), xOf(Math.min(phase.stop, count - 1))];
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
    redraw(change["xaxis.autorange"] ? [0, end()] : null);
  });
  target.on("plotly_doubleclick", () => { redraw([0, end()]); return false; });

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
  add("whole step", () => redraw([0, end()]));
  source.phases.forEach((phase) => {
    if (phase.stop - phase.start < 2) return;
    const name = phase.name + (phase.micro_batch ? ` ${phase.micro_batch}` : "");
    add(name, () => redraw([xOf(phase.start), xOf(Math.min(phase.stop, count - 1))]));
  });
  if (source.clock) {
    const [byEvent, byTime] = ["by event", "by predicted time"].map((name, number) =>
      add(name, async () => {
        const [low, high] = target.layout.xaxis.range;
        const [from, to] = [low, high].map((x) => page.timeline.pointAt(clock, count, x));
        clock = number ? source.clock : null;
        byEvent.setAttribute("aria-pressed", String(!number));
        byTime.setAttribute("aria-pressed", String(!!number));
        await Plotly.relayout(target, {
          "xaxis.title.text": number ? "predicted milliseconds of the device" : "allocations and releases",
          "xaxis.tickformat": number ? "" : ",d", "xaxis.hoverformat": number ? ".2f" : ",.0f",
          "xaxis.maxallowed": end(),
        });
        redraw([xOf(from), xOf(to)]);
      }));
    byEvent.setAttribute("aria-pressed", "true");
    byTime.setAttribute("aria-pressed", "false");
  }
  target.before(tools);
  redraw();
};
