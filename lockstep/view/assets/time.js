/* Seconds of each phase of a step against their floor, and rank by rank. */
"use strict";
(() => {
  const { el, short } = lockstep;
  let chart = null;
  let opened = null;

  const line = (name, seconds, most, floor, note, style = "") => {
    const fill = el("i");
    fill.style.width = `${most ? (100 * seconds) / most : 0}%`;
    const mark = el("i", { class: "floor", title: `floor ${short(floor ?? 0)} s` });
    mark.style.width = `${most ? (100 * (floor ?? 0)) / most : 0}%`;
    return el("div", { class: `phase ${style}` }, el("span", {}, name), el("span", { class: "track" }, fill, floor === null ? null : mark), el("b", {}, `${short(seconds)} s`), el("span", { class: "soft" }, note));
  };

  lockstep.views.time = {
    title: "Time",
    open: async (home, params) => {
      opened = { home, params };
      const run = Number(params.run ?? 0);
      const { times, by_step } = await lockstep.ask("time", { run, first: params.first, last: params.last });
      const go = (changed) => lockstep.go("time", { run: params.run, first: params.first, last: params.last, ...changed });
      const step = (name, label) => { const made = el("input", { type: "number", class: "short", placeholder: label, "aria-label": `${label} step`, value: params[name] ?? "", onchange: () => go({ [name]: made.value }) }); return made; };
      const most = Math.max(...times.phases.flatMap((one) => [one.seconds, one.floor ?? 0, ...one.ranks.map(([, seconds]) => seconds)]), 0);
      const share = (one) => one.floor === null ? "no floor" : `floor ${short(one.floor)} s (${(100 * one.floor / one.seconds).toFixed(0)} %)`;
      chart?.destroy();
      chart = times.steps ? lockstep.figure(by_step) : null;
      home.replaceChildren(...[
        el("div", { class: "tools" }, lockstep.runPicker("Run", run, (value) => go({ run: value })), el("span", { class: "pair" }, el("span", { class: "soft" }, "step"), step("first", "from"), step("last", "to"))),
        el("p", { class: "lead" }, "Mean seconds of a step. The floor, a line across the bar, is the least time of the same arithmetic and memory traffic at the rates of this machine, measured when the run began; evaluation and saving have none."),
        times.steps ? el("p", {}, `${times.steps} step${times.steps === 1 ? "" : "s"}, ${short(times.step)} s a step`) : el("p", { class: "empty" }, "No step is stored for this range."),
        el("div", { class: "phases" }, times.phases.flatMap((one) => [line(one.name, one.seconds, most, one.floor, share(one)), ...one.ranks.map(([name, seconds]) => line(name, seconds, most, null, "", "rank"))])),
        chart ? el("div", { class: "one-chart" }, chart.element) : null].filter(Boolean));
    },
    changed: async () => { if (opened && !document.activeElement?.matches("main input")) await lockstep.views.time.open(opened.home, opened.params); },
    close: () => { chart?.destroy(); chart = null; },
  };
})();
