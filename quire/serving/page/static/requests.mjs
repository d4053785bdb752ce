// The timelines of requests: what `quire explain` prints. The table says what the bars show.

import { Problem, getJson } from "./api.mjs";
import { unitMs } from "./charts.mjs";
import { button, h, replace } from "./dom.mjs";

const MAX_ROWS = 50;
const MAX_EVENTS = 200;
const NONE = "No request yet. The server keeps the last ones that ended.";
const WAITS = {
  queue: "waited in the engine",
  compile: "waited for the constraint to be compiled",
  disk_read: "waited for the disk tier",
  transfer: "waited for a prefill server",
};
const LANES = [["waits", [...Object.keys(WAITS), "preempt"]], ["prefill", ["prefill"]], ["decode", ["decode"]]];

const time = (seconds) => (seconds === null || seconds === undefined ? "–" : unitMs(seconds * 1000));
const percent = (share) => `${(share * 100).toFixed(1)} %`;
const many = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const words = (name) => name.replaceAll("_", " ");

function eventText(event) {
  const { kind, tokens = 0, steps = 0, step, duration_s: duration = 0, reason } = event;
  const took = time(duration);
  if (kind === "admit") {
    const pages = [[event.host_pages, "the host"], [event.disk_pages, "disk"]].filter(([count]) => count).map(([count, tier]) => `${many(count, "KV page")} from ${tier}`);
    return `admitted: ${many(tokens, "token")} to compute${event.cached_tokens ? `, ${event.cached_tokens} cached` : ""}${pages.length ? ` (${pages.join(", ")})` : ""}`;
  }
  if (kind === "prefill") {
    const others = (event.step_tokens ?? 0) - tokens;
    return `prefill: ${many(tokens, "token")} in ${took}, ${steps === 1 ? `step ${step}` : `${steps} steps from ${step}`}${others > 0 ? `, with ${many(others, "token")} of others` : ""}`;
  }
  if (kind === "decode") {
    const parts = [`decode: ${many(tokens, "token")} in ${took}, ${many(steps, "step")} from ${step}`];
    if (event.longest_step !== undefined) parts.push(`the longest ${time(event.longest_step_s)} (step ${event.longest_step})`);
    if (event.prefill_step_s) parts.push(`${time(event.prefill_step_s)} in steps with prompts of others`);
    if (event.draft_tokens) parts.push(`${event.accepted_tokens ?? 0} of ${many(event.draft_tokens, "draft token")} accepted`);
    return parts.join(", ");
  }
  if (kind === "preempt") return `preempted for ${took}: ${reason}`;
  if (kind === "finish") return `finished: ${reason}, ${many(tokens, "output token")}`;
  return kind in WAITS ? `${WAITS[kind]} for ${took}` : words(kind);
}

function grid(caption, head, rows) {
  const line = (row) => h("tr", {}, row.map((value, index) => h(index ? "td" : "th", index ? {} : { scope: "row" }, value)));
  return h("div", { class: "scroll" }, h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows.map(line))));
}

function lanes(timeline) {
  const total = Math.max(timeline.total_s, 1e-9);
  const bar = (event) => {
    const element = h("i", { class: event.kind, title: eventText(event) });
    element.style.left = `${(100 * event.start_s) / total}%`;
    element.style.width = `${(100 * (event.duration_s ?? 0)) / total}%`;
    return element;
  };
  return h("div", { class: "lanes", "aria-hidden": "true" }, LANES.map(([label, kinds]) => h("div", {}, h("span", {}, label), h("div", {}, timeline.events.filter(({ kind }) => kinds.includes(kind)).map(bar)))));
}

export class RequestsPart {
  constructor() {
    this.note = h("p", { class: "note", role: "status" }, NONE);
    this.list = h("div");
    this.detail = h("div");
    this.element = h("section", { class: "card wide", id: "card-requests", "aria-label": "Requests" },
      h("h2", {}, "Timelines of requests"), h("div", { class: "control" }, button("Refresh", () => this.load(), { class: "quiet" })), this.note, this.list, this.detail);
  }

  async load() {
    try {
      const { timelines, max_timelines: most } = await getJson("/v1/requests/timelines");
      const shown = timelines.slice(-MAX_ROWS).reverse();
      this.note.textContent = shown.length ? `The server keeps the last ${many(most, "request")} that ended; the newest ${shown.length} of ${timelines.length} are shown.` : NONE;
      replace(this.list, shown.length ? grid("Newest first", ["Request", "State", "Prompt", "Output", "First token", "Total", "Most of it"], shown.map((one) => this.row(one))) : null);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      this.note.textContent = error.text;
    }
  }

  row(timeline) {
    const most = timeline.phases.reduce((best, phase) => (best && best.seconds >= phase.seconds ? best : phase), null);
    return [button(timeline.id, () => this.show(timeline), { class: "quiet" }), timeline.state, String(timeline.prompt_tokens), String(timeline.output_tokens),
      time(timeline.time_to_first_token_s), time(timeline.total_s), most ? `${words(most.phase)} ${percent(most.share)}` : "–"];
  }

  show(timeline) {
    const events = timeline.events.slice(0, MAX_EVENTS);
    const hidden = timeline.events.length - events.length + timeline.num_dropped_events;
    const head = h("h3", { tabindex: "-1" }, timeline.id);
    replace(this.detail, head, h("p", {}, timeline.summary), timeline.error ? h("p", { class: "note" }, timeline.error) : null, lanes(timeline),
      grid("Where the time went", ["Phase", "Share", "Time"], timeline.phases.map(({ phase, share, seconds }) => [words(phase), percent(share), time(seconds)])),
      grid("Events", ["After", "Choice", "What happened"], events.map((event) => [time(event.start_s), String(event.choice ?? 0), eventText(event)])),
      hidden ? h("p", { class: "note" }, `${many(hidden, "more event")} not shown.`) : null);
    head.focus();
  }
}
