// Tokens shaded by probability; on hover, focus or a tap, what else could have stood there.

import { button, h } from "./dom.mjs";

const CLASSES = [[0.9, "p4"], [0.5, "p3"], [0.2, "p2"], [0.05, "p1"], [0, "p0"]];
export const LEGEND = [["p4", "90 % and more"], ["p3", "from 50 %"], ["p2", "from 20 %"], ["p1", "from 5 %"], ["p0", "below 5 %"]];
const HIDE_MS = 250;

export const visible = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "␣");
export const percent = (logprob) => {
  const value = Math.exp(logprob) * 100;
  return value >= 99.95 ? "100 %" : value >= 0.1 ? `${value.toPrecision(3)} %` : "< 0.1 %";
};
const hex = (bytes) => bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
const classOf = (logprob) => (logprob === null ? "p-none" : CLASSES.find(([least]) => Math.exp(logprob) >= least)[1]);

export function legend() {
  return h("ul", { class: "legend", "aria-label": "Shades of probability" }, LEGEND.map(([name, text]) => h("li", {}, h("span", { class: `tok ${name}` }, "abc"), ` ${text}`)));
}

// One card for the whole page.
class Card {
  constructor() {
    this.element = h("div", { class: "token-card", role: "dialog", "aria-label": "Likely tokens", hidden: true });
    this.element.addEventListener("pointerenter", () => clearTimeout(this.timer));
    this.element.addEventListener("pointerleave", () => this.hideSoon());
    this.element.addEventListener("keydown", (event) => this.onKey(event));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !this.element.hidden) {
        event.stopPropagation();
        this.hide(true);
      }
    }, true);
    document.addEventListener("pointerdown", (event) => {
      if (!this.element.hidden && !this.element.contains(event.target) && event.target !== this.anchor) this.hide(false);
    });
    addEventListener("scroll", (event) => { if (!this.element.contains(event.target)) this.hide(false); }, true);
    document.body.append(this.element);
  }

  onKey(event) {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    const buttons = [...this.element.querySelectorAll("button")];
    const at = buttons.indexOf(document.activeElement) + (event.key === "ArrowDown" ? 1 : -1);
    buttons[(at + buttons.length) % buttons.length]?.focus();
    event.preventDefault();
  }

  show(anchor, token, take) {
    clearTimeout(this.timer);
    this.anchor = anchor;
    const rows = token.top.map((other) => {
      const isHere = other.id !== undefined && token.id !== undefined ? other.id === token.id : other.text === token.text;
      const bar = h("span", { class: "bar" });
      bar.style.setProperty("--share", `${Math.max(Math.exp(other.logprob) * 100, 1)}%`);
      const parts = [
        h("span", { class: "what" }, visible(other.text) || "(empty)"), h("span", { class: "bytes dim" }, hex(other.bytes ?? [])), bar,
        h("span", { class: "num" }, percent(other.logprob)), h("span", { class: "num dim" }, other.logprob.toFixed(3)),
      ];
      const props = { class: isHere ? "alt here" : "alt", "aria-current": isHere ? "true" : null };
      return h("li", {}, take ? button(parts, () => { this.hide(false); take(other); }, { ...props, title: "Take this token and go on from here" }) : h("div", props, parts));
    });
    const facts = token.logprob === null ? "of the prompt, not scored" : `${percent(token.logprob)}, logprob ${token.logprob.toFixed(3)}`;
    this.element.replaceChildren(
      h("p", { class: "token-head" }, h("strong", {}, `“${visible(token.label ?? token.text)}”`), ` ${facts}`),
      ...(token.bytes?.length ? [h("p", { class: "dim bytes" }, `bytes ${hex(token.bytes)}`)] : []),
      ...(rows.length ? [h("ol", { class: "alts" }, rows)] : []),
      ...(take && rows.length ? [h("p", { class: "dim" }, "Choose one to continue from there.")] : []),
    );
    this.element.hidden = false;
    this.place(anchor);
  }

  place(anchor) {
    const box = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const fitsBelow = box.bottom + 6 + height <= innerHeight;
    const left = Math.max(8, Math.min(box.left, innerWidth - width - 8));
    this.element.style.left = `${left}px`;
    this.element.style.top = `${Math.max(8, fitsBelow ? box.bottom + 6 : box.top - height - 6)}px`;
  }

  hideSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => { if (!this.element.contains(document.activeElement)) this.hide(false); }, HIDE_MS);
  }

  hide(returnsFocus) {
    clearTimeout(this.timer);
    const hadFocus = this.element.contains(document.activeElement);
    this.element.hidden = true;
    if (returnsFocus && hadFocus) this.anchor?.focus();
  }
}

let card = null;
const theCard = () => (card ??= new Card());
export const hideCard = () => card?.hide(false);

// Shows tokens {text, label?, logprob, bytes?, id?, top}. Arrow keys walk; Enter goes into the list.
//   complete  async, fills in texts and bytes of a token before it is shown in full
//   take      called with the position and the token chosen in its place
export class TokenText {
  constructor(name, { complete = null, take = null } = {}) {
    this.tokens = [];
    this.filled = [];
    this.complete = complete;
    this.take = take;
    this.element = h("div", { class: "tokens", role: "group", "aria-label": name });
    this.element.addEventListener("pointerover", (event) => this.onPoint(event));
    this.element.addEventListener("pointerout", () => card?.hideSoon());
    this.element.addEventListener("focusin", (event) => this.open(event.target));
    this.element.addEventListener("focusout", () => card?.hideSoon());
    this.element.addEventListener("click", (event) => this.open(event.target));
    this.element.addEventListener("keydown", (event) => this.onKey(event));
  }

  // Shows a list; what stands there already stays as it is, and so does the focus.
  show(tokens) {
    const before = this.filled;
    this.filled = tokens.map((token) => ({ token, text: token.text }));
    this.tokens = tokens;
    const shown = this.element.children;
    while (shown.length > tokens.length) shown[shown.length - 1].remove();
    tokens.forEach((token, index) => {
      const isNew = index >= shown.length;
      const span = isNew ? h("span", { role: "button", tabindex: index === 0 ? "0" : "-1", "data-at": index }) : shown[index];
      if (isNew || before[index].token !== token || before[index].text !== token.text) this.fill(span, token);
      if (isNew) this.element.append(span);
    });
  }

  fill(span, token) {
    const shownText = token.text || (token.label ? visible(token.label) : "▯");
    if (span.textContent !== shownText) span.textContent = shownText;
    span.className = `tok ${classOf(token.logprob)}${token.text ? "" : " unseen"}`;
    span.setAttribute("aria-label", `${visible(token.label ?? token.text)}${token.logprob === null ? "" : `, ${percent(token.logprob)}`}`);
  }

  onPoint(event) {
    if (event.pointerType !== "touch") this.open(event.target);
  }

  async open(span) {
    const at = Number(span.dataset?.at ?? Number.NaN);
    const token = this.tokens[at];
    if (!token) return;
    this.wanted = span;
    const show = () => theCard().show(span, token, this.take && ((other) => this.take(at, other)));
    show();
    if (this.complete && (await this.complete(token)) && this.wanted === span && theCard().anchor === span && !theCard().element.hidden) show();
  }

  onKey(event) {
    const at = Number(event.target.dataset?.at ?? Number.NaN);
    if (Number.isNaN(at)) return;
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -at, End: this.tokens.length - 1 - at };
    if (event.key in steps) {
      this.focusAt(at + steps[event.key]);
      event.preventDefault();
    } else if (event.key === "Enter" || event.key === " " || event.key === "ArrowDown") {
      this.open(event.target);
      theCard().element.querySelector("button")?.focus();
      event.preventDefault();
    }
  }

  focusAt(at) {
    const next = this.element.children[at];
    if (!next) return;
    for (const span of this.element.querySelectorAll('[tabindex="0"]')) span.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}
