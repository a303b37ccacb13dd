/* One rollout: question, turns, tokens in colour, the answer that was read; and its group side by side. */
"use strict";
(() => {
  const { el, short } = lockstep;

  const badge = (row) => {
    const word = row.is_right === null ? "unscored" : row.is_right ? "right" : "wrong";
    return el("span", { class: `badge ${word}` }, word);
  };
  lockstep.badge = badge;

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

  const body = (row, mode, seen) => {
    const asked = seen && row.seen !== undefined
      ? [turn("prompt, as the model saw it", "seen", "", row.seen)]
      : row.messages.map((message) => turn(message.role, message.role, "", message.content));
    if (!row.stretches) return [...asked, turn("reply", "assistant", `${row.length} tokens`, lockstep.highlighted(row.text, row.extracted))];
    let count = 0;
    const many = row.stretches.filter((stretch) => stretch.sampled).length > 1 || row.stretches.some((stretch) => !stretch.sampled);
    const last = row.stretches.findLastIndex((stretch) => stretch.sampled);
    const replies = row.stretches.map((stretch, index) => {
      count += stretch.sampled;
      const who = stretch.sampled ? (many ? `reply ${count}` : "reply") : "environment";
      const note = `${stretch.pieces.length} tokens${stretch.sampled ? (row.advantage === 0 ? ", sampled; advantage 0" : ", sampled and trained") : ", observed, not trained"}`;
      const text = mode === "plain"
        ? index === last ? lockstep.highlighted(many ? joined(stretch) : row.text, row.extracted) : [joined(stretch)]
        : stretch.pieces.map((piece, place) => lockstep.token(piece, numbersOf(stretch, place, row), mode));
      return turn(who, stretch.sampled ? "assistant" : "told", note, text);
    });
    return [...asked, ...replies];
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
  const legend = (mode, row) => (mode === "gap" || mode === "entropy") && row.stretches && !row.stretches.some((one) => one.learner.length) ? `${mode === "gap" ? "Difference" : "Entropy"} ${UNKNOWN}.` : LEGEND[mode];
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
        ["read by", row.method], ["reference", row.answer], ["ended by", row.finish], ["tokens", String(row.length)],
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
        el("header", {}, badge(row), el("span", { class: "soft" }, `sample ${row.sample} · ${row.length} tokens`)),
        el("div", { class: "measure" }, el("span", {}, "reward"), bar(row.reward ?? 0, Math.max(1, ...scored.map((one) => Math.abs(one.reward))), "reward"), el("b", {}, row.reward === null ? "none" : short(row.reward))),
        el("div", { class: "measure" }, el("span", {}, "advantage"), bar(row.advantage, most, row.advantage < 0 ? "down" : "up"), el("b", {}, short(row.advantage))),
        el("div", { class: "text" }, lockstep.highlighted(row.text, row.extracted))))));
  };
})();
