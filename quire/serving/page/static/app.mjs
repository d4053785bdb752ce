// The page: which view is shown, the key, the model.

import { Problem, chooseModel, getJson, onKeyNeeded, storeKey, storedKey, withModel } from "./api.mjs";
import { BatchesView } from "./batches.mjs";
import { ChatView } from "./chat.mjs";
import { CompareView } from "./compare.mjs";
import { CompletionView } from "./completion.mjs";
import { h, replace } from "./dom.mjs";
import { EngineView } from "./engine.mjs";
import { RouterView } from "./router.mjs";
import { hideCard } from "./tokens.mjs";

const STATUS_AGAIN_MS = 2000;
const MODEL = "quire-model";
const isRouter = document.documentElement.dataset.site === "router"; // which has backends instead of an engine
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
  compare: new CompareView(byId("view-compare"), say),
  completion: new CompletionView(byId("view-completion"), say),
  batches: new BatchesView(byId("view-batches"), say),
  ...(isRouter ? { router: new RouterView(byId("view-router"), say) } : { engine: new EngineView(byId("view-engine"), say) }),
};
for (const link of document.querySelectorAll(".top .tabs a")) link.hidden = !(link.hash.slice(1) in views);

function route(isFirst) {
  const [asked, part] = location.hash.slice(1).split("/");
  const name = Object.hasOwn(views, asked) ? asked : "chat";
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
  views[name].show(!isFirst, part);
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the fragment names the view
  byId("main").focus();
});
addEventListener("hashchange", () => route(false));
route(true);

// The models of a router: one is chosen in the head of the page. Servers of other kinds do not say what theirs can do.
async function chosenModel() {
  const { data } = await getJson("/v1/models");
  if (!data.length) throw new Problem("no backend has said yet which model it serves", { status: 503 });
  const names = data.map(({ id }) => id);
  const kept = sessionStorage.getItem(MODEL);
  const name = names.includes(kept) ? kept : names[0];
  const pick = byId("model-pick");
  replace(pick, names.map((one) => h("option", { value: one }, one)));
  pick.value = name;
  pick.hidden = names.length < 2;
  byId("model").hidden = !pick.hidden;
  chooseModel(name);
  try {
    return { ...(await getJson(withModel("/ui/model"))), name };
  } catch (problem) {
    if (problem.status !== 404) throw problem;
    return { name, max_logprobs: 5, defaults: {}, has_chat: true, has_tools: true, has_reasoning: false };
  }
}

byId("model-pick").addEventListener("change", (event) => {
  sessionStorage.setItem(MODEL, event.target.value);
  location.reload(); // nothing of the model before may stay
});

// The model, as soon as it is loaded.
async function loadModel() {
  try {
    const model = await (isRouter ? chosenModel() : getJson("/ui/model"));
    byId("model").textContent = model.name;
    for (const view of Object.values(views)) view.onModel?.(model);
    say("");
  } catch (problem) {
    say(problem.text ?? String(problem.message));
    if (problem.status === 503 || problem.status === 0) setTimeout(loadModel, STATUS_AGAIN_MS);
  }
}
loadModel();
