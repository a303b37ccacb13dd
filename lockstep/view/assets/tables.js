/* The sample funnel, the settings of two runs, and scores with their paired tests. */
"use strict";
(() => {
  const { el } = lockstep;

  const table = ({ columns, rows }, style = "") => el("div", { class: "scroll" }, el("table", { class: style },
    el("thead", {}, el("tr", {}, columns.map((name) => el("th", {}, name)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, cell instanceof Node ? cell : String(cell ?? "–"))))))));
  const notes = (lines) => lines.map((line) => el("p", { class: "soft" }, line));
  const number = (value) => value.toLocaleString("en");

  /* --- funnel --- */
  let chart = null;
  let opened = null;
  const stage = (one, asked, before) => {
    const fill = el("i");
    fill.style.width = `${asked ? (100 * one.count) / asked : 0}%`;
    const share = asked ? `${((100 * one.count) / asked).toFixed(1)} %` : "";
    return el("div", { class: "stage" },
      el("div", { class: "name" }, el("b", {}, one.name), el("span", {}, `${number(one.count)}`), el("span", { class: "soft" }, share)),
      el("div", { class: "fill" }, fill),
      one.lost.length ? el("ul", {}, one.lost.map((loss) => el("li", {}, el("b", {}, `−${number(loss.count)}`), ` ${loss.reason}`))) : null,
      !one.lost.length && before !== null && before === one.count ? el("p", { class: "soft" }, "nothing lost") : null);
  };
  lockstep.views.funnel = {
    title: "Funnel",
    open: async (home, params) => {
      opened = { home, params };
      const run = Number(params.run ?? 0);
      const found = await lockstep.ask("funnel", { run, first: params.first, last: params.last });
      const go = (changed) => lockstep.go("funnel", { run: params.run, first: params.first, last: params.last, ...changed });
      const step = (name, label) => { const made = el("input", { type: "number", class: "short", placeholder: label, "aria-label": `${label} step`, value: params[name] ?? "", onchange: () => go({ [name]: made.value }) }); return made; };
      chart?.destroy();
      chart = null;
      const asked = found.stages[0].count;
      home.replaceChildren(
        el("div", { class: "tools" }, lockstep.runPicker("Run", run, (value) => go({ run: value })), el("span", { class: "pair" }, el("span", { class: "soft" }, "step"), step("first", "from"), step("last", "to"))),
        el("p", { class: "lead" }, "What became of the rollouts of these steps. An advantage is the mean over a rollout's tokens."),
        asked ? el("div", { class: "funnel-view" }, found.stages.map((one, place) => stage(one, asked, place ? found.stages[place - 1].count : null))) : el("p", { class: "empty" }, "No rollouts are stored for these steps."));
      const colors = { "with an advantage": "--c0", "no advantage": "--c5" };
      for (const one of found.by_step.series) one.color = colors[one.label] ?? "--c4";
      if (asked) { chart = lockstep.figure(found.by_step); home.append(el("div", { class: "one-chart" }, chart.element)); }
    },
    changed: async () => { if (opened && !document.activeElement?.matches("main input")) await lockstep.views.funnel.open(opened.home, opened.params); },
    close: () => { chart?.destroy(); chart = null; },
  };

  /* --- settings --- */
  lockstep.views.settings = {
    title: "Settings",
    open: async (home, params) => {
      const runs = lockstep.state.runs.length;
      const run = Number(params.run ?? 0);
      const other = Number(params.other ?? Math.min(1, runs - 1));
      const all = params.all === "1" || run === other;
      const found = await lockstep.ask("settings", { run, other });
      const text = (params.text ?? "").toLowerCase();
      const rows = found.filter((one) => (all || !one.same) && one.path.toLowerCase().includes(text));
      const go = (changed) => lockstep.go("settings", { run, other, all: params.all, text: params.text, ...changed });
      const search = el("input", { type: "search", placeholder: "Filter settings   ( / )", "aria-label": "Filter settings", "data-search": true, value: params.text ?? "", onchange: () => go({ text: search.value }) });
      const box = el("input", { type: "checkbox", checked: all, disabled: run === other, onchange: () => go({ all: box.checked ? "1" : "" }) });
      const listed = (kind, title) => {
        const mine = rows.filter((one) => one.kind === kind);
        const cells = mine.map((one) => [el("span", { class: "setting", title: one.help }, el("code", {}, one.path), one.help ? el("span", { class: "soft" }, one.help.split(/[.;](\s|$)/)[0]) : null), el("code", { class: one.same ? "" : "first" }, one.first), ...(run === other ? [] : [el("code", { class: one.same ? "" : "second" }, one.second)])]);
        return [el("h2", {}, `${title} `, el("span", { class: "soft" }, `${mine.length}`)), mine.length ? table({ columns: ["setting", lockstep.state.runs[run].label, ...(run === other ? [] : [lockstep.state.runs[other].label])], rows: cells }, "settings-table") : el("p", { class: "soft" }, "No difference.")];
      };
      home.replaceChildren(
        el("div", { class: "tools" }, lockstep.runPicker("First run", run, (value) => go({ run: value })), el("span", { class: "soft" }, "against"), lockstep.runPicker("Second run", other, (value) => go({ other: value })), search, el("label", { class: "check" }, box, "equal ones too")),
        ...listed("setting", "Recipe"), ...listed("environment", "Code, packages and machine"));
    },
  };

  /* --- scores --- */
  let scored = null;
  const compared = (title, found) => found && [el("h2", {}, title), found.rows.length ? table(found, "comparison") : null, ...notes(found.notes)];
  lockstep.views.scores = {
    title: "Scores",
    open: async (home) => {
      const runs = lockstep.state.runs;
      const each = await Promise.all(runs.map((_, run) => lockstep.ask("scores", { run })));
      const curves = await Promise.all(runs.map((_, run) => lockstep.ask("curves", { run })));
      const accuracy = curves.map((answer, run) => ({ run, figure: answer.figures.find((figure) => figure.title === "Held-out accuracy") })).filter(({ figure }) => figure);
      const pairs = await Promise.all(runs.slice(1).map((_, place) => lockstep.ask("compare", { run: 0, other: place + 1 })));
      scored?.destroy();
      home.replaceChildren(...[
        el("p", { class: "lead" }, "Scores carry 95 % intervals. Differences are paired, item by item: the same questions before and after."),
        accuracy.length ? el("div", { class: "one-chart" }, (scored = lockstep.figure(lockstep.merged("Held-out accuracy", accuracy, 0))).element) : null,
        ...pairs.flatMap((found, place) => compared(`${runs[0].label} against ${runs[place + 1].label}, last scores`, found)),
        ...each.flatMap((found, run) => [
          ...(compared(`${runs[run].label}: base against trained`, found.comparison) ?? []),
          el("h2", {}, `${runs[run].label}: all scores`),
          found.table.rows.length ? table(found.table) : el("p", { class: "soft" }, "This run has no scores yet."), ...notes(found.table.notes)]),
      ].filter(Boolean));
    },
    changed: async () => { await lockstep.views.scores.open(document.getElementById("main")); },
    close: () => { scored?.destroy(); scored = null; },
  };
})();
