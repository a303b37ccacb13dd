/* All rollouts: filters above, the list on the left, the chosen one on the right. */
"use strict";
(() => {
  const { el, short } = lockstep;
  const PAGE = 50;
  const FILTERS = ["run", "first", "last", "result", "answer", "finish", "reward_min", "reward_max", "length_min", "length_max", "text", "prompt", "order"];
  let home = null;
  let params = {};
  let rows = [];
  let total = 0;
  let chosen = -1;
  let row = null;
  let mode = "plain";
  let seen = false;
  let loading = null;
  let reading = null;
  let shown = "";

  const filters = () => Object.fromEntries(FILTERS.map((name) => [name, params[name] ?? ""]));
  const part = (name) => home.querySelector(`.${name}`);

  const input = (name, label, attributes = {}) => {
    let wait = null;
    const made = el("input", { name, "aria-label": label, placeholder: label, value: params[name] ?? "", autocomplete: "off", oninput: () => {
      clearTimeout(wait);
      wait = setTimeout(() => set({ [name]: made.value }), 200);
    }, ...attributes });
    return made;
  };
  const select = (name, label, choices) => {
    const made = el("select", { name, "aria-label": label, onchange: () => set({ [name]: made.value }) }, choices.map(([value, text]) => el("option", { value }, text)));
    made.value = params[name] ?? "";
    return made;
  };
  const number = (name, label) => input(name, label, { type: "number", class: "short" });

  const set = (changed) => {
    params = { ...filters(), ...changed };
    lockstep.go("rollouts", params, { replace: true });
    search();
  };

  const bar = () => el("form", { class: "tools filters", onsubmit: (event) => event.preventDefault() },
    lockstep.state.runs.length > 1 ? select("run", "Run", lockstep.state.runs.map((run, i) => [i ? String(i) : "", run.label])) : null,
    input("text", "Search replies and questions   ( / )", { type: "search", "data-search": true, class: "wide" }),
    select("result", "Result", [["", "any result"], ["right", "right"], ["wrong", "wrong"], ["unscored", "unscored"]]),
    select("answer", "Answer", [["", "any answer"], ["found", "answer read"], ["none", "no answer read"]]),
    select("finish", "Ended by", [["", "any end"], ["stop", "stopped"], ["length", "cut off"]]),
    el("span", { class: "pair" }, el("span", { class: "soft" }, "step"), number("first", "from"), number("last", "to")),
    el("span", { class: "pair" }, el("span", { class: "soft" }, "reward"), number("reward_min", "from"), number("reward_max", "to")),
    el("span", { class: "pair" }, el("span", { class: "soft" }, "tokens"), number("length_min", "from"), number("length_max", "to")),
    input("prompt", "Prompt id", { class: "medium" }),
    select("order", "Order", [["", "newest first"], ["oldest", "oldest first"], ["reward", "highest reward"], ["worst", "lowest reward"], ["advantage", "largest advantage"], ["longest", "longest"], ["shortest", "shortest"]]),
    el("button", { type: "reset", class: "ghost", onclick: () => { params = {}; home.replaceChildren(); lockstep.go("rollouts", {}, { replace: true }); lockstep.views.rollouts.open(home, {}); } }, "clear"));

  const oneLine = (text) => text.replaceAll(/\s+/g, " ");
  const item = (one, place) => {
    const made = el("li", { role: "option", id: `rollout-${place}`, "aria-selected": String(place === chosen), onclick: () => pick(place) },
      el("div", { class: "line" }, lockstep.badge(one), el("span", { class: "soft" }, `step ${one.step} · ${one.length} tok${lockstep.branched(one.branches)}${one.finish === "length" ? " · cut off" : ""}`), el("b", { class: "value" }, one.reward === null ? "–" : short(one.reward))),
      el("div", { class: "snippet" }, oneLine(one.question)),
      el("div", { class: "snippet reply-line" }, oneLine(one.reply)));
    return made;
  };

  const summary = (found) => {
    const count = (name) => el("span", { class: `count ${name}` }, `${found[name].toLocaleString("en")} ${name}`);
    return [el("b", {}, `${found.total.toLocaleString("en")} rollout${found.total === 1 ? "" : "s"}`), count("right"), count("wrong"), found.unscored ? count("unscored") : null,
      found.reward === null ? null : el("span", { class: "soft" }, `mean reward ${short(found.reward)}, mean length ${short(found.length)}`),
      el("span", { class: "soft time" }, `${Math.max(1, Math.round(1000 * found.seconds))} ms`)].filter(Boolean);
  };

  const search = lockstep.guard(async () => {
    const mine = (loading = {});
    shown = JSON.stringify(filters());
    const found = await lockstep.ask("rollouts", { ...filters(), limit: PAGE });
    if (mine !== loading || !part("list")) return;
    const kept = rows[chosen];
    rows = found.rows;
    total = found.total;
    chosen = kept ? rows.findIndex((one) => one.step === kept.step && one.row === kept.row) : -1;
    part("summary").replaceChildren(...summary(found));
    part("list").replaceChildren(...rows.map(item));
    part("list").scrollTop = 0;
    if (!rows.length) part("list").append(el("li", { class: "empty" }, "No rollout fits. Clear a filter, or wait for the next step."));
  });

  const more = lockstep.guard(async () => {
    if (rows.length >= total || loading === "more") return;
    const mine = (loading = "more");
    const found = await lockstep.ask("rollouts", { ...filters(), offset: rows.length, limit: PAGE });
    if (mine !== loading || !part("list")) return;
    loading = null;
    const start = rows.length;
    rows = [...rows, ...found.rows];
    part("list").append(...found.rows.map((one, place) => item(one, start + place)));
  });

  const pick = (place) => {
    const one = rows[place];
    if (!one) return;
    home.querySelector("li[aria-selected=true]")?.setAttribute("aria-selected", "false");
    chosen = place;
    const line = home.querySelector(`#rollout-${place}`);
    line.setAttribute("aria-selected", "true");
    line.scrollIntoView({ block: "nearest" });
    if (place > rows.length - 10) more();
    lockstep.go("rollouts", { ...filters(), step: one.step, row: one.row }, { replace: true });
    read(one.step, one.row);
  };

  const read = lockstep.guard(async (step, place) => {
    const mine = (reading = {});
    const found = await lockstep.ask("rollout", { run: params.run, step, row: place });
    if (mine !== reading || !part("detail")) return; // another was chosen meanwhile, or the group
    row = found;
    home.classList.add("reading");
    render();
  });

  const render = () => part("detail").replaceChildren(lockstep.reply(row, {
    mode, seen,
    onmode: (next) => { mode = next; again(); },
    onseen: () => { seen = !seen; again(); },
    ongroup: () => lockstep.go("rollouts", { ...filters(), step: row.step, row: row.row, group: row.prompt_id }),
    onclose: () => home.classList.remove("reading"),
  }));

  /* Draw the same rollout again: what was open stays open, the branch that had the focus keeps it. */
  const again = () => {
    const all = (selector) => [...part("detail").querySelectorAll(selector)];
    const opened = all("details").map((one) => one.open);
    const place = all(".branch").indexOf(document.activeElement.closest(".branch"));
    render();
    all("details").forEach((one, index) => { one.open = opened[index]; });
    all(".branch")[place]?.focus({ preventScroll: true });
  };

  const showGroup = async () => {
    const found = await lockstep.ask("group", { run: params.run, step: params.step, prompt: params.group });
    if (!params.group) return;
    const back = (one) => lockstep.go("rollouts", { ...filters(), step: params.step, row: one?.row ?? params.row });
    home.replaceChildren(lockstep.group(found, Number(params.row), back, () => back()));
    row = null;
  };

  lockstep.views.rollouts = {
    title: "Rollouts",
    open: async (given, asked) => {
      home = given;
      params = asked;
      if (params.group) return showGroup();
      if (!part("list") || shown !== JSON.stringify(filters())) {
        const list = el("ul", { class: "list", role: "listbox", tabindex: 0, "aria-label": "Rollouts", onscroll: () => { if (list.scrollTop + list.clientHeight > list.scrollHeight - 400) more(); } });
        home.replaceChildren(bar(), el("div", { class: "summary", role: "status" }), el("div", { class: "split" }, list, el("div", { class: "detail" }, el("p", { class: "empty" }, "Choose a rollout, or press j."))));
        rows = []; chosen = -1; row = null;
        await search();
      }
      if (params.step !== undefined && (row?.step !== Number(params.step) || row?.row !== Number(params.row))) {
        chosen = rows.findIndex((one) => one.step === Number(params.step) && one.row === Number(params.row));
        home.querySelector(`#rollout-${chosen}`)?.setAttribute("aria-selected", "true");
        await read(Number(params.step), Number(params.row));
      }
    },
    changed: async () => { if (home && part("list")?.scrollTop === 0) await search(); },
    close: () => home?.classList.remove("reading"),
    keys: (event) => {
      if (event.key === "Escape") { if (params.group) history.back(); else home.classList.remove("reading"); }
      else if (params.group) return;
      else if (event.key === "j") pick(Math.min(chosen + 1, rows.length - 1));
      else if (event.key === "k") pick(Math.max(chosen - 1, 0));
      else if (!row) return;
      else if (event.key === "g") lockstep.go("rollouts", { ...filters(), step: row.step, row: row.row, group: row.prompt_id });
      else if (event.key === "b") lockstep.nextBranch();
      else if (event.key === "t" && row.stretches) { mode = lockstep.nextMode(mode); again(); }
      else if (event.key === "s" && row.seen !== undefined) { seen = !seen; again(); }
    },
  };
})();
