// The chat: a conversation, its settings, and the chats that the browser keeps.

import { PATH, apiMessages, newAnswer, stream } from "./chat_stream.mjs";
import { button, h, newId, perFrame } from "./dom.mjs";
import { ChatHistory } from "./history.mjs";
import { MessageView, curlText } from "./messages.mjs";
import { checkbox, sidePanel } from "./params.mjs";
import { ChatSettings } from "./settings.mjs";
import { legend } from "./tokens.mjs";

const NUM_TOP = 5;
const NEAR_END_PX = 80;

export class ChatView {
  constructor(root, say) {
    this.say = say;
    this.model = null;
    this.messages = [];
    this.views = new Map();
    this.stopper = null;
    this.render = perFrame(() => this.renderNow());
    this.build(root);
    this.restore();
    addEventListener("pagehide", () => { if (this.stopper) this.keep(); });
  }

  build(root) {
    this.log = h("div", { class: "log", role: "log", "aria-live": "polite", "aria-busy": "false", "aria-label": "Conversation", tabindex: "0" });
    this.empty = h("p", { class: "empty" }, "Say something to the model. What is written here stays in this browser.");
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
    this.settings = new ChatSettings();
    this.settings.system.addEventListener("change", () => this.keep());
    this.probabilities = checkbox("Token probabilities", { hint: "shade each token; point at one to see the others", onchange: () => this.switchTokens() });
    this.legend = h("div", { hidden: true }, legend());
    this.history = new ChatHistory({ leave: () => this.keep(), open: (chat) => this.openChat(chat), say: this.say });
    return sidePanel("Settings", this.history.element, this.settings.systemField, this.probabilities.element, this.legend, this.settings.element);
  }

  onModel(model) {
    this.model = model;
    this.settings.onModel(model);
    if (!model.has_chat) this.say("This model has no chat template: use Completion.");
  }

  // The chats that the browser keeps.

  keep() {
    this.history.keep(this.settings.system.value, this.messages);
  }

  restore() {
    const chat = this.history.current();
    if (chat) this.openChat(chat);
  }

  // Shows a kept chat; null for a new one.
  openChat(chat) {
    this.stop();
    this.cut(0);
    this.settings.system.value = chat?.system ?? this.settings.system.value;
    for (const message of chat?.messages ?? []) this.add(message);
  }

  show(takesFocus) {
    if (takesFocus) this.input.focus();
  }

  hide() {}

  clear() {
    this.keep();
    this.openChat(null);
    this.history.begin();
    this.input.focus();
  }

  save() {
    const text = JSON.stringify({ model: this.model?.name, messages: apiMessages(this.settings.system.value, this.messages) }, null, 2);
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
    const body = { model: this.model.name, ...this.settings.values(), messages: apiMessages(this.settings.system.value, this.messages), stream: true, stream_options: { include_usage: true } };
    if (this.probabilities.input.checked) Object.assign(body, { logprobs: true, top_logprobs: Math.min(NUM_TOP, this.model.max_logprobs) });
    return body;
  }

  async run() {
    this.keep();
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
    this.say(await stream(answer, body, stopper.signal, this.render));
    view.update();
    view.showTools();
    if (this.stopper === stopper) this.begin(null);
    if (this.messages.includes(answer)) this.keep(); // another chat may be shown by now
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

  renderNow() {
    const isNearEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR_END_PX;
    for (const [message, view] of this.views) if (message.role === "assistant" && !message.isDone) view.update();
    if (isNearEnd) this.log.scrollTop = this.log.scrollHeight;
  }
}
