// Two settings side by side for one prompt.

import { PATH, apiMessages, newAnswer, stream } from "./chat_stream.mjs";
import { button, h, newId, perFrame, replace } from "./dom.mjs";
import { MessageView, curlText } from "./messages.mjs";
import { ChatSettings } from "./settings.mjs";

const NAMES = ["A", "B"];

// Says where two texts part.
export function difference(first, second) {
  if (first === second) return "Both answers are the same text.";
  const [a, b] = [[...first], [...second]];
  let at = 0;
  while (at < a.length && at < b.length && a[at] === b[at]) at += 1;
  return at ? `The answers are the same up to character ${at}.` : "The answers differ from the first character on.";
}

class Side {
  constructor(name) {
    this.name = name;
    this.settings = new ChatSettings();
    this.answer = null;
    this.view = null;
    this.place = h("div", { class: "compare-answer" }, h("p", { class: "dim" }, "No answer yet."));
    const details = h("details", { open: true }, h("summary", {}, `Settings ${name}`), this.settings.systemField, this.settings.element);
    this.element = h("section", { class: "card compare-side", "aria-label": `Settings and answer ${name}` }, h("h2", {}, name), details, this.place);
  }

  body(model, prompt) {
    try {
      return { model: model.name, ...this.settings.values(), messages: apiMessages(this.settings.system.value, [{ role: "user", content: prompt }]), stream: true, stream_options: { include_usage: true } };
    } catch (error) {
      throw new Error(`Settings ${this.name}: ${error.message}`);
    }
  }

  async run(body, signal, changed) {
    const answer = this.answer = newAnswer();
    answer.curl = curlText(PATH, body);
    const view = this.view = new MessageView(answer, {}, false, `Answer ${this.name}`);
    replace(this.place, view.element);
    const problem = await stream(answer, body, signal, changed);
    view.update();
    view.showTools();
    return problem;
  }
}

export class CompareView {
  constructor(root, say) {
    this.say = say;
    this.model = null;
    this.stopper = null;
    this.render = perFrame(() => { for (const side of this.sides) if (side.answer && !side.answer.isDone) side.view.update(); });
    this.build(root);
  }

  build(root) {
    this.sides = NAMES.map((name) => new Side(name));
    this.input = h("textarea", { id: newId("prompt"), rows: 3, placeholder: "Message" });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.run();
    });
    this.go = button("Compare", () => this.run(), { class: "primary", "aria-keyshortcuts": "Control+Enter" });
    this.stopButton = button("Stop", () => this.stopper?.abort(), { class: "stop", hidden: true, "aria-keyshortcuts": "Escape" });
    this.note = h("p", { class: "note", role: "status" }, "Ctrl+Enter sends the prompt with both settings at once, Esc stops.");
    root.append(h("label", { for: this.input.id, class: "label" }, "Prompt"), this.input,
      h("div", { class: "row end compare-row" }, this.note, this.stopButton, this.go),
      h("div", { class: "compare" }, this.sides.map((side) => side.element)));
    root.addEventListener("keydown", (event) => { if (event.key === "Escape") this.stopper?.abort(); });
  }

  onModel(model) {
    this.model = model;
    for (const side of this.sides) side.settings.onModel(model);
  }

  show(takesFocus) {
    if (takesFocus) this.input.focus();
  }

  hide() {}

  async run() {
    const prompt = this.input.value;
    if (!prompt.trim() || this.stopper) return;
    let bodies;
    try {
      if (!this.model) throw new Error("The model is not there yet; try again in a moment.");
      bodies = this.sides.map((side) => side.body(this.model, prompt));
    } catch (error) {
      this.say(error.message);
      return;
    }
    this.say("");
    const stopper = this.stopper = new AbortController();
    this.begin(true);
    const problems = await Promise.all(this.sides.map((side, index) => side.run(bodies[index], stopper.signal, this.render)));
    this.stopper = null;
    this.begin(false);
    const [first, second] = this.sides.map((side) => side.answer.content);
    this.note.textContent = problems.some(Boolean) ? "" : difference(first, second);
  }

  begin(isRunning) {
    const [from, to] = isRunning ? [this.go, this.stopButton] : [this.stopButton, this.go];
    const hadFocus = document.activeElement === from;
    this.stopButton.hidden = !isRunning;
    this.go.disabled = isRunning;
    if (hadFocus) to.focus(); // so that Escape and Enter reach this view
    if (isRunning) this.note.textContent = "Answering …";
  }
}
