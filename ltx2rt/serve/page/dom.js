// Elements, requests and words.

export const $ = (selector) => document.querySelector(selector);
export const all = (selector) => [...document.querySelectorAll(selector)];

export function make(tag, props = {}, ...children) {
  const { dataset, ...rest } = props;
  const element = Object.assign(document.createElement(tag), rest);
  Object.assign(element.dataset, dataset);
  element.append(...children);
  return element;
}

export const say = (text) => { $("#news").textContent = text; };

export const once = (target, event) => new Promise((done) => target.addEventListener(event, done, { once: true }));

// Raises an error with the server's sentence, and the field that it is about.
export async function ask(method, path, body, keepalive = false) {
  const headers = typeof body === "string" ? { "content-type": "application/json" } : {};
  const answer = await fetch(path, { method, body, headers, keepalive });
  const found = await answer.json().catch(() => ({}));
  if (answer.status === 401 && path !== "login") dispatchEvent(new Event("login"));
  if (!answer.ok) {
    const error = new Error(found.error?.message ?? `the server answered ${answer.status}`);
    throw Object.assign(error, { field: found.error?.param });
  }
  return found;
}

export const inWords = (name) => (name[0].toUpperCase() + name.slice(1)).replaceAll(/[_-]/g, " ").replace(/ path$/, "");

// A sentence about flags and fields in the words of the form.
export const plain = (text) => text
  .replace(/^[a-z]+(_[a-z0-9]+)*(?=:)/, inWords)
  .replace(/--([a-z][a-z0-9-]*)/g, (_, name) => `“${inWords(name)}”`);

export const shortTime = (seconds) => seconds < 90 ? `${Math.max(1, Math.round(seconds))} s`
  : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;

export const shortened = (text, most) => text.length > most ? `${text.slice(0, most)}…` : text;
