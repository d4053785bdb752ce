// The engine at work: its feed, and cards that show it. Each canvas has a table that says the same.

import { Problem, events, send } from "./api.mjs";
import { BAR_PX, cell, cellAt, drawKv, drawLines, drawSteps, drawTimeline, isMostlyEmpty, open, stripes, theme, unitMs } from "./charts.mjs";
import { button, h, newId, onCalmChange, perFrame, replace, wantsCalm } from "./dom.mjs";
import { CACHED, EngineModel, WINDOW_S, joinSteps } from "./engine_model.mjs";
import { RequestsPart } from "./requests.mjs";

const AGAIN_MS = 2000;
const TABLE_MS = 1000;
const KV_TALL = 340;
const KV_TALL_NARROW = 520;
const NARROW = 500;
const NUM_TIMELINE = 16;
const PER_BAR = [1, 4, 16, 64];

const ms = (value) => (value === null ? "–" : unitMs(value));
const rate = (value) => (value >= 1000 ? `${(value / 1000).toFixed(1)}k` : value >= 100 ? String(Math.round(value)) : String(Number(value.toFixed(1))));
const share = (value) => (value === null ? "–" : `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`);
const brief = (label) => (label.length > 12 ? `${label.slice(0, 11)}…` : label);
const many = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

const FIGURES = [
  ["running", "Running", (f) => f.running, "sequences"],
  ["waiting", "Waiting", (f) => f.waiting, "requests"],
  ["decode", "Decode", (f) => rate(f.decodeRate), "tokens/s"],
  ["prefill", "Prefill", (f) => rate(f.prefillRate), "tokens/s"],
  ["ttft", "TTFT median", (f) => ms(f.ttft50), "last minute"],
  ["ttft95", "TTFT p95", (f) => ms(f.ttft95), "last minute"],
  ["kv", "KV in use", (f) => share(f.kvShare), "of the blocks"],
  ["hits", "Prefix hits", (f) => share(f.hitShare), "last minute"],
  ["preemptions", "Preemptions", (f) => f.preemptions, "seen here"],
];

function table(caption, head) {
  const body = h("tbody");
  const element = h("div", { class: "scroll" }, h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))), body));
  const show = (rows) => replace(body, rows.map((row) => h("tr", {}, row.map((value, index) => (index ? h("td", {}, String(value)) : h("th", { scope: "row" }, String(value)))))));
  return { element, show };
}

function swatch(label, draw) {
  const canvas = h("canvas", { class: "swatch", "aria-hidden": "true" });
  return { element: h("li", {}, canvas, label), draw: () => draw(open(canvas).context, theme()) };
}

const line = (name, dash) => (context, colours) => {
  context.strokeStyle = colours[name];
  context.lineWidth = 2;
  context.setLineDash(dash);
  context.beginPath();
  context.moveTo(0, 7);
  context.lineTo(14, 7);
  context.stroke();
  context.setLineDash([]);
};

const PARTS = [["overview", "Overview", "#engine"], ["requests", "Requests", "#engine/requests"], ["ranks", "Ranks", "#engine/ranks"], ["experts", "Experts", "#engine/experts"], ["tiers", "KV tiers", "#engine/tiers"], ["transfers", "KV transfers", "#engine/transfers"]];
const NONE = {
  ranks: "One process computes the model. With --tensor-parallel-size or --pipeline-parallel-size the processes that share it are shown here.",
  experts: "The load of experts is not counted. With --enable-expert-parallel or --save-expert-load the experts of a mixture model are shown here.",
  tiers: "KV blocks are kept in the pool of the engine only. With --kv-host-bytes or --kv-disk-dir the tiers are shown here.",
  transfers: "This server computes prompts and outputs. With --role prefill or --role decode its KV transfers are shown here.",
};
const ROLES = {
  prefill: "This is a prefill server: it computes prompts for decode servers, which pull the KV of them.",
  decode: "This is a decode server: it pulls the KV of long prompts from prefill servers, and computes the outputs.",
};

export class EngineView {
  constructor(root, say) {
    this.say = say;
    this.model = new EngineModel();
    this.stopper = null;
    this.isPaused = false;
    this.isShown = false;
    this.part = "overview";
    this.cursor = null;
    this.perBar = 1;
    this.replica = 0;
    this.draw = perFrame(() => this.drawNow());
    this.build(root);
    new ResizeObserver(() => this.draw()).observe(root);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    document.addEventListener("visibilitychange", () => this.restart());
    onCalmChange(() => this.restart());
  }

  build(root) {
    this.state = h("p", { class: "engine-state", role: "status" }, "Not connected");
    this.pause = button("Pause", () => this.togglePause(), { class: "quiet", "aria-pressed": "false" });
    this.replicas = h("select", { id: newId("replica") });
    this.replicas.addEventListener("change", () => this.showReplica(Number(this.replicas.value)));
    this.replicaPick = h("span", { class: "replicas", hidden: "" }, h("label", { for: this.replicas.id }, "Replica "), this.replicas);
    this.figures = new Map(FIGURES.map(([name]) => [name, h("dd")]));
    const figures = h("dl", { class: "figures" }, FIGURES.map(([name, label, , unit]) => h("div", {}, h("dt", {}, label), this.figures.get(name), h("dd", { class: "unit" }, unit))));
    this.cards = {};
    const cards = h("div", { class: "cards" }, this.stepCard(), this.kvCard(), this.queueCard(), this.rateCard(), this.ttftCard(), this.timelineCard());
    this.requests = new RequestsPart();
    this.parts = {
      overview: h("div", {}, figures, cards),
      requests: this.requests.element,
      ranks: this.rankPart(),
      experts: this.expertPart(),
      tiers: this.tierPart(),
      transfers: this.transferPart(),
    };
    this.links = new Map(PARTS.map(([name, label, href]) => [name, h("a", { href }, label)]));
    root.append(h("nav", { class: "tabs sub", "aria-label": "Views of the engine" }, [...this.links.values()]),
      h("div", { class: "row engine-head" }, this.state, this.replicaPick, this.pause), ...Object.values(this.parts));
  }

  rankPart() {
    this.rankTable = table("Since the engine's start", ["Rank", "Process", "State", "Memory", "Share of the weights", "Waited", "Part"]);
    this.rankNote = h("p", { class: "note" }, NONE.ranks);
    return h("section", { class: "card wide", id: "card-ranks", "aria-label": "Ranks" }, h("h2", {}, "Processes that share the model"), this.rankNote, this.rankTable.element);
  }

  expertPart() {
    this.expertRankTable = table("Tokens of the experts of each rank, in all layers, since the engine's start", ["Rank", "Tokens", "Share"]);
    this.expertTable = table("By layer; a token counts once for each of its experts", ["Layer", "Experts", "Tokens", "Busiest experts", "Max/mean of the ranks", "Last rebalancing", "Moved"]);
    this.expertNote = h("p", { class: "note" }, NONE.experts);
    return h("section", { class: "card wide", id: "card-experts", "aria-label": "Experts" }, h("h2", {}, "Load of the experts"), this.expertNote, this.expertRankTable.element, this.expertTable.element);
  }

  tierPart() {
    this.tierTable = table("Counts of pages since the engine's start; a page is one full KV block", ["Tier", "Pages", "In use", "Limit", "Hit", "Saved", "Loaded", "Dropped", "Saving", "Loading"]);
    this.tierNote = h("p", { class: "note" }, NONE.tiers);
    return h("section", { class: "card wide", id: "card-tiers", "aria-label": "KV tiers" }, h("h2", {}, "KV cache tiers"), this.tierNote, this.tierTable.element);
  }

  transferPart() {
    this.transferNote = h("p", { class: "note" }, NONE.transfers);
    this.outcomeTable = table("Transfers by outcome, and prompts without one by the reason, since the engine's start", ["Outcome", "Count"]);
    this.problemTable = table("The last failure of each prefill server", ["Prefill server", "Problem"]);
    return h("section", { class: "card wide", id: "card-transfers", "aria-label": "KV transfers" }, h("h2", {}, "KV transfers between prefill and decode servers"), this.transferNote, this.outcomeTable.element, this.problemTable.element);
  }

  showParts() {
    const { model } = this;
    const fill = (shown, rows) => {
      shown.element.hidden = !rows.length;
      shown.show(rows);
      return rows.length;
    };
    this.rankNote.hidden = fill(this.rankTable, model.rankRows()) > 0;
    const experts = model.expertRows();
    fill(this.expertRankTable, experts.ranks);
    this.expertNote.hidden = fill(this.expertTable, experts.layers) > 0;
    this.tierNote.hidden = fill(this.tierTable, model.tierRows()) > 0;
    const { role, outcomes, problems } = model.transfers();
    this.transferNote.textContent = ROLES[role] ?? NONE.transfers;
    fill(this.outcomeTable, outcomes);
    fill(this.problemTable, problems);
  }

  card(name, title, canvas, twin, { legend = [], note = null, wide = false, control = null } = {}) {
    const id = newId("card");
    const swatches = legend.map(([label, draw]) => swatch(label, draw));
    const details = twin && h("details", { class: "twin" }, h("summary", {}, "As a table"), twin.element);
    details?.addEventListener("toggle", () => this.showTables());
    this.cards[name] = { canvas, twin, details, swatches, note };
    return h("section", { class: wide ? "card wide" : "card", "aria-labelledby": id, id: `card-${name}` },
      h("h2", { id }, title), control, swatches.length ? h("ul", { class: "legend" }, swatches.map(({ element }) => element)) : null, canvas, note, details);
  }

  stepCard() {
    this.stepCanvas = h("canvas", { class: "steps", tabindex: "0", role: "img", "aria-label": "Steps of the engine; the arrow keys read single steps out below" });
    this.zoom = h("select", { id: newId("zoom") }, PER_BAR.map((count) => h("option", { value: String(count) }, many(count, "step"))));
    this.zoom.addEventListener("change", () => {
      this.perBar = Number(this.zoom.value);
      this.cursor = null;
      this.draw();
    });
    this.stepNote = h("p", { class: "note", "aria-live": "polite" }, "Point at a step, or use the arrow keys. A bar with a gap is cut: that step took longer.");
    this.stepCanvas.addEventListener("pointermove", (event) => this.pointStep(event.offsetX));
    this.stepCanvas.addEventListener("keydown", (event) => this.walkSteps(event));
    const twin = table("The latest steps, newest first", ["Step", "Duration", "Prefill tokens", "Decode tokens", "Running", "Preempted", "In the batch"]);
    return this.card("steps", "Batch, step by step", this.stepCanvas, twin, {
      wide: true,
      note: this.stepNote,
      control: h("div", { class: "control" }, h("label", { for: this.zoom.id }, "One bar is"), this.zoom),
      legend: [
        ["prefill tokens", (context, colours) => { context.fillStyle = colours.prefill; context.fillRect(0, 0, 14, 14); stripes(context, 0, 0, 14, 14, colours.surface); }],
        ["decode tokens", (context, colours) => { context.fillStyle = colours.decode; context.fillRect(0, 0, 14, 14); }],
        ["preemption", (context, colours) => { context.fillStyle = colours.warn; context.fillText("▾", 2, 11); }],
      ],
    });
  }

  kvCard() {
    this.kvCanvas = h("canvas", { class: "kv", role: "img", "aria-label": "KV blocks by owner; the table below says the same" });
    this.kvCanvas.addEventListener("pointermove", (event) => this.pointKv(event.offsetX, event.offsetY));
    this.kvNote = h("p", { class: "note" }, "No blocks yet.");
    this.wantsAllKv = false;
    this.kvFold = button("Show all blocks", () => this.toggleKv(), { class: "quiet", hidden: true });
    const twin = table("Blocks by request", ["Request", "State", "Blocks", "Of them shared", "Key"]);
    return this.card("kv", "KV blocks by owner", this.kvCanvas, twin, {
      wide: true,
      note: this.kvNote,
      control: h("div", { class: "control" }, this.kvFold),
      legend: [
        ["a request's own", (context, colours) => cell(context, 0, 0, 15, 1, 1, colours)],
        ["shared prefix", (context, colours) => cell(context, 0, 0, 15, 1, 2, colours)],
        ["cached, free to take", (context, colours) => cell(context, 0, 0, 15, CACHED, 0, colours)],
        ["free", (context, colours) => { context.strokeStyle = colours.queue; context.strokeRect(0.5, 0.5, 13, 13); }],
      ],
    });
  }

  queueCard() {
    this.queueTable = table("What waits before the engine", ["Class", "Waiting", "Tokens", "Oldest", "Est. wait"]);
    this.queueNote = h("p", { class: "note" });
    const canvas = h("canvas", { class: "chart", role: "img", "aria-label": "Requests waiting and sequences running over the last minute" });
    const twin = table("Waiting and running, the most in each second", ["Seconds ago", "Waiting requests", "Running sequences"]);
    return this.card("queue", "Queue", canvas, twin, { note: this.queueNote, control: this.queueTable.element, legend: [["waiting", line("queue", [4, 3])], ["running", line("decode", [])]] });
  }

  rateCard() {
    const canvas = h("canvas", { class: "chart", role: "img", "aria-label": "Tokens per second over the last minute" });
    const twin = table("Tokens per second", ["Seconds ago", "Prefill", "Decode"]);
    return this.card("rate", "Throughput, tokens/s", canvas, twin, { legend: [["decode", line("decode", [])], ["prefill", line("prefill", [4, 3])]] });
  }

  ttftCard() {
    const canvas = h("canvas", { class: "chart", role: "img", "aria-label": "Time to first token of the requests of the last minute" });
    return this.card("ttft", "Time to first token", canvas, table("Time to first token", ["Seconds ago", "Time"]));
  }

  timelineCard() {
    const canvas = h("canvas", { class: "timeline", role: "img", "aria-label": "The requests of the last minute" });
    const twin = table("Requests, newest first", ["Request", "Class", "State", "Queued", "Prefill", "Decode", "Prompt", "Cached", "Output", "Key"]);
    return this.card("timeline", "Requests over the last minute", canvas, twin, {
      wide: true,
      legend: [
        ["queued", (context, colours) => { context.strokeStyle = colours.queue; context.strokeRect(0.5, 0.5, 13, 13); }],
        ["prefill", (context, colours) => { context.fillStyle = colours.prefill; context.fillRect(0, 0, 14, 14); stripes(context, 0, 0, 14, 14, colours.surface); }],
        ["decode", (context, colours) => { context.fillStyle = colours.decode; context.fillRect(0, 0, 14, 14); }],
        ["aborted or failed", (context, colours) => { context.fillStyle = colours.warn; context.fillText("✕", 2, 11); }],
      ],
    });
  }

  // The feed: open while the view is shown, slow while nobody can see it or motion is unwanted.

  show(takesFocus, part) {
    this.part = part in this.parts ? part : "overview";
    for (const [name, link] of this.links) {
      this.parts[name].hidden = name !== this.part;
      if (name === this.part) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    if (this.part === "requests") this.requests.load();
    this.showTables();
    this.draw();
    if (this.isShown) return; // the feed is open
    this.isShown = true;
    this.clock = setInterval(() => { this.showTables(); this.draw(); }, TABLE_MS);
    this.restart();
  }

  hide() {
    this.isShown = false;
    clearInterval(this.clock);
    this.stopper?.abort();
  }

  togglePause() {
    this.isPaused = !this.isPaused;
    this.pause.setAttribute("aria-pressed", String(this.isPaused));
    this.pause.textContent = this.isPaused ? "Go on" : "Pause";
    this.restart();
  }

  restart() {
    this.stopper?.abort();
    if (!this.isShown) return;
    if (this.isPaused) {
      this.state.textContent = "Paused";
      return;
    }
    this.stopper = new AbortController();
    this.follow(this.stopper.signal);
  }

  // Another engine: what is known of the one before is forgotten, as both count their steps from the beginning.
  showReplica(replica) {
    this.replica = replica;
    this.cursor = null;
    this.model.clear();
    this.restart();
    this.draw();
  }

  // The states of all engines, where there are several.
  listReplicas(states) {
    if (!states?.length) return;
    this.replicaPick.hidden = false;
    replace(this.replicas, states.map((state, index) => h("option", { value: String(index) }, `${index} (${state})`)));
    this.replicas.value = String(this.replica);
  }

  async follow(signal) {
    while (!signal.aborted) {
      try {
        await this.listen(signal);
      } catch (error) {
        if (signal.aborted) return;
        if (!(error instanceof Problem)) throw error;
        this.state.textContent = error.text;
        if (error.status === 401) return;
      }
      await new Promise((resolve) => { setTimeout(resolve, AGAIN_MS); });
    }
  }

  async listen(signal) {
    const hz = wantsCalm() || document.hidden ? 1 : 10;
    const headers = this.model.lastStep >= 0 ? { "last-event-id": String(this.model.lastStep) } : {};
    const response = await send(`/ui/events?hz=${hz}&replica=${this.replica}`, { signal, headers });
    for await (const { event, data } of events(response)) {
      const frame = JSON.parse(data);
      if (frame.error) throw new Problem(frame.error.message);
      this.model.apply(frame, event === "snapshot");
      this.listReplicas(frame.replicas);
      this.draw();
      if (event === "snapshot") this.showTables();
    }
    this.state.textContent = "The feed ended; connecting again …";
  }

  // Drawing.

  drawNow() {
    if (!this.isShown || this.isPaused) return;
    const { model, cards } = this;
    const figures = model.figures();
    for (const [name, , read] of FIGURES) {
      const text = String(read(figures));
      const shown = this.figures.get(name);
      if (shown.textContent !== text) shown.textContent = text;
    }
    const { shape } = model;
    const words = model.engine === "unknown" ? "Connecting …" : `Engine ${model.engine}, server ${model.phase}${shape ? ` · ${shape.model} · at most ${many(shape.max_num_seqs, "sequence")}, ${shape.max_num_batched_tokens} tokens a step` : ""}`;
    if (this.state.textContent !== words) this.state.textContent = words;
    if (this.part !== "overview") return;
    for (const card of Object.values(cards)) for (const { draw } of card.swatches) draw();
    this.shownSteps = drawSteps(this.stepCanvas, joinSteps(model.steps, this.perBar), this.cursor);
    if (model.kv) {
      const tallest = this.kvCanvas.clientWidth < NARROW ? KV_TALL_NARROW : KV_TALL;
      this.grid = drawKv(this.kvCanvas, model.kv, tallest, !this.wantsAllKv && isMostlyEmpty(model.kv));
      this.kvFold.hidden = !this.wantsAllKv && !this.grid.bands.some((band) => band.isFolded);
      if (!this.isOnKv) this.kvNote.textContent = this.kvText();
    }
    const series = (buckets, name) => buckets.map((bucket, index) => [WINDOW_S - 1 - index, bucket[name]]);
    const rates = model.throughput(WINDOW_S);
    drawLines(cards.rate.canvas, [{ colour: "decode", values: series(rates, "decode") }, { colour: "prefill", dash: [4, 3], values: series(rates, "prefill") }]);
    const held = model.occupancy(WINDOW_S);
    drawLines(cards.queue.canvas, [{ colour: "queue", dash: [4, 3], values: series(held, "waiting") }, { colour: "decode", values: series(held, "running") }]);
    const now = model.now();
    drawLines(cards.ttft.canvas, [{ colour: "decode", values: model.firstTokens(WINDOW_S).map(([when, wait]) => [(now - when) / 1000, wait]) }], { unit: unitMs, dots: true });
    drawTimeline(cards.timeline.canvas, model.timeline(NUM_TIMELINE), now);
  }

  kvText() {
    const { kv, shape } = this.model;
    const free = kv.num_blocks - kv.used - kv.cached;
    const bins = kv.blocks_per_cell > 1 ? ` One cell is ${kv.blocks_per_cell} blocks.` : "";
    return `${kv.used} of ${kv.num_blocks} blocks in use, ${kv.shared} of them shared; ${kv.cached} cached, ${free} free. A block holds ${many(shape?.block_size ?? 0, "token")}.${bins}`;
  }

  showTables() {
    this.showParts();
    if (!this.isShown || this.isPaused) return;
    const { model, cards } = this;
    const isOpen = (name) => cards[name].details.open;
    const classes = model.queue?.classes ?? [];
    this.queueTable.show(classes.map((row) => [row.priority, row.num_requests, row.num_prompt_tokens, row.num_requests ? ms(row.oldest_wait_s * 1000) : "–", ms(row.estimated_wait_s * 1000)]));
    this.queueNote.textContent = model.queue ? `${many(model.queue.num_in_engine, "request")} with the engine, which takes ${model.queue.capacity} sequences, and as many of batches behind them${model.queue.is_draining ? "; draining" : ""}.` : "";
    if (isOpen("steps")) cards.steps.twin.show(model.steps.slice(-20).reverse().map((step) => [step.id, ms(step.duration), step.prefill, step.decode, step.running, step.preemptions, this.batchText(step)]));
    if (isOpen("kv")) cards.kv.twin.show([...model.holders().map((row) => [row.label, model.requests.get(row.number)?.state ?? "–", row.blocks, row.shared, model.requests.get(row.number)?.owner ?? "–"]), ["cached", "–", model.kv?.cached ?? 0, "–", "–"]]);
    if (isOpen("rate")) cards.rate.twin.show(model.throughput(20).map((bucket, index) => [19 - index, bucket.prefill, bucket.decode]).reverse());
    if (isOpen("queue")) cards.queue.twin.show(model.occupancy(20).map((bucket, index) => [19 - index, bucket.waiting, bucket.running]).reverse());
    if (isOpen("ttft")) cards.ttft.twin.show(model.firstTokens(WINDOW_S).slice(-20).reverse().map(([when, wait]) => [Math.round((model.now() - when) / 1000), ms(wait)]));
    if (isOpen("timeline")) cards.timeline.twin.show(model.timeline(NUM_TIMELINE).reverse().map((row) => this.requestRow(row)));
  }

  requestRow(row) {
    const end = row.ended ?? this.model.now();
    const between = (from, to) => (from === null ? "–" : ms(Math.max((to ?? end) - from, 0)));
    const state = row.state === "ended" ? `ended: ${row.reason}` : row.state;
    return [row.label, row.priority, state, between(row.arrived, row.scheduled), between(row.scheduled, row.first), between(row.first, row.ended), row.prompt, row.cached, row.output, row.owner ?? "–"];
  }

  batchText(step) {
    const shown = step.parts.slice(0, 4).map(([number, count, isPrefill]) => `${brief(this.model.label(number))} ${isPrefill ? "prefill" : "decode"} ${count}`);
    return shown.join(", ") + (step.parts.length > 4 ? `, ${step.parts.length - 4} more` : "");
  }

  stepText(step) {
    const preempted = step.preemptions ? `, ${many(step.preemptions, "preemption")}` : "";
    const which = step.count > 1 ? `Steps ${step.id} to ${step.last}: on average ${ms(step.duration)}` : `Step ${step.id}: ${ms(step.duration)}`;
    return `${which}, ${step.prefill} prefill and ${step.decode} decode tokens, ${step.running} running${preempted}. ${this.batchText(step)}`;
  }

  readStep(step) {
    if (!step) return;
    this.cursor = step.id;
    this.stepNote.textContent = this.stepText(step);
    this.draw();
  }

  pointStep(x) {
    const shown = this.shownSteps ?? [];
    this.readStep(shown[shown.length - Math.ceil((this.stepCanvas.clientWidth - x) / BAR_PX)]);
  }

  walkSteps(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    const shown = this.shownSteps ?? [];
    if (!(event.key in moves) || !shown.length) return;
    event.preventDefault();
    const at = shown.findIndex((step) => step.id === this.cursor);
    this.readStep(shown[Math.min(Math.max((at < 0 ? shown.length : at) + moves[event.key], 0), shown.length - 1)]);
  }

  toggleKv() {
    this.wantsAllKv = !this.wantsAllKv;
    this.kvFold.textContent = this.wantsAllKv ? "Fold free rows" : "Show all blocks";
    this.draw();
  }

  pointKv(x, y) {
    const { kv } = this.model;
    if (!kv || !this.grid) return;
    this.isOnKv = true;
    clearTimeout(this.kvTimer);
    this.kvTimer = setTimeout(() => { this.isOnKv = false; }, TABLE_MS * 3);
    const { index: at, count } = cellAt(this.grid, x, y);
    if (count > 1) {
      this.kvNote.textContent = `Blocks ${at * kv.blocks_per_cell} to ${Math.min((at + count) * kv.blocks_per_cell, kv.num_blocks) - 1}: free.`;
      return;
    }
    const run = kv.runs.find(([first, length]) => at >= first && at < first + length);
    const held = !run ? "free" : run[2] === CACHED ? "cached, free to take" : run[3] > 1 ? `${this.model.label(run[2])} and ${run[3] - 1} more` : this.model.label(run[2]);
    this.kvNote.textContent = `Block ${at * kv.blocks_per_cell}: ${held}.`;
  }
}
