/* One rollout: question, turns, tokens in colour, the answer that was read; and its group side by side. */
"use strict";
(() => {
  const { el, short } = lockstep;

  const badge = (row) => {
    const word = row.is_right === null ? "unscored" : row.is_right ? "right" : "wrong";
    return el("span", { class: `badge ${word}` }, word);
  };
  lockstep.badge = badge;
  lockstep.branched = (count) => count > 1 ? ` · ${count} branches` : "";

  /* Pieces of text and marks: the last place of the answer that the grader read. */
  lockstep.highlighted = (text, answer) => {
    const place = answer ? text.lastIndexOf(answer) : -1;
    if (place < 0) return [text];
    return [text.slice(0, place), el("mark", { title: "what the grader read" }, answer), text.slice(place + answer.length)];
  };

  const facts = (pairs) => el("dl", { class: "mini" }, pairs.filter(([, value]) => value !== null && value !== "").map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));

  /* Colour of a token by each of its numbers; null is unknown and stays plain. Strength is a share of the full colour. */
  const strong = (share) => Math.round(75 * Math.min(1, Math.max(0, share)));
  const COLOURS = {
    logprob: ({ logprob }) => ["--c1", strong(-logprob / 5)],
    gap: ({ logprob, learner }) => learner === undefined ? null : [learner < logprob ? "--c1" : "--c0", strong((5 + Math.log10(Math.abs(learner - logprob) + 1e-9)) / 5)],
    entropy: ({ entropy }) => entropy === undefined ? null : ["--c4", strong(entropy / 3)],
    advantage: ({ advantage }) => [advantage > 0 ? "--good" : "--bad", Math.round(Math.min(60, 25 * Math.abs(advantage)))],
  };
  const said = ({ logprob, learner, entropy, advantage }) => [
    `log-probability ${logprob.toFixed(4)} (${(100 * Math.exp(logprob)).toPrecision(3)} %)`,
    learner === undefined ? null : `learner ${learner.toFixed(4)}, difference ${(learner - logprob).toExponential(1)}`,
    entropy === undefined ? null : `entropy ${entropy.toFixed(3)} nats`, advantage === undefined ? null : `advantage ${advantage.toFixed(3)}`].filter(Boolean).join("; ");

  /* One token as text; `numbers` is null for one that was not sampled. */
  lockstep.token = (piece, numbers, mode) => {
    const made = el("span", { class: "token" }, piece.replaceAll("\n", "⏎\n"));
    made.title = numbers ? said(numbers) : "not sampled: from the environment, never trained";
    const colour = numbers && COLOURS[mode]?.(numbers);
    if (!numbers) made.classList.add("told");
    else if (colour) made.style.background = `color-mix(in srgb, var(${colour[0]}) ${colour[1]}%, transparent)`;
    return made;
  };
  const numbersOf = (stretch, place, row) => stretch.sampled ? { logprob: stretch.logprobs[place], learner: stretch.learner[place], entropy: stretch.entropies[place], advantage: row.advantage } : null;

  const turn = (who, kind, note, ...content) => el("section", { class: `turn ${kind}` }, el("header", {}, el("b", {}, who), el("span", { class: "soft" }, note)), el("div", { class: "text" }, content));

  const joined = (stretch) => stretch.pieces.join("");
  const tokens = (stretches, own) => stretches.reduce((sum, one) => sum + (own === undefined || one.sampled === own ? one.pieces.length : 0), 0);
  const many = (count) => `${count} token${count === 1 ? "" : "s"}`;
  const learned = (row) => row.advantage === 0 ? "sampled; mean advantage 0" : "sampled and trained";

  /* Tokens of stretches one by one in a colour, or their plain text. */
  const written = (stretches, row, mode) => stretches.map((one) => mode === "plain" ? joined(one) : one.pieces.map((piece, place) => lockstep.token(piece, numbersOf(one, place, row), mode)));

  /* The turns of one branch; `final` if the answer that was read may stand in its last reply. */
  const turns = (stretches, row, mode, final = true) => {
    let count = 0;
    const several = stretches.length > 1 || row.branches.length > 0;
    const last = final ? stretches.findLastIndex((stretch) => stretch.sampled) : -1;
    return stretches.map((stretch, index) => {
      count += stretch.sampled;
      const who = stretch.sampled ? (several ? `reply ${count}` : "reply") : "environment";
      const text = mode === "plain" && index === last ? lockstep.highlighted(several ? joined(stretch) : row.text, row.extracted) : written([stretch], row, mode);
      return turn(who, stretch.sampled ? "assistant" : "told", `${many(stretch.pieces.length)}, ${stretch.sampled ? learned(row) : "observed, not trained"}`, text);
    });
  };

  /* One lane for each branch, to scale: what it repeats is faint, what it was told grey, what it sampled in colour. */
  const lanes = (all, row) => {
    const most = Math.max(...all.map((one) => one.parts.reduce((sum, [, count]) => sum + count, 0)));
    const piece = ([kind, count]) => {
      const made = el("i", { class: kind, title: `${many(count)} ${{ shared: "of an earlier branch", told: "not sampled here", own: learned(row) }[kind]}` });
      made.style.width = `${(100 * count) / most}%`;
      return made;
    };
    return el("div", { class: "lanes", role: "group", "aria-label": "Branches, to scale" }, all.map((one, number) => el("button", { type: "button", class: "lane", onclick: (event) => event.currentTarget.closest("article").querySelectorAll(".branch")[number].focus() },
      el("span", {}, `branch ${number + 1}`), el("span", { class: "strip" }, one.parts.map(piece)), el("span", { class: "soft" }, `${one.own} ${row.advantage === 0 ? "sampled" : "trained"}`))));
  };

  /* Every branch with its own turns; the beginning that it shares with an earlier one is told in a line, and opens. */
  const branches = (row, mode) => {
    const parts = (stretches) => stretches.map((one) => [one.sampled ? "own" : "told", one.pieces.length]);
    const all = [{ parts: [["told", row.prompt_length], ...parts(row.stretches)], own: tokens(row.stretches, true), turns: turns(row.stretches, row, mode, false) },
      ...row.branches.map((one, place) => ({
        parts: [["shared", tokens(one.shared)], ...parts(one.context), ...parts(one.stretches)], own: tokens(one.stretches, true),
        turns: [
          el("details", { class: "same" }, el("summary", {}, `begins as branch ${one.parent}: ${many(tokens(one.shared))}, ${tokens(one.shared, true)} of them sampled there`), el("div", { class: "text" }, written(one.shared, row, mode))),
          one.context.length ? turn("context", "told", `${many(tokens(one.context))}, put there by the program, not trained here`, written(one.context, row, mode)) : null,
          turns(one.stretches, row, mode, place === row.branches.length - 1)],
      }))];
    return [lanes(all, row), all.map((one, number) => el("section", { class: "branch", tabindex: "-1", "aria-label": `Branch ${number + 1} of ${all.length}` },
      el("h3", {}, `Branch ${number + 1} of ${all.length}`, el("span", { class: "soft" }, `${many(one.own)} ${learned(row)}`)), one.turns))];
  };

  /* Move to the next branch of a shown episode, after the last to the first. */
  lockstep.nextBranch = () => {
    const all = [...document.querySelectorAll(".branch")];
    all[(all.indexOf(document.activeElement.closest(".branch")) + 1) % all.length]?.focus();
  };

  const body = (row, mode, seen) => {
    const asked = seen && row.seen !== undefined
      ? [turn("prompt, as the model saw it", "seen", "", row.seen)]
      : row.messages.map((message) => turn(message.role, message.role, "", message.content));
    if (row.stretches) return [...asked, row.branches.length ? branches(row, mode) : turns(row.stretches, row, mode)];
    if (!row.branches.length) return [...asked, turn("reply", "assistant", many(row.length), lockstep.highlighted(row.text, row.extracted))];
    return [...asked, [row, ...row.branches].map((one, place, all) => turn(`branch ${place + 1} of ${all.length}`, "assistant", "", one.text))];
  };

  const MODES = [["plain", "Plain"], ["logprob", "Log-probability"], ["gap", "Engine–learner"], ["entropy", "Entropy"], ["advantage", "Advantage"]];
  lockstep.nextMode = (mode) => MODES[(MODES.findIndex(([one]) => one === mode) + 1) % MODES.length][0];
  const LEGEND = {
    plain: "",
    logprob: "Warm tokens were unlikely when they were sampled; plain ones were certain.",
    gap: "Difference of the learner's log-probability from the engine's: none below 1e-5 nats, full colour at 1. Warm: less likely for the learner.",
    entropy: "Coloured tokens had many likely alternatives: full colour at 3 nats.",
    advantage: "Green tokens become more likely by the update, red ones less; grey ones came from the environment.",
  };
  const UNKNOWN = "not known of this reply: it had no gradient, so the learner did not process it, or the run does not store it (track.tokens)";
  const legend = (mode, row) => {
    if (!row.stretches || (mode !== "gap" && mode !== "entropy")) return LEGEND[mode];
    if (!row.stretches.some((one) => one.learner.length)) return `${mode === "gap" ? "Difference" : "Entropy"} ${UNKNOWN}.`;
    return `${LEGEND[mode]}${row.branches.length ? " Stored of the first branch alone." : ""}`;
  };
  /* Buttons that choose the colour of the tokens. */
  lockstep.modes = (mode, names, disabled, onmode) => el("div", { class: "segments", role: "group", "aria-label": "Colour of the tokens" }, MODES.filter(([one]) => names.includes(one)).map(([one, label]) =>
    el("button", { type: "button", "aria-pressed": String(mode === one), disabled: disabled && one !== "plain", onclick: () => onmode(one) }, label)));

  /* `options`: {mode, seen, onmode, onseen, ongroup, onclose} */
  lockstep.reply = (row, options) => {
    const modes = lockstep.modes(options.mode, MODES.map(([one]) => one), !row.stretches, options.onmode);
    const others = Object.entries(row.metrics).map(([name, value]) => [name, short(value)]);
    return el("article", { class: "reply", "aria-label": "Rollout" },
      el("header", { class: "head" },
        el("button", { class: "ghost back", type: "button", onclick: options.onclose }, "← list"), badge(row),
        el("h2", {}, row.prompt_id), el("span", { class: "soft" }, `step ${row.step}, sample ${row.sample}`),
        el("button", { class: "primary", type: "button", onclick: options.ongroup }, "Whole group (g)")),
      facts([
        ["reward", row.reward === null ? "none" : short(row.reward)], ["advantage", short(row.advantage)], ["answer read", row.extracted ?? "none"],
        ["read by", row.method], ["reference", row.answer], ["ended by", row.finish], ["tokens", row.sampled === row.length ? String(row.length) : `${row.length}, ${row.sampled} sampled`], ["branches", row.branches.length ? String(1 + row.branches.length) : ""],
        ["mean log-probability", row.logprob === null ? "" : short(row.logprob)], ["weights", `v${row.version}`], ["task", row.task], ...others,
      ]),
      row.error ? el("p", { class: "note" }, `not scored: ${row.error}`) : null,
      row.problem ? el("p", { class: "note" }, row.problem) : null,
      el("div", { class: "tools small" }, modes, el("label", { class: "check" }, el("input", { type: "checkbox", checked: options.seen, disabled: row.seen === undefined, onchange: options.onseen }), "prompt as seen"), el("span", { class: "soft" }, legend(options.mode, row))),
      body(row, options.mode, options.seen));
  };

  const bar = (value, most, kind) => {
    const filled = el("i", { class: kind });
    filled.style.width = `${most ? Math.round((50 * Math.abs(value)) / most) : 0}%`;
    filled.style.left = value < 0 ? `${50 - Math.round((50 * Math.abs(value)) / (most || 1))}%` : "50%";
    return el("span", { class: "bar" }, filled);
  };

  /* All rollouts of a prompt in a step, beside each other. */
  lockstep.group = (rows, chosen, onpick, onclose) => {
    const most = Math.max(...rows.map((row) => Math.abs(row.advantage)));
    const scored = rows.filter((row) => row.reward !== null);
    const mean = scored.reduce((sum, row) => sum + row.reward, 0) / (scored.length || 1);
    const question = rows[0]?.messages.at(-1)?.content ?? "";
    const equal = new Set(scored.map((row) => row.reward)).size <= 1;
    return el("div", { class: "group-view" },
      el("header", { class: "head" }, el("button", { class: "ghost", type: "button", onclick: onclose }, "← back"), el("h2", {}, rows[0]?.prompt_id ?? "no such group"),
        el("span", { class: "soft" }, `step ${rows[0]?.step}, ${rows.length} samples, mean reward ${short(mean)}${equal ? "; all rewards are equal: no gradient" : ""}`)),
      turn("question", "user", rows[0]?.answer ? `reference answer: ${rows[0].answer}` : "", question),
      el("div", { class: "cards" }, rows.map((row) => el("button", { class: `card${row.row === chosen ? " chosen" : ""}`, type: "button", onclick: () => onpick(row) },
        el("header", {}, badge(row), el("span", { class: "soft" }, `sample ${row.sample} · ${many(row.length)}${lockstep.branched(1 + row.branches.length)}`)),
        el("div", { class: "measure" }, el("span", {}, "reward"), bar(row.reward ?? 0, Math.max(1, ...scored.map((one) => Math.abs(one.reward))), "reward"), el("b", {}, row.reward === null ? "none" : short(row.reward))),
        el("div", { class: "measure" }, el("span", {}, "advantage"), bar(row.advantage, most, row.advantage < 0 ? "down" : "up"), el("b", {}, short(row.advantage))),
        el("div", { class: "text" }, lockstep.highlighted([row, ...row.branches].map((one) => one.text).join("\n⋯\n"), row.extracted))))));
  };
})();
