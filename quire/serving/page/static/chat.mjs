// The chat: a conversation, its stream, and what the model is told beside it.

import { CUT, Problem, chunks, send } from "./api.mjs";
import { button, h, newId, perFrame } from "./dom.mjs";
import { MessageView, curlText } from "./messages.mjs";
import { ParameterPanel, checkbox, sidePanel } from "./params.mjs";
import { legend } from "./tokens.mjs";

const PATH = "/v1/chat/completions";
const NUM_TOP = 5;
const NEAR_END_PX = 80;

// A message: role, content; of the model also reasoning, calls [{id, name, arguments, result}], tokens (with probabilities),
// stats, problem (what went wrong), isDone.
const newAnswer = () => ({ role: "assistant", content: "", reasoning: "", calls: [], tokens: [], stats: {}, problem: null, isDone: false, isAnswered: false });

// Returns messages as the API takes them.
export function apiMessages(system, messages) {
  const found = system.trim() ? [{ role: "system", content: system }] : [];
  for (const message of messages) {
    if (message.role === "tool") found.push({ role: "tool", content: message.content, tool_call_id: message.callId });
    else if (message.role === "user") found.push({ role: "user", content: message.content });
    else if (message.calls.length) {
      const calls = message.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
      found.push({ role: "assistant", content: message.content, tool_calls: calls });
    } else if (message.content) found.push({ role: "assistant", content: message.content });
  }
  return found;
}

// Adds one chunk of the stream to an answer; decoder joins the bytes of tokens to text.
export function addChunk(answer, chunk, decoder) {
  if (chunk.usage) {
    answer.stats.numTokens = chunk.usage.completion_tokens;
    answer.stats.numPrompt = chunk.usage.prompt_tokens;
    answer.stats.numCached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
  }
  const choice = chunk.choices?.[0];
  if (!choice) return false;
  const { delta = {} } = choice;
  answer.content += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (answer.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  for (const entry of choice.logprobs?.content ?? []) {
    const text = decoder.decode(new Uint8Array(entry.bytes ?? []), { stream: true });
    const top = entry.top_logprobs.map((other) => ({ text: other.token, logprob: other.logprob, bytes: other.bytes }));
    answer.tokens.push({ text, label: entry.token, logprob: entry.logprob, bytes: entry.bytes, top: top.map((other) => (other.text === entry.token ? { ...other, text: entry.token } : other)) });
  }
  if (choice.finish_reason) answer.stats.finish = choice.finish_reason;
  return Boolean(delta.content || delta.reasoning_content || delta.tool_calls);
}

export class ChatView {
  constructor(root, say) {
    this.say = say;
    this.model = null;
    this.messages = [];
    this.views = new Map();
    this.stopper = null;
    this.render = perFrame(() => this.renderNow());
    this.build(root);
  }

  build(root) {
    this.log = h("div", { class: "log", role: "log", "aria-live": "polite", "aria-busy": "false", "aria-label": "Conversation", tabindex: "0" });
    this.empty = h("p", { class: "empty" }, "Say something to the model. What is written here stays in this tab.");
    this.log.append(this.empty);
    this.input = h("textarea", { id: newId("chat"), rows: 3, placeholder: "Message", "aria-describedby": "chat-hint" });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.submit();
    });
    this.sendButton = button("Send", () => this.submit(), { class: "primary" });
    this.stopButton = button("Stop", () => this.stop(), { class: "stop", hidden: true, "aria-keyshortcuts": "Escape" });
    const clear = button("New chat", () => this.clear(), { class: "quiet" });
    const save = button("Export", () => this.save(), { class: "quiet" });
    const composer = h("div", { class: "composer" },
      h("label", { for: this.input.id, class: "offscreen" }, "Message"), this.input,
      h("div", { class: "row" }, h("span", { id: "chat-hint", class: "hint dim" }, "Enter sends, Shift+Enter breaks the line, Esc stops"), clear, save, this.stopButton, this.sendButton));
    root.append(h("div", { class: "split" }, h("div", { class: "main-col" }, this.log, composer), this.side()));
    root.addEventListener("keydown", (event) => { if (event.key === "Escape") this.stop(); });
  }

  side() {
    this.system = h("textarea", { id: newId("system"), rows: 3, placeholder: "none" });
    this.tools = h("textarea", { id: newId("tools"), rows: 3, placeholder: '[{"type": "function", "function": {"name": …}}]', spellcheck: "false" });
    this.toolsField = h("div", { class: "field" }, h("label", { for: this.tools.id }, "Tools (JSON)"), this.tools);
    this.params = new ParameterPanel("what fits");
    this.probabilities = checkbox("Token probabilities", { hint: "shade each token; point at one to see the others", onchange: () => this.switchTokens() });
    this.legend = h("div", { hidden: true }, legend());
    return sidePanel("Settings", h("div", { class: "field" }, h("label", { for: this.system.id }, "System prompt"), this.system), this.probabilities.element, this.legend, this.params.element, this.toolsField);
  }

  onModel(model) {
    this.model = model;
    this.params.showDefaults(model.defaults);
    this.toolsField.hidden = !model.has_tools;
    if (!model.has_chat) this.say("This model has no chat template: use Completion.");
  }

  show(takesFocus) {
    if (takesFocus) this.input.focus();
  }

  hide() {}

  clear() {
    this.stop();
    this.cut(0);
    this.input.focus();
  }

  save() {
    const text = JSON.stringify({ model: this.model?.name, messages: apiMessages(this.system.value, this.messages) }, null, 2);
    const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    h("a", { href: url, download: "chat.json" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  add(message) {
    this.empty.hidden = true;
    this.messages.push(message);
    const actions = {
      edit: (edited, text) => this.edit(edited, text),
      regenerate: (answer) => this.regenerate(answer),
      answer: (asking) => this.answerCalls(asking),
    };
    const view = new MessageView(message, actions, this.probabilities.input.checked);
    this.views.set(message, view);
    this.log.append(view.element);
    this.log.scrollTop = this.log.scrollHeight;
    return view;
  }

  // Drops the messages from an index on.
  cut(from) {
    for (const message of this.messages.splice(from)) {
      this.views.get(message).element.remove();
      this.views.delete(message);
    }
    this.empty.hidden = this.messages.length > 0;
  }

  submit() {
    const text = this.input.value;
    if (!text.trim() || this.stopper) return;
    this.input.value = "";
    this.input.focus();
    this.add({ role: "user", content: text });
    this.run();
  }

  edit(message, text) {
    if (!text.trim()) return;
    this.stop();
    this.cut(this.messages.indexOf(message));
    this.add({ role: "user", content: text });
    this.input.focus();
    this.run();
  }

  regenerate(answer) {
    this.stop();
    this.cut(this.messages.indexOf(answer));
    this.input.focus();
    this.run();
  }

  answerCalls(asking) {
    if (this.stopper) return;
    asking.isAnswered = true;
    this.views.get(asking).showTools();
    for (const call of asking.calls) this.add({ role: "tool", content: call.result ?? "", callId: call.id });
    this.input.focus();
    this.run();
  }

  stop() {
    this.stopper?.abort();
  }

  switchTokens() {
    const isOn = this.probabilities.input.checked;
    this.legend.hidden = !isOn;
    for (const view of this.views.values()) {
      view.showsTokens = isOn;
      view.update();
    }
  }

  body() {
    const { max_tokens: limit, ...params } = this.params.values();
    const body = { model: this.model.name, messages: apiMessages(this.system.value, this.messages), stream: true, stream_options: { include_usage: true }, ...params };
    if (limit) body.max_completion_tokens = limit;
    if (this.probabilities.input.checked) Object.assign(body, { logprobs: true, top_logprobs: Math.min(NUM_TOP, this.model.max_logprobs) });
    if (this.tools.value.trim() && !this.toolsField.hidden) {
      try {
        body.tools = JSON.parse(this.tools.value);
      } catch (error) {
        throw new Error(`Tools are not valid JSON: ${error.message}`);
      }
    }
    return body;
  }

  async run() {
    let body;
    try {
      if (!this.model) throw new Error("The model is not there yet; try again in a moment.");
      body = this.body();
    } catch (error) {
      this.say(error.message);
      return;
    }
    const answer = newAnswer();
    answer.curl = curlText(PATH, body);
    const view = this.add(answer);
    const stopper = new AbortController();
    this.begin(stopper);
    try {
      await this.read(answer, body, stopper.signal);
      this.say("");
    } catch (error) {
      answer.problem = stopper.signal.aborted ? "Stopped." : error instanceof Problem ? error.text : CUT;
      this.say(answer.problem);
      if (!stopper.signal.aborted && !(error instanceof Problem)) console.error(error);
    }
    answer.isDone = true;
    view.update();
    view.showTools();
    if (this.stopper === stopper) this.begin(null);
  }

  begin(stopper) {
    this.stopper = stopper;
    const hadFocus = document.activeElement === this.stopButton;
    this.stopButton.hidden = stopper === null;
    this.sendButton.disabled = stopper !== null;
    if (hadFocus && stopper === null) this.input.focus();
    this.log.setAttribute("aria-busy", String(stopper !== null));
    if (stopper !== null) this.say("Answering …");
  }

  async read(answer, body, signal) {
    const decoder = new TextDecoder();
    const began = performance.now();
    let first = null;
    let last = began;
    const response = await send(PATH, { body, signal });
    for await (const chunk of chunks(response)) {
      if (addChunk(answer, chunk, decoder)) {
        last = performance.now();
        first ??= last;
        if (answer.reasoning && answer.content && answer.reasoningMs === undefined) answer.reasoningMs = last - first;
      }
      if (first !== null) answer.stats.ttftMs = first - began;
      if (answer.stats.numTokens > 1 && last > first) answer.stats.perSecond = ((answer.stats.numTokens - 1) / (last - first)) * 1000;
      this.render();
    }
  }

  renderNow() {
    const isNearEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR_END_PX;
    for (const [message, view] of this.views) if (message.role === "assistant" && !message.isDone) view.update();
    if (isNearEnd) this.log.scrollTop = this.log.scrollHeight;
  }
}
