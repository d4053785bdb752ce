// Small files of requests for the Batches page, one for each route.

const SYSTEM = { role: "system", content: "Answer in one sentence." };

const chat = (text) => ({ messages: [SYSTEM, { role: "user", content: text }], max_completion_tokens: 64 });
const completion = (prompt) => ({ prompt, max_tokens: 32 });
const response = (input) => ({ input, max_output_tokens: 64 });
const embedding = (input) => ({ input });

const BODIES = {
  "/v1/chat/completions": ["Why is the sky blue?", "What is a KV cache?", "Name three rivers."].map(chat),
  "/v1/completions": ["Once upon a time", "The lion said to the mouse", "Far away in the forest"].map(completion),
  "/v1/responses": ["Why is the sky blue?", "What is a KV cache?", "Name three rivers."].map(response),
  "/v1/embeddings": ["The lion and the mouse", "The fox and the grapes", "The ant and the grasshopper"].map(embedding),
};

export const ENDPOINTS = Object.keys(BODIES);

// Returns the lines of an example as JSON.
export function exampleOf(endpoint, model) {
  const lines = BODIES[endpoint].map((body, index) => ({ custom_id: `example-${index + 1}`, method: "POST", url: endpoint, body: { model, ...body } }));
  return lines.map((line) => `${JSON.stringify(line)}\n`).join("");
}
