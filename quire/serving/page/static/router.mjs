// The backends of a router: their state and load; drain and resume. With the router's admin key.

import { getJson, send } from "./api.mjs";
import { button, h, newId, replace } from "./dom.mjs";
import { Poller } from "./poller.mjs";

const KEY = "quire-router-key";
const PATH = "/router/backends";
const AGAIN_MS = 2000;
const HEAD = ["Backend", "State", "Models", "In flight", "Running", "Waiting", "Tokens that wait", "KV in use", "Prefix chunks", "Cached", "KV events", ""];

const shown = (value) => (value === null || value === undefined ? "–" : String(value));

function kvText(load) {
  if (!load?.kv_blocks_total || load.kv_blocks_free === null) return "–";
  return `${Math.round((1 - load.kv_blocks_free / load.kv_blocks_total) * 100)} %`;
}

function cachedText({ sent, predicted, served, cached }) {
  const share = (part, whole) => (whole ? `${Math.round((part / whole) * 100)} %` : "–");
  return `${share(cached, served)} (predicted ${share(predicted, sent)})`;
}

function stateText({ state, is_draining: isDraining }) {
  return isDraining ? `${state}, draining` : state;
}

export class RouterView {
  constructor(root, say) {
    this.say = say;
    this.poller = new Poller((signal) => this.update(signal), AGAIN_MS, () => sessionStorage.getItem(KEY) !== null);
    this.rows = new Map(); // name -> {element, key}; a row is made anew only when it changed, so that the focus stays
    this.build(root);
  }

  build(root) {
    this.key = h("input", { id: newId("admin"), type: "password", autocomplete: "off", spellcheck: "false", value: sessionStorage.getItem(KEY) ?? "" });
    const form = h("form", { class: "row batch-form", "aria-label": "Admin key" }, h("label", { for: this.key.id }, "Admin key of the router"), this.key, button("Show the backends", null, { type: "submit", class: "primary" }));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.key.value) sessionStorage.setItem(KEY, this.key.value);
      else sessionStorage.removeItem(KEY);
      this.poller.restart();
    });
    this.note = h("p", { class: "note", role: "status" }, "The key stays in this tab and is forgotten when the tab is closed.");
    this.body = h("tbody");
    const table = h("table", {}, h("caption", {}, "Backends of this router"), h("thead", {}, h("tr", {}, HEAD.map((name) => h("th", { scope: "col" }, name)))), this.body);
    this.card = h("section", { class: "card wide", hidden: true }, h("h2", {}, "Backends"), h("div", { class: "scroll" }, table),
      h("p", { class: "note" }, "Ranks, KV tiers, KV transfers and steps are shown by each backend's own page; its name is a link there."));
    root.append(h("section", { class: "card wide" }, h("h2", {}, "Router"), form, this.note), this.card);
  }

  show(takesFocus) {
    if (takesFocus) this.key.focus();
    this.poller.show();
  }

  hide() {
    this.poller.hide();
  }

  async update(signal) {
    try {
      this.list((await getJson(PATH, { signal, ownKey: sessionStorage.getItem(KEY) })).backends);
    } catch (problem) {
      if (problem.name === "AbortError") throw problem;
      this.note.textContent = problem.text ?? String(problem.message);
      if (problem.status === 401 || problem.status === 403) {
        this.card.hidden = true;
        return false;
      }
    }
    return true;
  }

  list(backends) {
    this.card.hidden = false;
    const numReady = backends.filter((one) => one.state === "ready" && !one.is_draining).length;
    const words = `${numReady} of ${backends.length} backends take requests.`;
    if (this.note.textContent !== words) this.note.textContent = words;
    const rows = backends.map((backend) => {
      const key = JSON.stringify(backend);
      const known = this.rows.get(backend.name);
      return [backend.name, known?.key === key ? known : { key, element: this.row(backend) }];
    });
    const isSame = rows.length === this.rows.size && rows.every(([name, row]) => this.rows.get(name) === row);
    this.rows = new Map(rows);
    if (!isSame) replace(this.body, rows.map(([, row]) => row.element));
  }

  row(backend) {
    const { load } = backend;
    const action = backend.is_draining ? "resume" : "drain";
    const press = button(action === "drain" ? "Drain" : "Resume", (event) => this.tell(backend.name, action, event.currentTarget), { "aria-label": `${action} ${backend.name}` });
    const events = backend.kv_events.map((one) => one.state).join(", ");
    const values = [backend.models.join(", ") || "–", backend.num_in_flight, shown(load?.running), shown(load?.waiting), backend.num_queued_tokens, kvText(load), backend.num_prefix_chunks, cachedText(backend.prompt_tokens), events || "off"];
    return h("tr", {}, h("th", { scope: "row" }, h("a", { href: `${backend.url}/#engine`, rel: "noreferrer" }, backend.name)), h("td", {}, stateText(backend), backend.error && h("div", { class: "dim" }, backend.error)), values.map((value) => h("td", {}, String(value))), h("td", {}, press));
  }

  async tell(name, action, pressed) {
    pressed.disabled = true;
    try {
      await send(`${PATH}/${name}/${action}`, { body: {}, ownKey: sessionStorage.getItem(KEY) });
    } catch (problem) {
      this.say(problem.text ?? String(problem.message));
      pressed.disabled = false;
    }
    this.poller.restart();
  }
}
