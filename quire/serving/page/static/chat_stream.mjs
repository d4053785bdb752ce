// One answer of the chat API: what is sent, and how its stream is read.

import { CUT, Problem, chunks, send } from "./api.mjs";

export const PATH = "/v1/chat/completions";

// A message: role, content; of the model also reasoning, calls [{id, name, arguments, result}], tokens (with probabilities),
// stats, problem (what went wrong), isDone.
export const newAnswer = () => ({ role: "assistant", content: "", reasoning: "", calls: [], tokens: [], stats: {}, problem: null, isDone: false, isAnswered: false });

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
function addChunk(answer, chunk, decoder) {
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

// Reads the stream of a request into an answer; changed is called after each part. Returns what went wrong in words, or "".
export async function stream(answer, body, signal, changed) {
  try {
    await read(answer, body, signal, changed);
  } catch (error) {
    answer.problem = signal.aborted ? "Stopped." : error instanceof Problem ? error.text : CUT;
    if (!signal.aborted && !(error instanceof Problem)) console.error(error);
  }
  answer.isDone = true;
  return answer.problem ?? "";
}

async function read(answer, body, signal, changed) {
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
    changed();
  }
}
