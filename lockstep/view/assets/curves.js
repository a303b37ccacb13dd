/* Curves of all runs over each other, with events on them, and a search for any metric. */
"use strict";
(() => {
  const { el } = lockstep;
  const DASHES = [undefined, [6, 4], [2, 3], [8, 3, 2, 3]];
  const KINDS = ["warning", "spike", "checkpoint", "evaluation", "resume"];
  const shown = new Set(["warning", "spike", "checkpoint", "evaluation", "resume"]);
  let charts = new Map();
  let grid = null;
  let tools = null;
  let smoothing = 0;
  let search = "";
  let answers = [];

  /* One figure of the same title of each run: a run has a colour, which the head of the page names; the
     metrics of a figure differ by their dashes, which its legend names. */
  lockstep.merged = (title, figures, smoothing) => {
    const present = figures.filter(({ figure }) => figure);
    const several = lockstep.state.runs.length > 1;
    const first = present[0].figure;
    const series = present.flatMap(({ figure, run }) => figure.series.map((one, index) => ({
      ...one,
      label: several ? (figure.series.length > 1 ? `${lockstep.state.runs[run].label} · ${one.label}` : lockstep.state.runs[run].label) : one.label,
      color: several ? lockstep.color(run) : undefined,
      dash: several ? DASHES[index % DASHES.length] : undefined,
    })));
    const longest = present.map(({ figure }) => figure.series).reduce((a, b) => (b.length > a.length ? b : a));
    const keys = !several ? undefined : longest.length > 1 ? longest.map((one, index) => ({ label: one.label, dash: DASHES[index % DASHES.length], color: "--soft" })) : [];
    return { ...first, title, series, keys, smoothing: first.kind === "lines" && !series.some((one) => one.low.length) ? smoothing : 0 };
  };

  const specs = () => {
    const titles = [...new Set(answers.flatMap((answer) => answer.figures.map((figure) => figure.title)))];
    return titles.flatMap((title) => {
      const found = answers.map((answer, run) => ({ run, figure: answer.figures.find((figure) => figure.title === title) })).filter(({ figure }) => figure);
      if (found[0].figure.kind !== "stack") return [lockstep.merged(title, found, smoothing)];
      return found.map(({ run, figure }) => ({ ...figure, title: found.length > 1 ? `${title}: ${lockstep.state.runs[run].label}` : title }));
    });
  };

  const marks = () => answers.flatMap((answer, run) => (answer.marks ?? [])
    .filter((mark) => shown.has(mark.kind))
    .map((mark) => ({ ...mark, message: answers.length > 1 ? `${lockstep.state.runs[run].label}: ${mark.message}` : mark.message })));

  const draw = () => {
    const next = new Map();
    const here = marks();
    for (const spec of specs()) {
      const chart = charts.get(spec.title) ?? lockstep.figure(spec, here);
      if (charts.has(spec.title)) chart.update(spec, here);
      charts.delete(spec.title);
      next.set(spec.title, chart);
      grid.append(chart.element);
    }
    for (const chart of charts.values()) chart.destroy();
    charts = next;
    if (!next.size) grid.replaceChildren(el("p", { class: "empty" }, search ? "No metric has this in its name." : "No step yet: curves appear as the run trains."));
    else for (const note of grid.querySelectorAll(".empty")) note.remove();
  };

  const load = async () => {
    const runs = lockstep.state.runs.map((_, run) => run);
    const curves = await Promise.all(runs.map((run) => lockstep.ask("curves", { run })));
    const found = search ? await Promise.all(runs.map((run) => lockstep.ask("metrics", { run, text: search }))) : curves;
    answers = found.map((answer, run) => ({ ...answer, marks: curves[run].marks }));
    tools.querySelector("datalist").replaceChildren(...[...new Set(curves.flatMap((answer) => answer.names))].map((name) => el("option", { value: name })));
    draw();
  };

  const toolbar = () => {
    let wait = null;
    const input = el("input", { type: "search", list: "metric-names", placeholder: "Any metric: entropy, time/, eval …   ( / )", "aria-label": "Search metrics", "data-search": true, value: search, oninput: () => {
      clearTimeout(wait);
      search = input.value;
      wait = setTimeout(lockstep.guard(async () => { lockstep.go("curves", { text: search }, { replace: true }); await load(); }), 180);
    } });
    const smooth = el("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: smoothing, "aria-label": "Smoothing", oninput: () => { smoothing = Number(smooth.value); draw(); } });
    const kinds = KINDS.map((kind) => {
      const box = el("input", { type: "checkbox", checked: shown.has(kind), onchange: () => { if (box.checked) shown.add(kind); else shown.delete(kind); draw(); } });
      return el("label", { class: `check mark-${kind}` }, box, kind);
    });
    return el("div", { class: "tools" }, input, el("datalist", { id: "metric-names" }), el("label", { class: "check" }, "smooth", smooth), el("span", { class: "group" }, kinds));
  };

  lockstep.views.curves = {
    title: "Curves",
    open: async (home, params) => {
      search = params.text ?? "";
      if (!grid?.isConnected) {
        tools = toolbar();
        grid = el("div", { class: "charts" });
        charts = new Map();
        home.replaceChildren(tools, grid);
      }
      await load();
    },
    changed: load,
    close: () => { for (const chart of charts.values()) chart.destroy(); charts = new Map(); },
  };
})();
