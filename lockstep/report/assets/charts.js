/* Charts of metrics over steps, drawn by uPlot; shared by report.html and by `lockstep view`. Data become text nodes only. */
"use strict";
const lockstep = {};
(() => {
  const MARKS = { warning: "--warn", health: "--bad", checkpoint: "--c6", evaluation: "--c2", resume: "--c3", spike: "--bad" };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const charts = new Set();

  /* An element with attributes and children; text is never markup. */
  lockstep.el = (tag, attributes = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value === true) made.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
    }
    made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
    return made;
  };
  const el = lockstep.el;

  lockstep.short = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(4)}k`;
    return `${+value.toPrecision(size >= 1000 ? 4 : 3)}`;
  };

  const palette = (index) => `--c${index % 7}`;

  /* Columns over the union of all steps: null is a gap, undefined a step that this series does not have. */
  const join = (series, pick) => {
    const steps = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);
    const at = new Map(steps.map((step, index) => [step, index]));
    const columns = series.map((one) => {
      const column = new Array(steps.length);
      const values = pick(one);
      one.x.forEach((step, index) => { column[at.get(step)] = values[index]; });
      return column;
    });
    return [steps, ...columns];
  };

  const smoothed = (values, weight) => {
    let last = null;
    return values.map((value) => {
      if (value === null) return null;
      last = last === null ? value : weight * last + (1 - weight) * value;
      return last;
    });
  };

  const stacked = (data) => {
    const tops = data[0].map(() => 0);
    const layers = data.slice(1).map((column) => column.map((value, i) => (tops[i] += value ?? 0)));
    return [data[0], ...layers.reverse()];
  };

  const drawBand = (plot, [low, high]) => {
    if (low === null && high === null) return;
    const { ctx, bbox } = plot;
    const clamp = (y) => Math.min(bbox.top + bbox.height, Math.max(bbox.top, y));
    const top = high === null ? bbox.top : clamp(plot.valToPos(high, "y", true));
    const bottom = low === null ? bbox.top + bbox.height : clamp(plot.valToPos(low, "y", true));
    ctx.save();
    ctx.fillStyle = css("--good");
    ctx.globalAlpha = 0.06;
    ctx.fillRect(bbox.left, top, bbox.width, bottom - top);
    ctx.globalAlpha = 0.55;
    ctx.strokeStyle = css("--good");
    ctx.setLineDash([4, 4]);
    for (const y of [high === null ? null : top, low === null ? null : bottom]) {
      if (y === null || y <= bbox.top || y >= bbox.top + bbox.height) continue;
      ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
    }
    ctx.restore();
  };

  const drawMarks = (plot, marks) => {
    const { ctx, bbox } = plot;
    const ratio = devicePixelRatio;
    ctx.save();
    for (const mark of marks) {
      if (mark.step < plot.scales.x.min || mark.step > plot.scales.x.max) continue;
      const x = plot.valToPos(mark.step, "x", true);
      ctx.strokeStyle = ctx.fillStyle = css(MARKS[mark.kind] ?? "--soft");
      ctx.globalAlpha = 0.35;
      ctx.setLineDash([2 * ratio, 3 * ratio]);
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
      ctx.globalAlpha = 1;
      ctx.beginPath(); ctx.arc(x, bbox.top, 2.6 * ratio, 0, 7); ctx.fill();
    }
    ctx.restore();
  };

  const drawIntervals = (plot, series) => {
    const { ctx } = plot;
    ctx.save();
    ctx.lineWidth = 1.4 * devicePixelRatio;
    series.forEach((one, index) => {
      if (!one.low?.length) return;
      ctx.strokeStyle = css(one.color ?? palette(index));
      ctx.globalAlpha = 0.5;
      one.x.forEach((step, i) => {
        if (one.low[i] === null || one.high[i] === null) return;
        const x = plot.valToPos(step, "x", true);
        ctx.beginPath();
        ctx.moveTo(x, plot.valToPos(one.low[i], "y", true));
        ctx.lineTo(x, plot.valToPos(one.high[i], "y", true));
        ctx.stroke();
      });
    });
    ctx.restore();
  };

  /* Short numbers, or longer ones where the short ones of two ticks are the same. */
  const labels = (ticks) => {
    const texts = ticks.map(lockstep.short);
    return new Set(texts).size === texts.length ? texts : ticks.map((tick) => `${+tick.toPrecision(6)}`);
  };

  const axes = () => {
    const common = { stroke: () => css("--faint"), font: "11px system-ui, sans-serif", ticks: { show: false } };
    return [
      { ...common, grid: { show: false }, size: 26, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000] },
      { ...common, grid: { stroke: () => css("--grid"), width: 1 }, size: 52, space: 34, values: (_, ticks) => labels(ticks) },
    ];
  };

  const range = (spec) => (_, low, high) => {
    if (low === null) return [0, 1];
    const ends = spec.series.flatMap((one) => [...(one.low ?? []), ...(one.high ?? [])]).filter((y) => y !== null);
    low = Math.min(low, ...ends);
    high = Math.max(high, ...ends);
    if (spec.kind === "stack") return [0, high * 1.08 || 1];
    if (high - low < 1e-12 * Math.max(Math.abs(high), 1e-9)) { if (low === 0) return [0, 1]; const room = Math.abs(low) * 0.1; return [low - room, high + room]; }
    const room = (high - low) * 0.08;
    return [low >= 0 && low < (high - low) * 0.5 ? 0 : low - room, high + room];
  };

  const options = (spec, marks, tip) => {
    const stack = spec.kind === "stack";
    const order = stack ? [...spec.series.keys()].reverse() : [...spec.series.keys()];
    const lines = order.map((index) => {
      const one = spec.series[index];
      const color = one.color ?? palette(index);
      return {
        stroke: () => css(color),
        width: stack ? 1 : 1.8,
        dash: one.dash,
        fill: stack ? () => css(color) : undefined,
        points: { show: one.x.length < 25 && !stack, size: 5, fill: () => css(color) },
      };
    });
    const raw = spec.smoothing ? spec.series.map((one, index) => ({
      stroke: () => `color-mix(in srgb, ${css(one.color ?? palette(index))} 25%, transparent)`, width: 1, points: { show: false },
    })) : [];
    return {
      width: 320, height: 170, legend: { show: false }, padding: [8, 10, 0, 0],
      cursor: { y: false, sync: { key: "steps" }, drag: { x: true, y: false }, points: { size: 7 } },
      scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: { range: range(spec) } },
      axes: axes(),
      series: [{}, ...lines, ...raw],
      hooks: {
        drawAxes: [(plot) => drawBand(plot, spec.healthy ?? [null, null])],
        draw: [(plot) => { drawIntervals(plot, stack ? [] : spec.series); drawMarks(plot, marks()); }],
        setCursor: [(plot) => showTip(plot, spec, marks(), tip)],
      },
    };
  };

  const showTip = (plot, spec, marks, tip) => {
    const index = plot.cursor.idx;
    const hovered = plot.over.matches(":hover");
    tip.hidden = !hovered || index === null || index === undefined;
    if (tip.hidden) return;
    const step = plot.data[0][index];
    const rows = spec.series.map((one, i) => {
      const place = one.x.indexOf(step);
      if (place < 0) return null;
      const interval = one.low?.length && one.low[place] !== null ? ` [${lockstep.short(one.low[place])}, ${lockstep.short(one.high[place])}]` : "";
      return el("div", { class: "line" }, key(one, i), el("span", {}, lockstep.short(one.y[place]) + interval));
    });
    const near = (plot.scales.x.max - plot.scales.x.min) / 120;
    const here = marks.filter((mark) => Math.abs(mark.step - step) <= near).slice(0, 4);
    tip.replaceChildren(el("b", {}, `step ${step}`), ...rows.filter(Boolean), ...here.map((mark) => el("div", { class: "mark" }, `${mark.kind}: ${mark.message}`)));
    const left = plot.valToPos(step, "x");
    tip.style.top = "54px";
    if (left > plot.over.clientWidth / 2) { tip.style.left = "60px"; tip.style.right = "auto"; } else { tip.style.right = "14px"; tip.style.left = "auto"; }
  };

  const key = (one, index) => {
    const swatch = el("i");
    swatch.style.borderTop = `3px ${one.dash ? "dotted" : "solid"} var(${one.color ?? palette(index)})`;
    return el("span", { class: "key" }, swatch, one.label);
  };

  /* A figure with its chart. `spec`: title, unit, series of {label, x, y, low?, high?, color?, dash?}, kind, healthy, help,
     smoothing, keys (for the legend, if not the series). `update` draws new data; `destroy` must be called when the figure is removed. */
  lockstep.figure = (spec, marks = []) => {
    const tip = el("div", { class: "tip", hidden: true });
    const plotHome = el("div", { class: "plot" });
    const keys = el("div", { class: "keys" });
    const last = el("span", { class: "last" });
    const help = el("div", { class: "help", hidden: true }, spec.help ?? "");
    const ask = el("button", { type: "button", "aria-expanded": "false", "aria-label": `About ${spec.title}`, onclick: () => {
      help.hidden = !help.hidden;
      ask.setAttribute("aria-expanded", String(!help.hidden));
    } }, "?");
    const caption = el("figcaption", {}, el("h3", {}, spec.title), el("span", { class: "unit" }, spec.unit), last, spec.help ? ask : null);
    const element = el("figure", { role: "group", "aria-label": spec.title }, caption, help, keys, plotHome, tip);
    let plot = null;

    const draw = () => {
      plot?.destroy();
      const data = join(spec.series, (one) => (spec.smoothing ? smoothed(one.y, spec.smoothing) : one.y));
      const raw = spec.smoothing ? join(spec.series, (one) => one.y).slice(1) : [];
      plot = new uPlot(options(spec, () => marks, tip), spec.kind === "stack" ? stacked(data) : [...data, ...raw], plotHome);
      if (plotHome.clientWidth) plot.setSize({ width: plotHome.clientWidth, height: 170 });
      keys.replaceChildren(...(spec.keys ?? (spec.series.length > 1 ? spec.series : [])).map(key));
      const only = spec.series.length === 1 ? spec.series[0].y.filter((value) => value !== null).at(-1) : undefined;
      last.textContent = only === undefined ? "" : lockstep.short(only);
    };
    const sizes = new ResizeObserver(() => plot && plotHome.clientWidth && plot.setSize({ width: plotHome.clientWidth, height: 170 }));
    sizes.observe(plotHome);
    const chart = {
      element,
      update: (next, nextMarks) => { spec = { ...spec, ...next }; marks = nextMarks ?? marks; draw(); },
      redraw: () => plot?.redraw(),
      destroy: () => { sizes.disconnect(); plot?.destroy(); charts.delete(chart); element.remove(); },
    };
    charts.add(chart);
    draw();
    return chart;
  };

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const chart of charts) chart.redraw(); });
})();
