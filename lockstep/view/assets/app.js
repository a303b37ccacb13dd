/* The page: tabs, the state of the runs, addresses, the keyboard. Each view is {title, open(home, params), changed?, keys?}. */
"use strict";
(() => {
  const { el } = lockstep;
  const $ = (id) => document.getElementById(id);
  const ORDER = ["curves", "rollouts", "prompt", "funnel", "time", "settings", "scores"];
  let current = null;
  let polling = null;
  let rest = 2000;

  lockstep.views = {};
  lockstep.state = { runs: [] };
  lockstep.color = (run) => `--c${run % 7}`;

  /* An answer of the server; throws an Error with its words. */
  lockstep.ask = async (name, params = {}, { long = false } = {}) => {
    const given = new URLSearchParams(Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined));
    const response = await (long ? fetch(`api/${name}`, { method: "POST", body: given }) : fetch(`api/${name}?${given}`));
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error);
    return answer;
  };
  const ENDED = "The server of this page has ended: start lockstep view again.";
  let trouble = "";
  let missed = "";
  let notes = "";
  const tell = () => {
    const text = [trouble, missed, notes].filter(Boolean).join("\n");
    $("problem").hidden = !text;
    $("problem").textContent = text;
  };
  /* Say what went wrong until something else is done. */
  lockstep.problem = (text) => { trouble = text; tell(); };
  const words = (error) => (error instanceof TypeError && error.message.includes("fetch") ? ENDED : error.message);
  lockstep.guard = (work) => async (...given) => {
    lockstep.problem("");
    try { await work(...given); } catch (error) { lockstep.problem(words(error)); }
  };

  /* The address after #: a view and its parameters; replaced, not added, while a user types. */
  lockstep.address = () => {
    const [view, ...query] = location.hash.slice(1).split("?");
    return { view: lockstep.views[view] ? view : "curves", params: Object.fromEntries(new URLSearchParams(query.join("?"))) };
  };
  lockstep.go = (view, params, { replace = false } = {}) => {
    const given = Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined);
    const hash = `#${view}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
    if (hash === location.hash) return;
    if (replace) history.replaceState(null, "", hash);
    else location.hash = hash;
  };
  lockstep.runPicker = (name, value, onchange) => {
    const made = el("select", { name, "aria-label": name, onchange: () => onchange(Number(made.value)) },
      lockstep.state.runs.map((run, number) => el("option", { value: number }, run.label)));
    made.value = value;
    return made;
  };

  const show = lockstep.guard(async () => {
    const { view, params } = lockstep.address();
    for (const tab of $("tabs").children) {
      tab.setAttribute("aria-selected", String(tab.dataset.view === view));
      tab.tabIndex = tab.dataset.view === view ? 0 : -1;
      if (tab.tabIndex === 0) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
    if (current !== view) {
      if (current) lockstep.views[current].close?.();
      current = view;
      document.title = `${lockstep.views[view].title} · Lockstep`;
      // A place of its own: an answer to the view before, which may come late, is written where nobody sees it.
      $("main").replaceWith(el("main", { id: "main", class: view, tabindex: -1 }, el("p", { class: "empty" }, "Reading …")));
    }
    await lockstep.views[view].open($("main"), params);
  });

  const showRuns = () => $("runs").replaceChildren(...lockstep.state.runs.map((run, number) => {
    const dot = el("i", { class: run.live ? "dot live" : "dot" });
    dot.style.background = `var(${lockstep.color(number)})`;
    const progress = run.planned ? `${run.step}/${run.planned}` : `${run.step}`;
    const reading = run.read < run.stored ? ` · reading ${run.read} of ${run.stored}` : "";
    return el("span", { class: "run", title: run.path }, dot, el("b", {}, run.label), el("span", { class: "soft" }, `${run.live ? "training " : ""}${progress}${reading}`));
  }));

  /* Ask what is new. An error of something else that was done stays on the page. */
  const poll = async () => {
    try {
      const before = JSON.stringify(lockstep.state);
      const { pause, runs } = await lockstep.ask("state");
      lockstep.state = { runs };
      rest = 1000 * pause;
      missed = "";
      notes = runs.flatMap((run) => run.notes).slice(0, 3).join("\n");
      if (trouble === ENDED) trouble = "";
      tell();
      if (JSON.stringify(lockstep.state) === before) return;
      showRuns();
      if (before !== "{\"runs\":[]}" && current) await lockstep.views[current].changed?.();
    } catch (error) {
      missed = trouble === words(error) ? "" : words(error);
      tell();
    }
  };

  const KEYS = [
    ["1 … 7", "the views"], ["/", "filter or search"], ["j  k", "next and previous rollout"], ["g", "its group side by side"], ["Ctrl Enter", "send the prompt"],
    ["t", "colours of its tokens"], ["s", "the prompt as the model saw it"], ["b", "next branch of an episode"], ["Esc", "back"], ["?", "this list"],
  ];
  const typing = (event) => event.target.matches("input, select, textarea");
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape" && typing(event)) { event.target.blur(); return; }
    if (typing(event)) return;
    const place = Number(event.key) - 1;
    if (event.key === "?") { $("keys").showModal(); event.preventDefault(); }
    else if (ORDER[place]) lockstep.go(ORDER[place], {});
    else if (event.key === "/") { document.querySelector("main [data-search]")?.focus(); event.preventDefault(); }
    else if (current) lockstep.views[current].keys?.(event);
  });

  const start = lockstep.guard(async () => {
    $("tabs").append(...ORDER.map((view) => el("a", { role: "tab", href: `#${view}`, "data-view": view }, lockstep.views[view].title)));
    $("tabs").addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = ORDER[(ORDER.indexOf(current) + step + ORDER.length) % ORDER.length];
      lockstep.go(next, {});
      $("tabs").querySelector(`[data-view=${next}]`).focus();
    });
    $("keys-list").append(...KEYS.flatMap(([key, meaning]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, meaning)]));
    $("keys-close").addEventListener("click", () => $("keys").close());
    $("keys-button").addEventListener("click", () => $("keys").showModal());
    addEventListener("hashchange", show);
    await poll();
    await show();
    const again = async () => {
      if (!document.hidden) await poll();
      polling = setTimeout(again, rest);
    };
    polling = setTimeout(again, rest);
    addEventListener("pagehide", () => clearTimeout(polling));
  });
  addEventListener("DOMContentLoaded", start);
})();
