/* The prompt box: several replies of any checkpoint, with the log-probability of each token. */
"use strict";
(() => {
  const { el } = lockstep;
  const NAMES = ["run", "step", "count", "temperature", "top_p", "tokens", "seed"];
  let home = null;
  let form = {};
  let places = null;
  let answer = null;
  let mode = "plain";
  let busy = false;
  const draft = { text: "", raw: false };

  const field = (name, label, attributes) => {
    const made = el("input", { type: "number", name, "aria-label": label, class: "short", value: form[name], oninput: () => { form[name] = made.value; }, ...attributes });
    return el("label", { class: "pair" }, el("span", { class: "soft" }, label), made);
  };

  const send = lockstep.guard(async () => {
    if (busy || !draft.text) return;
    busy = true;
    render();
    try {
      answer = { ...await lockstep.ask("sample", { ...form, ...draft }, { long: true }), asked: { ...form } };
    } finally {
      busy = false;
      if (home.isConnected && home.className === "prompt") render();
    }
  });

  const result = () => {
    if (busy) return [el("p", { class: "empty", role: "status" }, "Sampling … the first prompt of a checkpoint loads its weights. ", el("button", { type: "button", onclick: () => lockstep.ask("stop") }, "Stop"))];
    if (!answer) return [el("p", { class: "empty" }, "Write a prompt and press Ctrl Enter.")];
    const facts = [["weights", answer.weights], ["precision", answer.numerics], ["device", answer.device], ["step", answer.asked.step], ["temperature", answer.asked.temperature], ["prompt", `${answer.length} tokens`]];
    return [
      el("dl", { class: "mini" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value))))),
      el("div", { class: "tools small" }, lockstep.modes(mode, ["plain", "logprob"], false, (next) => { mode = next; render(); }),
        el("span", { class: "soft" }, Number(answer.asked.temperature) === 0 ? "Log-probabilities are those at temperature 1." : "Log-probabilities are those with which the tokens were sampled.")),
      ...answer.replies.map((one, number) => el("section", { class: "turn assistant" },
        el("header", {}, el("b", {}, `reply ${number + 1}`), el("span", { class: "soft" }, `${one.pieces.length} tokens, ${one.finish === "length" ? "cut off" : "ended by itself"}, log-probability ${lockstep.short(one.logprobs.reduce((sum, value) => sum + value, 0))}`)),
        el("div", { class: "text" }, one.pieces.map((piece, place) => lockstep.token(piece, { logprob: one.logprobs[place] }, mode))))),
      el("details", {}, el("summary", {}, "The prompt as the model saw it"), el("section", { class: "turn seen" }, el("div", { class: "text" }, answer.seen))),
    ];
  };

  const render = () => {
    const text = el("textarea", { name: "text", rows: 5, placeholder: "A question", "aria-label": "Prompt", "data-search": true, oninput: () => { draft.text = text.value; },
      onkeydown: (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); send(); } } });
    text.value = draft.text;
    const step = el("select", { name: "step", "aria-label": "Checkpoint", onchange: () => { form.step = step.value; } }, places.steps.map((one) => el("option", { value: one }, one ? `step ${one}` : "base (step 0)")));
    step.value = form.step;
    const raw = el("input", { type: "checkbox", checked: draft.raw, onchange: () => { draft.raw = raw.checked; } });
    const around = places.around.length ? `The recipe puts around it: ${places.around.map((one) => one.slice(0, 120)).join(" · ")}` : "";
    home.replaceChildren(
      el("form", { class: "prompt-form", onsubmit: (event) => { event.preventDefault(); send(); } }, text,
        el("div", { class: "tools" },
          lockstep.state.runs.length > 1 ? lockstep.runPicker("Run", form.run, (value) => { form = { run: value }; open(home, {}); }) : null, step,
          field("count", "replies", { min: 1, max: 32 }), field("temperature", "temperature", { min: 0, max: 10, step: "any" }), field("top_p", "top-p", { min: 0, max: 1, step: "any" }),
          field("tokens", "tokens", { min: 1 }), field("seed", "seed", { min: 0 }), el("label", { class: "check" }, raw, "continue the text, without the chat"),
          el("button", { type: "submit", class: "primary", disabled: busy }, "Sample")),
        places.problem ? el("p", { class: "note" }, places.problem) : null,
        around ? el("p", { class: "soft" }, around) : null,
        places.live ? el("p", { class: "soft" }, "The run trains now: replies are computed on the CPU, beside it.") : null),
      el("div", { class: "replies" }, result()));
  };

  const open = lockstep.guard(async (given, params) => {
    home = given;
    const run = Number(params.run ?? form.run ?? 0);
    places = await lockstep.ask("places", { run });
    form = { count: 2, temperature: places.temperature, top_p: places.top_p, tokens: places.tokens, seed: 0, step: places.steps.at(-1), ...form, run };
    for (const name of NAMES) if (params[name] !== undefined) form[name] = params[name];
    if (params.text !== undefined) draft.text = params.text;
    render();
  });

  lockstep.views.prompt = { title: "Prompt", open };
})();
