// Completion: a text that can be edited, its tokens shaded by probability, and other ways it could have gone on.

import { CUT, Problem, chunks, getJson, send, withModel } from "./api.mjs";
import { button, copyButton, h, newId, perFrame } from "./dom.mjs";
import { curlText, statsText } from "./messages.mjs";
import { ParameterPanel, checkbox, sidePanel } from "./params.mjs";
import { TokenText, legend } from "./tokens.mjs";

const PATH = "/v1/completions";
const NUM_TOP = 10;
const DEFAULT_TOKENS = 64;
const ID = /^token_id:(\d+)$/;
const idOf = (name) => Number(ID.exec(name)?.[1] ?? Number.NaN);

// What is known of token ids, asked for once.
const known = new Map();
async function learn(ids) {
  const missing = ids.filter((id) => !known.has(id));
  if (missing.length) for (const fact of await getJson(withModel(`/ui/tokens?ids=${missing.join(",")}`))) known.set(fact.id, fact);
}

// Fills in the texts and bytes of a token and its rivals; true where there was something to fill in.
async function complete(token) {
  if (token.id === undefined || token.isComplete) return false;
  try {
    await learn([token.id, ...token.top.map((other) => other.id)]);
  } catch {
    return false; // the ids stand there; the next look asks again
  }
  token.isComplete = true;
  Object.assign(token, { label: known.get(token.id).text, bytes: known.get(token.id).bytes });
  for (const other of token.top) Object.assign(other, { text: known.get(other.id).text, bytes: known.get(other.id).bytes });
  return true;
}

// Collects the tokens of one stream. Offsets count code points of the stream's text.
export class TokenReader {
  constructor() {
    this.points = [];
    this.tokens = [];
  }

  add({ text, logprobs }) {
    this.points.push(...text);
    const from = Math.max(this.tokens.length - 1, 0);
    (logprobs?.tokens ?? []).forEach((name, index) => {
      const top = Object.entries(logprobs.top_logprobs?.[index] ?? {}).map(([other, logprob]) => ({ id: idOf(other), text: other, logprob }));
      const id = idOf(name);
      this.tokens.push({ id, ids: [id], offset: logprobs.text_offset[index], logprob: logprobs.token_logprobs[index], top: top.sort((a, b) => b.logprob - a.logprob) });
    });
    for (let index = from; index < this.tokens.length; index += 1) {
      const end = this.tokens[index + 1]?.offset ?? this.points.length;
      this.tokens[index].text = this.points.slice(this.tokens[index].offset, end).join("");
    }
  }
}

export class CompletionView {
  constructor(root, say) {
    this.say = say;
    this.model = null;
    this.stopper = null;
    this.entries = []; // {text, ids, logprob, top}: all that stands there; empty while it is edited text alone
    this.render = perFrame(() => this.tokens.show(this.entries));
    this.build(root);
  }

  build(root) {
    this.input = h("textarea", { id: newId("text"), rows: 12, class: "document", placeholder: "Once upon a time" });
    this.input.addEventListener("input", () => { this.entries = []; });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.run();
    });
    this.tokens = new TokenText("The text by tokens", { complete, take: (at, other) => this.takeToken(at, other) });
    this.tokens.element.classList.add("document");
    this.tokens.element.hidden = true;
    this.stats = h("span", { class: "stats dim" });
    this.go = button("Continue", () => this.run(), { class: "primary", "aria-keyshortcuts": "Control+Enter" });
    this.stopButton = button("Stop", () => this.stop(), { class: "stop", hidden: true, "aria-keyshortcuts": "Escape" });
    this.editButton = button("Edit text", () => this.showEditor(true), { class: "quiet", hidden: true });
    this.tokensButton = button("Show tokens", () => this.showEditor(false), { class: "quiet", hidden: true });
    const clear = button("Clear", () => this.clear(), { class: "quiet" });
    const curl = copyButton(() => this.curl ?? "");
    curl.textContent = "curl";
    curl.setAttribute("aria-label", "Copy the last request as a curl command");
    this.problem = h("p", { class: "problem", hidden: true });
    const column = h("div", { class: "main-col" },
      h("label", { for: this.input.id, class: "label" }, "Text"), this.input, this.tokens.element, this.problem,
      h("div", { class: "row" }, this.stats, this.editButton, this.tokensButton, curl, clear, this.stopButton, this.go),
      h("p", { class: "hint dim" }, "Ctrl+Enter continues, Esc stops. In the token view the arrow keys walk, Enter opens the likely tokens, and the one chosen there replaces the token and goes on."), legend());
    root.append(h("div", { class: "split" }, column, this.side()));
    root.addEventListener("keydown", (event) => { if (event.key === "Escape") this.stop(); });
  }

  side() {
    this.params = new ParameterPanel(DEFAULT_TOKENS);
    this.scores = checkbox("Score my text too", { hint: "with the probability of every token that stands there already" });
    return sidePanel("Settings", this.scores.element, this.params.element);
  }

  onModel(model) {
    this.model = model;
    this.params.showDefaults({ ...model.defaults, max_tokens: undefined });
  }

  show(takesFocus) {
    if (takesFocus && !this.input.hidden) this.input.focus();
  }

  hide() {}

  get text() {
    return this.entries.length ? this.entries.map((entry) => entry.text).join("") : this.input.value;
  }

  showEditor(isEditing) {
    if (isEditing) this.input.value = this.text;
    this.input.hidden = !isEditing;
    this.tokens.element.hidden = isEditing;
    this.editButton.hidden = isEditing;
    this.tokensButton.hidden = !isEditing || !this.entries.length;
    if (isEditing) this.input.focus();
  }

  clear() {
    this.stop();
    this.entries = [];
    this.stats.textContent = "";
    this.input.value = "";
    this.showEditor(true);
  }

  stop() {
    this.stopper?.abort();
  }

  async takeToken(at, other) {
    this.stop();
    const replaced = this.entries[at];
    await learn([other.id]);
    const { bytes } = known.get(other.id);
    const text = new TextDecoder().decode(new Uint8Array(bytes));
    this.entries = [...this.entries.slice(0, at), { ...replaced, id: other.id, ids: [other.id], text, label: other.text, bytes, logprob: other.logprob }];
    await this.run();
    this.tokens.focusAt(at);
  }

  body() {
    const params = this.params.values();
    const isText = !this.entries.length;
    return {
      model: this.model.name,
      prompt: isText ? this.input.value : this.entries.flatMap((entry) => entry.ids),
      max_tokens: DEFAULT_TOKENS,
      ...params,
      stream: true,
      stream_options: { include_usage: true },
      logprobs: Math.min(NUM_TOP, this.model.max_logprobs),
      return_token_ids: true,
      return_tokens_as_token_ids: true,
      ...(isText && this.scores.input.checked && { echo: true }),
    };
  }

  async run() {
    let body;
    try {
      if (!this.model) throw new Error("The model is not there yet; try again in a moment.");
      if (!this.text) throw new Error("Write something first: the model continues a text.");
      body = this.body();
    } catch (error) {
      this.say(error.message);
      return;
    }
    this.curl = curlText(PATH, body);
    this.stop();
    const stopper = new AbortController();
    this.begin(stopper);
    let problem = null;
    try {
      await this.read(body, stopper);
    } catch (error) {
      problem = stopper.signal.aborted ? "Stopped." : error instanceof Problem ? error.text : CUT;
      if (!stopper.signal.aborted && !(error instanceof Problem)) console.error(error);
    }
    if (this.stopper !== stopper) return; // another one has begun
    this.begin(null);
    this.problem.hidden = problem === null;
    this.problem.textContent = problem ?? "";
    this.say(problem ?? "");
    this.tokens.show(this.entries);
  }

  begin(stopper) {
    const [from, to] = stopper === null ? [this.stopButton, this.go] : [this.go, this.stopButton];
    const hadFocus = document.activeElement === from;
    this.stopper = stopper;
    this.stopButton.hidden = stopper === null;
    this.go.disabled = stopper !== null;
    if (hadFocus) to.focus(); // so that Escape reaches this view
    this.tokens.element.setAttribute("aria-busy", String(stopper !== null));
    if (stopper === null) return;
    this.problem.hidden = true;
    this.say("Continuing …");
  }

  async read(body, stopper) {
    const began = performance.now();
    const stats = {};
    const reader = new TokenReader();
    // Without scores the given text is one entry; its token ids come with the first chunk.
    let before = this.entries.length ? this.entries : body.echo ? [] : [{ text: body.prompt, ids: [], logprob: null, top: [] }];
    let first = null;
    let last = began;
    const response = await send(PATH, { body, signal: stopper.signal });
    for await (const chunk of chunks(response)) {
      if (this.stopper !== stopper) return;
      const choice = chunk.choices?.[0];
      if (chunk.usage) Object.assign(stats, { numTokens: chunk.usage.completion_tokens, numPrompt: chunk.usage.prompt_tokens, numCached: chunk.usage.prompt_tokens_details?.cached_tokens ?? 0 });
      if (choice) {
        if (choice.prompt_token_ids && before.length === 1 && !before[0].ids.length) before = [{ ...before[0], ids: choice.prompt_token_ids }];
        reader.add(choice);
        if (choice.token_ids?.length) {
          last = performance.now();
          first ??= last;
        }
        if (choice.finish_reason) stats.finish = choice.finish_reason;
        // The end of sequence is not part of the text, and nothing is to follow it.
        while (choice.finish_reason === "stop" && reader.tokens.length && !reader.tokens.at(-1).text) reader.tokens.pop();
        this.entries = [...before, ...reader.tokens];
        if (this.tokens.element.hidden && this.entries.length) this.showEditor(false);
        this.render();
      }
      if (first !== null) stats.ttftMs = first - began;
      if (stats.numTokens > 1 && last > first) stats.perSecond = ((stats.numTokens - 1) / (last - first)) * 1000;
      this.stats.textContent = statsText(stats);
    }
  }
}
