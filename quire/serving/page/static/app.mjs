// The page: which view is shown, the key, the model.

import { getJson, onKeyNeeded, storeKey, storedKey } from "./api.mjs";
import { BatchesView } from "./batches.mjs";
import { ChatView } from "./chat.mjs";
import { CompletionView } from "./completion.mjs";
import { EngineView } from "./engine.mjs";
import { hideCard } from "./tokens.mjs";

const STATUS_AGAIN_MS = 2000;
const byId = (id) => document.getElementById(id);

const statusLine = byId("status");
export function say(text) {
  statusLine.textContent = text;
}

// The key. All requests that fail for want of one wait for the same dialog.
let asking = null;
function askForKey(complaint, rejected) {
  if (storedKey() !== (rejected ?? "")) return Promise.resolve(true); // given while the request was under way
  asking ??= openKeyDialog(complaint).finally(() => { asking = null; });
  return asking;
}

function openKeyDialog(complaint) {
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  input.value = "";
  if (complaint) byId("key-text").textContent = `The server refused the key: ${complaint}. It stays in this tab and is forgotten when the tab is closed.`;
  dialog.returnValue = "";
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const key = input.value.trim();
      input.value = "";
      byId("key-button").hidden = false;
      if (dialog.returnValue !== "use" || !key) return resolve(false);
      storeKey(key);
      resolve(true);
    }, { once: true });
  });
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("key-dialog").close("use");
});
byId("key-forget").addEventListener("click", () => {
  storeKey("");
  byId("key-dialog").close("");
  say("The key is forgotten.");
});
byId("key-button").addEventListener("click", async () => {
  if (await openKeyDialog(null)) loadModel();
});
byId("key-button").hidden = !storedKey();
onKeyNeeded(askForKey);

// The views.
const views = {
  chat: new ChatView(byId("view-chat"), say),
  completion: new CompletionView(byId("view-completion"), say),
  batches: new BatchesView(byId("view-batches"), say),
  engine: new EngineView(byId("view-engine"), say),
};

function route(isFirst) {
  const name = location.hash.slice(1) in views ? location.hash.slice(1) : "chat";
  hideCard();
  for (const [other, view] of Object.entries(views)) {
    const isShown = other === name;
    byId(`view-${other}`).hidden = !isShown;
    const link = document.querySelector(`.tabs a[href="#${other}"]`);
    if (isShown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    if (!isShown) view.hide();
  }
  document.title = `${name[0].toUpperCase()}${name.slice(1)} · quire`;
  views[name].show(!isFirst);
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the fragment names the view
  byId("main").focus();
});
addEventListener("hashchange", () => route(false));
route(true);

// The model, as soon as it is loaded.
async function loadModel() {
  try {
    const model = await getJson("/ui/model");
    byId("model").textContent = model.name;
    for (const view of Object.values(views)) view.onModel?.(model);
    say("");
  } catch (problem) {
    say(problem.text ?? String(problem.message));
    if (problem.status === 503 || problem.status === 0) setTimeout(loadModel, STATUS_AGAIN_MS);
  }
}
loadModel();
