// One message of a chat as it is shown: text, reasoning, tool calls, figures, what can be done with it.

import { button, copyButton, h, newId, replace } from "./dom.mjs";
import { markdown } from "./markdown.mjs";
import { TokenText } from "./tokens.mjs";

const NAMES = { user: "You", assistant: "Model", tool: "Tool result" };

export function statsText(stats) {
  const parts = [];
  if (stats.ttftMs !== undefined) parts.push(`TTFT ${stats.ttftMs < 1000 ? `${Math.round(stats.ttftMs)} ms` : `${(stats.ttftMs / 1000).toFixed(2)} s`}`);
  if (stats.perSecond) parts.push(`${stats.perSecond >= 10 ? Math.round(stats.perSecond) : stats.perSecond.toFixed(1)} tokens/s`);
  if (stats.numTokens !== undefined) parts.push(`${stats.numTokens} tokens`);
  if (stats.numPrompt !== undefined) parts.push(`prompt ${stats.numPrompt}, ${stats.numCached} cached`);
  if (stats.finish && stats.finish !== "stop") parts.push(stats.finish === "length" ? "cut at max tokens" : stats.finish.replace("_", " "));
  return parts.join(" · ");
}

export function curlText(path, body) {
  const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
  return `curl ${location.origin}${path} -H "authorization: Bearer $QUIRE_API_KEY" -H 'content-type: application/json' -d '${quoted}'`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // while it streams it is not whole
  }
}

// actions: {edit(message, text), regenerate(message), answer(message)}, each may be absent; message: see chat_stream.mjs
export class MessageView {
  constructor(message, actions, showsTokens, name = NAMES[message.role]) {
    this.message = message;
    this.actions = actions;
    this.showsTokens = showsTokens;
    this.text = h("div", { class: "text" });
    this.reasoning = h("details", { class: "reasoning", hidden: true }, h("summary", {}, "Reasoning"), h("div", { class: "text" }));
    this.calls = h("div", { class: "calls" });
    this.problem = h("p", { class: "problem", hidden: true });
    this.stats = h("span", { class: "stats dim" });
    this.tools = h("span", { class: "tools" });
    this.tokens = null;
    this.element = h("article", { class: `msg ${message.role}`, "aria-label": name }, h("h3", { class: "who" }, name), this.reasoning, this.text, this.calls, this.problem, h("footer", {}, this.stats, this.tools));
    this.update();
    this.showTools();
  }

  update() {
    const { message } = this;
    if (message.role !== "assistant") {
      this.text.textContent = message.content;
      return;
    }
    this.updateText();
    if (message.reasoning) this.updateReasoning();
    if (message.calls.length !== this.calls.children.length || !message.isDone) replace(this.calls, message.calls.map((call) => this.callCard(call)));
    this.stats.textContent = statsText(message.stats);
    this.problem.hidden = !message.problem;
    this.problem.textContent = message.problem ?? "";
    this.element.classList.toggle("streaming", !message.isDone);
  }

  updateText() {
    const { message } = this;
    if (this.showsTokens && message.tokens.length) {
      if (!this.tokens) {
        this.tokens = new TokenText("Tokens of the answer");
        replace(this.text, this.tokens.element);
      }
      this.tokens.show(message.tokens);
      return;
    }
    this.tokens = null;
    const isWaiting = !message.isDone && !message.content && !message.reasoning && !message.calls.length;
    replace(this.text, isWaiting ? h("span", { class: "waiting" }, "waiting for the first token …") : markdown(message.content));
  }

  updateReasoning() {
    const { message } = this;
    this.reasoning.hidden = false;
    const seconds = message.reasoningMs === undefined ? "" : ` for ${(message.reasoningMs / 1000).toFixed(1)} s`;
    this.reasoning.firstChild.textContent = message.reasoningMs === undefined && !message.isDone ? "Reasoning …" : `Reasoned${seconds}`;
    this.reasoning.lastChild.textContent = message.reasoning;
  }

  callCard(call) {
    const card = h("section", { class: "call", "aria-label": `Call of ${call.name}` }, h("h4", {}, "Calls ", h("code", {}, call.name)), h("pre", { tabindex: "0", "aria-label": "Arguments" }, pretty(call.arguments)));
    if (!this.message.isDone || this.message.isAnswered || !this.actions.answer) return card;
    const input = h("textarea", { id: newId("result"), rows: 2, spellcheck: "false", value: call.result ?? "" });
    input.addEventListener("input", () => { call.result = input.value; });
    const use = button("Send the result", () => this.actions.answer(this.message), { class: "primary" });
    card.append(h("label", { for: input.id }, "Answer by hand"), input, h("div", { class: "row end" }, use));
    return card;
  }

  // The buttons; they stay while a message streams, so that focus in them is not lost.
  showTools() {
    const { message, actions } = this;
    const tools = [];
    if (message.content && (message.role !== "assistant" || message.isDone)) tools.push(copyButton(() => message.content));
    if (message.role === "user") tools.push(button("Edit", () => this.edit(), { class: "quiet" }));
    if (message.role === "assistant" && message.isDone) {
      if (actions.regenerate) tools.push(button(message.problem ? "Try again" : "Regenerate", () => actions.regenerate(message), { class: "quiet" }));
      if (message.curl) {
        const curl = copyButton(() => message.curl);
        curl.textContent = "curl";
        curl.setAttribute("aria-label", "Copy the request as a curl command");
        tools.push(curl);
      }
      if (message.calls.length) replace(this.calls, message.calls.map((call) => this.callCard(call)));
    }
    replace(this.tools, tools);
  }

  edit() {
    const input = h("textarea", { class: "edit", rows: Math.min(this.message.content.split("\n").length + 1, 12), "aria-label": "Edit the message", value: this.message.content });
    const close = () => {
      this.update();
      this.showTools();
      this.tools.querySelector("button:last-child")?.focus();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      close();
    });
    replace(this.text, input);
    replace(this.tools, button("Send again", () => this.actions.edit(this.message, input.value), { class: "primary" }), button("Cancel", close, { class: "quiet" }));
    input.focus();
  }
}
