// Elements out of plain values. Text always becomes text nodes; nothing here reads markup.

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if ((name === "value" && tag !== "option") || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function button(label, onclick, props = {}) {
  return h("button", { type: "button", ...props, onclick }, label);
}

let numIds = 0;
export const newId = (prefix) => `${prefix}-${++numIds}`;

export function replace(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without https, or without permission, there is only the old way.
    const area = h("textarea", { class: "offscreen", "aria-hidden": "true", value: text });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

export function copyButton(textOf) {
  const element = button("Copy", async () => {
    element.textContent = (await copyText(textOf())) ? "Copied" : "Not copied";
    setTimeout(() => { element.textContent = "Copy"; }, 1500);
  }, { class: "quiet" });
  return element;
}

// Runs work at most once a frame, and only the latest asked for.
export function perFrame(work) {
  let isAsked = false;
  return () => {
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => { isAsked = false; work(); });
  };
}

const calm = matchMedia("(prefers-reduced-motion: reduce)");
export const wantsCalm = () => calm.matches;
export const onCalmChange = (listener) => calm.addEventListener("change", listener);
