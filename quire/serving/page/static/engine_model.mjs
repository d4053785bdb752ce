// What the feed has told of the engine, and figures made of it.

export const MAX_STEPS = 4096;
const MAX_REQUESTS = 400;
export const CACHED = -1;
export const WINDOW_S = 60;

const STEP = ["id", "started", "duration", "prefill", "decode", "running", "waiting", "free", "cached", "preemptions", "queries", "hits", "parts"];
const RANK = ["rank", "pid", "state", "memory", "share", "wait", "part"];
const TIER = ["tier", "pages", "bytes", "limit", "hits", "saved", "loaded", "dropped", "saving", "loading", "outcomes", "problems"];
const EXPERTS = ["layer", "count", "tokens", "busiest", "ranks", "imbalance", "before", "after", "moved", "failed"];
const REQUEST = ["number", "label", "priority", "state", "prompt", "output", "cached", "arrived", "scheduled", "first", "ended", "reason", "owner"];
const named = (names, row) => Object.fromEntries(names.map((name, index) => [name, row[index]]));

export function quantile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(Math.floor(share * sorted.length), sorted.length - 1)];
}

// Joins steps to bars of several: durations are averaged, all else is added up.
export function joinSteps(steps, perBar) {
  if (perBar === 1) return steps;
  const bars = [];
  for (const step of steps) {
    const id = step.id - (step.id % perBar);
    let bar = bars.at(-1);
    if (bar?.id !== id) {
      bar = { id, last: id, count: 0, total: 0, duration: 0, prefill: 0, decode: 0, running: 0, preemptions: 0, parts: [] };
      bars.push(bar);
    }
    bar.last = step.id;
    bar.count += 1;
    bar.total += step.duration;
    bar.duration = bar.total / bar.count;
    for (const name of ["prefill", "decode", "preemptions"]) bar[name] += step[name];
    bar.running = Math.max(bar.running, step.running);
  }
  return bars;
}

export class EngineModel {
  constructor() {
    this.clear();
  }

  clear() {
    this.steps = [];
    this.requests = new Map();
    this.kv = null;
    this.queue = null;
    this.shape = null;
    this.ranks = []; // processes that share the model
    this.experts = []; // of a mixture model, by layer
    this.tiers = []; // of the KV cache, on host and disk
    this.engine = "unknown";
    this.phase = "unknown";
    this.heardMs = 0;
    this.nowMs = 0;
    this.numPreemptions = 0;
    this.waited = []; // [when, requests in the queue from then on]
  }

  // The feed's time now, as far as it can be told.
  now() {
    return this.nowMs + performance.now() - this.heardMs;
  }

  // Rows of a table: rank, process, state, memory, share of the weights, time in barriers, part of the model.
  rankRows() {
    return this.ranks.map((row) => named(RANK, row)).map(({ rank, pid, state, memory, share, wait, part }) =>
      [rank, pid || "–", state, memory ? `${(memory / 2 ** 20).toFixed(0)} MiB` : "–", `${(share * 100).toFixed(1)} %`, `${(wait / 1000).toFixed(2)} s`, part || "–"]);
  }

  // The experts of a mixture model: {layers: rows of a table, ranks: rows with the tokens of each rank in all layers}.
  expertRows() {
    const layers = this.experts.map((row) => named(EXPERTS, row));
    const ranks = [];
    for (const { ranks: counts } of layers) counts.forEach((count, rank) => { ranks[rank] = (ranks[rank] ?? 0) + count; });
    const total = ranks.reduce((sum, count) => sum + count, 0);
    const percent = (part, whole) => (whole ? `${(100 * part / whole).toFixed(1)} %` : "–");
    return {
      layers: layers.map(({ layer, count, tokens, busiest, ranks: counts, imbalance, before, after, moved, failed }) =>
        [layer, count, tokens, busiest.map(([expert, own]) => `${expert} (${percent(own, tokens)})`).join(", "), counts.length ? imbalance.toFixed(2) : "–",
          before ? `${before.toFixed(2)} → ${after.toFixed(2)}` : "–", failed ? `${moved} (${failed} failed)` : moved]),
      ranks: ranks.map((count, rank) => [rank, count, percent(count, total)]),
    };
  }

  // Rows of a table: tier, pages, memory in use, its limit, pages hit, saved, loaded and dropped, time of saving and loading.
  tierRows() {
    const size = (bytes) => `${(bytes / 2 ** 20).toFixed(0)} MiB`;
    const seconds = (milliseconds) => `${(milliseconds / 1000).toFixed(2)} s`;
    return this.tiers.map((row) => named(TIER, row)).map(({ tier, pages, bytes, limit, hits, saved, loaded, dropped, saving, loading }) =>
      [tier, pages, size(bytes), size(limit), hits, saved, loaded, dropped, seconds(saving), seconds(loading)]);
  }

  // The KV transfers between prefill and decode servers: {role, outcomes: rows, problems: rows}.
  transfers() {
    const peers = this.tiers.map((row) => named(TIER, row)).filter(({ tier }) => tier === "peer");
    const rows = (name) => peers.flatMap((peer) => Object.entries(peer[name]));
    return { role: this.shape?.role ?? "both", outcomes: rows("outcomes").sort((a, b) => b[1] - a[1]), problems: rows("problems") };
  }

  get lastStep() {
    return this.steps.at(-1)?.id ?? -1;
  }

  apply(frame, isSnapshot) {
    if (isSnapshot) this.requests.clear();
    if (frame.engine !== "ready") {
      this.steps = [];
      this.kv = null;
    }
    if (isSnapshot && frame.steps?.length && frame.steps[0][0] <= this.lastStep) this.steps = []; // another engine
    this.nowMs = frame.now_ms;
    this.heardMs = performance.now();
    this.engine = frame.engine;
    this.phase = frame.phase;
    for (const name of ["shape", "queue", "kv", "ranks", "tiers", "experts"]) if (frame[name]) this[name] = frame[name];
    if (frame.queue) this.waited.push([frame.now_ms, frame.queue.classes.reduce((total, row) => total + row.num_requests, 0)]);
    while (this.waited.length > 1 && this.waited[1][0] < frame.now_ms - (WINDOW_S + 2) * 1000) this.waited.shift();
    for (const row of frame.requests ?? []) this.requests.set(row[0], named(REQUEST, row));
    for (const row of frame.steps ?? []) {
      if (row[0] <= this.lastStep) continue; // told twice around a snapshot
      this.steps.push(named(STEP, row));
      this.numPreemptions += row[9];
    }
    if (this.steps.length > MAX_STEPS) this.steps.splice(0, this.steps.length - MAX_STEPS);
    for (const number of [...this.requests.keys()].slice(0, Math.max(this.requests.size - MAX_REQUESTS, 0))) {
      if (this.requests.get(number).ended !== null) this.requests.delete(number);
    }
  }

  label(number) {
    return this.requests.get(number)?.label ?? `#${number}`;
  }

  recentSteps(seconds) {
    const since = this.now() - seconds * 1000;
    let at = this.steps.length;
    while (at > 0 && this.steps[at - 1].started >= since) at -= 1;
    return this.steps.slice(at);
  }

  // Times to first token of the last seconds: [when, ms].
  firstTokens(seconds) {
    const since = this.now() - seconds * 1000;
    return [...this.requests.values()].filter((row) => row.first !== null && row.first >= since).map((row) => [row.first, row.first - row.arrived]);
  }

  // Tokens per second of the latest whole seconds: [{prefill, decode}], oldest first.
  throughput(seconds) {
    const end = Math.floor(this.now() / 1000);
    const buckets = Array.from({ length: seconds }, () => ({ prefill: 0, decode: 0 }));
    for (const step of this.recentSteps(seconds + 2)) {
      const bucket = buckets[Math.floor((step.started + step.duration) / 1000) - end + seconds];
      if (!bucket) continue;
      bucket.prefill += step.prefill;
      bucket.decode += step.decode;
    }
    return buckets;
  }

  // The most that waited before the engine, and ran in it, in each of the latest whole seconds: [{waiting, running}], oldest first.
  occupancy(seconds) {
    const end = Math.floor(this.now() / 1000);
    const buckets = Array.from({ length: seconds }, () => ({ waiting: 0, running: 0 }));
    this.waited.forEach(([when, waiting], index) => {
      const until = this.waited[index + 1]?.[0] ?? this.now();
      for (let second = Math.max(Math.floor(when / 1000), end - seconds); second < end && second * 1000 <= until; second += 1) {
        const bucket = buckets[second - end + seconds];
        bucket.waiting = Math.max(bucket.waiting, waiting);
      }
    });
    for (const step of this.recentSteps(seconds + 2)) {
      const bucket = buckets[Math.floor((step.started + step.duration) / 1000) - end + seconds];
      if (bucket) bucket.running = Math.max(bucket.running, step.running);
    }
    return buckets;
  }

  figures() {
    const steps = this.recentSteps(5);
    const last = this.steps.at(-1);
    const waits = this.firstTokens(WINDOW_S).map(([, ms]) => ms);
    const minute = this.recentSteps(WINDOW_S);
    const sum = (rows, name) => rows.reduce((total, row) => total + row[name], 0);
    const queries = sum(minute, "queries");
    const numBlocks = this.shape?.num_kv_blocks ?? 0;
    const used = this.kv?.used ?? (last ? numBlocks - last.free : 0);
    const isBusy = last !== undefined && (this.queue?.num_in_engine ?? 0) > 0; // after an abort of the last request no step follows
    const live = [...this.requests.values()].filter((row) => row.state !== "ended");
    return {
      running: isBusy ? last.running : 0,
      waiting: live.filter((row) => row.state === "queue").length,
      decodeRate: sum(steps, "decode") / 5,
      prefillRate: sum(steps, "prefill") / 5,
      ttft50: quantile(waits, 0.5),
      ttft95: quantile(waits, 0.95),
      kvShare: numBlocks ? used / numBlocks : 0,
      hitShare: queries ? sum(minute, "hits") / queries : null,
      preemptions: this.numPreemptions,
    };
  }

  // Who holds how many blocks.
  holders() {
    return (this.kv?.holders ?? []).map(([number, blocks, shared]) => ({ number, label: this.label(number), blocks, shared }));
  }

  // The requests of the timeline: live ones and those that ended within the window, in order of arrival.
  timeline(limit) {
    const since = this.now() - WINDOW_S * 1000;
    const rows = [...this.requests.values()].filter((row) => row.ended === null || row.ended >= since);
    return rows.slice(-limit);
  }
}
