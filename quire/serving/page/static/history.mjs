// The chats that the browser keeps in its local storage, and their list.

import { urlOf } from "./api.mjs";
import { newAnswer } from "./chat_stream.mjs";
import { button, h, newId, replace } from "./dom.mjs";

// Several servers may share one origin, each behind a prefix of its own.
const CHATS = `quire-chats ${new URL(urlOf("/")).pathname}`;
const CURRENT = `quire-chat ${new URL(urlOf("/")).pathname}`;
const MAX_CHATS = 50;
const MAX_TITLE = 40;
const LEFT = "The chat was left before the answer was complete.";

// Token probabilities are not kept: they are many times larger than the text.
const packed = (message) => ({ ...message, tokens: undefined });

function unpacked(message) {
  if (message.role !== "assistant") return message;
  const isWhole = message.isDone;
  return { ...newAnswer(), ...message, isDone: true, problem: isWhole ? message.problem : LEFT };
}

function load() {
  try {
    const chats = JSON.parse(localStorage.getItem(CHATS) ?? "[]");
    return Array.isArray(chats) ? chats : [];
  } catch (error) {
    console.warn("The kept chats cannot be read:", error);
    return [];
  }
}

export class ChatHistory {
  // leave() comes before another chat is chosen; open(chat) shows a kept one {id, title, system, messages}, null: a new one
  constructor({ leave, open, say }) {
    this.leave = leave;
    this.open = open;
    this.say = say;
    this.id = sessionStorage.getItem(CURRENT);
    this.list = h("select", { id: newId("chats") });
    this.list.addEventListener("change", () => this.choose(this.list.value));
    this.remove = button("Delete chat", () => this.forget(this.id), { class: "quiet" });
    this.clear = button("Delete all chats", () => this.forget(null), { class: "quiet" });
    this.element = h("div", { class: "field history" }, h("label", { for: this.list.id }, "Chats in this browser"), this.list, h("div", { class: "row" }, this.remove, this.clear));
    this.show();
    addEventListener("storage", (event) => { if (event.key === CHATS) this.show(); });
  }

  current() {
    const chat = load().find(({ id }) => id === this.id);
    return chat ? { ...chat, messages: chat.messages.map(unpacked) } : null;
  }

  // The next message begins a chat of its own.
  begin() {
    this.use(null);
    this.show();
  }

  keep(system, messages) {
    if (!messages.length) return;
    if (this.id === null) this.use(Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join(""));
    const title = messages[0].content.trim().replace(/\s+/g, " ").slice(0, MAX_TITLE);
    const chat = { id: this.id, title, system, messages: messages.map(packed) };
    this.store([chat, ...load().filter(({ id }) => id !== this.id)].slice(0, MAX_CHATS));
    this.show();
  }

  // Where the storage is full, the oldest chats make room.
  store(chats) {
    for (let count = chats.length; ; count -= 1) {
      try {
        if (count) localStorage.setItem(CHATS, JSON.stringify(chats.slice(0, count)));
        else localStorage.removeItem(CHATS);
      } catch (error) {
        if (error.name === "QuotaExceededError" && count > 1) continue;
        this.say(`This browser keeps no chat: ${error.message}`);
        return;
      }
      if (count < chats.length) this.say("The storage of this browser is full: the oldest chats were deleted.");
      return;
    }
  }

  choose(id) {
    this.leave();
    this.use(id || null);
    this.open(this.current());
    this.show();
  }

  // Deletes one chat; null: all.
  forget(id) {
    const isAll = id === null;
    if (isAll && !confirm("Delete all chats that this browser keeps?")) return;
    this.store(isAll ? [] : load().filter((chat) => chat.id !== id));
    this.use(null);
    this.open(null);
    this.show();
    this.list.focus();
    this.say(isAll ? "All chats are deleted." : "The chat is deleted.");
  }

  use(id) {
    this.id = id;
    if (id === null) sessionStorage.removeItem(CURRENT);
    else sessionStorage.setItem(CURRENT, id);
  }

  show() {
    const chats = load();
    const isKept = chats.some(({ id }) => id === this.id);
    replace(this.list, h("option", { value: "" }, "New chat"), chats.map(({ id, title }) => h("option", { value: id }, title || "Untitled")));
    this.list.value = isKept ? this.id : "";
    this.remove.disabled = !isKept;
    this.clear.disabled = !chats.length;
  }
}
