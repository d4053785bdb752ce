// Batches: start one with a file of requests, see how far each is, cancel, fetch what came out.

import { getJson, send } from "./api.mjs";
import { ENDPOINTS, exampleOf } from "./batch_examples.mjs";
import { button, copyButton, h, newId, replace } from "./dom.mjs";
import { Poller } from "./poller.mjs";

const AGAIN_MS = 2000;
const NUM_SHOWN = 50;
const ENDED = new Set(["completed", "failed", "expired", "cancelled"]);
const HEAD = ["Batch", "Route", "State", "Lines", "Started", ""];

const when = (seconds) => new Date(seconds * 1000).toLocaleString();

function save(blob, name) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

export class BatchesView {
  constructor(root, say) {
    this.say = say;
    this.model = null;
    this.poller = new Poller((signal) => this.update(signal), AGAIN_MS);
    this.rows = new Map(); // id -> {element, key}; a row is made anew only when it changed, so that the focus stays
    this.build(root);
  }

  build(root) {
    this.file = h("input", { id: newId("file"), type: "file", accept: ".jsonl,application/jsonl,application/json,text/plain", required: true });
    this.endpoint = h("select", { id: newId("endpoint") }, ENDPOINTS.map((path) => h("option", { value: path }, path)));
    this.startButton = button("Start", null, { type: "submit", class: "primary" });
    const form = h("form", { class: "row batch-form", "aria-label": "New batch" },
      h("label", { for: this.file.id }, "File of requests"), this.file, h("label", { for: this.endpoint.id }, "Route"), this.endpoint, this.startButton);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.start(this.file.files[0]);
    });
    this.note = h("p", { class: "note", role: "status" });
    this.endpoint.addEventListener("change", () => this.showExample());
    this.body = h("tbody");
    const table = h("table", {}, h("caption", {}, "Batches of this key, the newest first"), h("thead", {}, h("tr", {}, HEAD.map((name) => h("th", { scope: "col" }, name)))), this.body);
    root.append(h("section", { class: "card wide" }, h("h2", {}, "New batch"), form, this.examples(), this.note), h("section", { class: "card wide" }, h("h2", {}, "Batches"), h("div", { class: "scroll" }, table)));
  }

  examples() {
    this.example = h("pre", { tabindex: "0", "aria-label": "Lines of the example" });
    this.exampleButton = button("Start the example", () => this.start(this.exampleFile()), { disabled: true });
    const buttons = h("div", { class: "row" }, this.exampleButton, button("Download", () => save(this.exampleFile(), "example.jsonl"), { class: "quiet" }), copyButton(() => this.example.textContent));
    return h("details", { class: "examples" }, h("summary", {}, "Example for this route"),
      h("p", { class: "note" }, "Each line is one request. The answers are found by custom_id; they may come in another order."), h("div", { class: "code" }, this.example), buttons);
  }

  exampleFile() {
    return new File([this.example.textContent], "example.jsonl", { type: "application/jsonl" });
  }

  showExample() {
    this.example.textContent = this.model ? exampleOf(this.endpoint.value, this.model.name) : "";
    this.exampleButton.disabled = this.model === null;
  }

  onModel(model) {
    this.model = model;
    this.showExample();
  }

  show(takesFocus) {
    if (takesFocus) this.file.focus();
    this.poller.show();
  }

  hide() {
    this.poller.hide();
  }

  async update(signal) {
    try {
      this.list((await getJson(`/v1/batches?limit=${NUM_SHOWN}`, { signal })).data);
    } catch (problem) {
      if (problem.name === "AbortError") throw problem;
      this.say(problem.text ?? String(problem.message));
    }
  }

  list(batches) {
    const rows = batches.map((batch) => {
      const key = JSON.stringify(batch);
      const known = this.rows.get(batch.id);
      return [batch.id, known?.key === key ? known : { key, element: this.row(batch) }];
    });
    const isSame = rows.length === this.rows.size && rows.every(([id, row]) => this.rows.get(id) === row);
    this.rows = new Map(rows);
    if (!isSame) replace(this.body, rows.map(([, row]) => row.element));
    if (!rows.length) replace(this.body, h("tr", {}, h("td", { colspan: String(HEAD.length), class: "dim" }, "None yet.")));
  }

  row(batch) {
    const { total, completed, failed } = batch.request_counts;
    const done = completed + failed;
    const errors = (batch.errors?.data ?? []).slice(0, 3).map((error) => h("div", { class: "dim" }, error.line ? `line ${error.line}: ${error.message}` : error.message));
    const progress = total ? h("progress", { max: String(total), value: String(done), "aria-label": `${done} of ${total} lines done` }) : null;
    const counts = total ? ` ${done} of ${total}${failed ? `, ${failed} failed` : ""}` : "–";
    const actions = [
      !ENDED.has(batch.status) && button("Cancel", (event) => this.cancel(batch.id, event.currentTarget), { "aria-label": `Cancel ${batch.id}`, disabled: ["cancelling", "finalizing"].includes(batch.status) }),
      batch.output_file_id && button("Answers", () => this.download(batch.output_file_id, `${batch.id}_output.jsonl`), { class: "quiet", "aria-label": `Answers of ${batch.id}` }),
      batch.error_file_id && button("Errors", () => this.download(batch.error_file_id, `${batch.id}_error.jsonl`), { class: "quiet", "aria-label": `Errors of ${batch.id}` }),
    ];
    return h("tr", { id: batch.id }, h("th", { scope: "row" }, batch.id.slice(0, 14)), h("td", {}, batch.endpoint), h("td", {}, batch.status.replaceAll("_", " "), errors), h("td", {}, progress, counts), h("td", {}, when(batch.created_at)), h("td", {}, actions));
  }

  async start(file) {
    this.startButton.disabled = this.exampleButton.disabled = true;
    this.note.textContent = `Uploading ${file.name} …`;
    try {
      const form = new FormData();
      form.append("purpose", "batch");
      form.append("file", file);
      const { id } = await (await send("/v1/files", { body: form })).json();
      const batch = await (await send("/v1/batches", { body: { input_file_id: id, endpoint: this.endpoint.value, completion_window: "24h" } })).json();
      this.note.textContent = `Started ${batch.id}.`;
      this.file.value = "";
      this.poller.restart();
    } catch (problem) {
      this.note.textContent = problem.text ?? String(problem.message);
    } finally {
      this.startButton.disabled = this.exampleButton.disabled = false;
    }
  }

  async cancel(id, pressed) {
    pressed.disabled = true;
    try {
      await send(`/v1/batches/${id}/cancel`, { body: {} });
      this.note.textContent = `Cancelling ${id}.`;
    } catch (problem) {
      this.note.textContent = problem.text ?? String(problem.message);
      pressed.disabled = false;
    }
    this.poller.restart();
  }

  // The key goes into a header, which a plain link could not send.
  async download(id, name) {
    try {
      save(await (await send(`/v1/files/${id}/content`)).blob(), name);
    } catch (problem) {
      this.note.textContent = problem.text ?? String(problem.message);
    }
  }
}
