// The panel of sampling parameters. An empty field leaves the choice to the server, and says what that is.

import { button, h, newId } from "./dom.mjs";

const FIELDS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }, 1],
  ["top_p", "Top p", { min: 0.01, max: 1, step: 0.01 }, 1],
  ["top_k", "Top k", { min: -1, step: 1 }, "all"],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }, 0],
  ["repetition_penalty", "Repetition penalty", { min: 0.01, step: 0.05 }, 1],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }, 0],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }, 0],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }, null],
  ["seed", "Seed", { step: 1 }, "random"],
];

export class ParameterPanel {
  // defaultMaxTokens: what the server takes where none is given, in words
  constructor(defaultMaxTokens) {
    this.inputs = new Map();
    const fields = FIELDS.map(([name, label, limits, fallback]) => {
      const input = h("input", { type: "number", id: newId(name), inputmode: "decimal", ...limits, step: "any" });
      this.inputs.set(name, { input, fallback: name === "max_tokens" ? defaultMaxTokens : fallback });
      return h("div", { class: "field" }, h("label", { for: input.id }, label), input);
    });
    this.stop = h("textarea", { id: newId("stop"), rows: 2, placeholder: "none", spellcheck: "false" });
    const stop = h("div", { class: "field wide" }, h("label", { for: this.stop.id }, "Stop strings, one per line"), this.stop);
    const reset = button("Back to the defaults", () => this.reset(), { class: "quiet" });
    this.element = h("fieldset", { class: "params" }, h("legend", {}, "Sampling"), h("div", { class: "grid2" }, fields, stop), reset);
    this.showDefaults({});
  }

  showDefaults(recommended) {
    for (const [name, { input, fallback }] of this.inputs) {
      let value = recommended[name] ?? fallback;
      if (name === "top_k" && typeof value === "number" && value <= 0) value = "all";
      input.placeholder = String(value);
    }
  }

  reset() {
    for (const { input } of this.inputs.values()) input.value = "";
    this.stop.value = "";
  }

  // Returns the fields of a request's body. Throws Error, naming the field, for what is no number.
  values() {
    const found = {};
    for (const [name, { input }] of this.inputs) {
      if (input.validity.badInput) {
        input.focus();
        throw new Error(`${name} is not a number.`);
      }
      if (input.value !== "") found[name] = Number(input.value);
    }
    const stop = this.stop.value.split("\n").filter((line) => line !== "");
    if (stop.length) found.stop = stop;
    return found;
  }
}

// The side panel: closed at first where there is little room.
export function sidePanel(title, ...children) {
  const isWide = matchMedia("(min-width: 60rem)").matches;
  return h("aside", { class: "side", "aria-label": title }, h("details", { open: isWide }, h("summary", {}, title), h("div", { class: "side-body" }, children)));
}

export function checkbox(label, { checked = false, hint = null, onchange } = {}) {
  const input = h("input", { type: "checkbox", id: newId("check"), checked, onchange });
  const element = h("div", { class: "check" }, input, h("label", { for: input.id }, label, hint && h("small", {}, hint)));
  return { input, element };
}
