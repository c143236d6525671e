// The file that a task starts from: dropped or chosen, shown, and the part of it that is to be changed.
// A clip gets two handles for the part's start and end, or a rectangle that is drawn on a frame.

import { $, all, inWords, make } from "./dom.js";

const ACCEPT = { video: "video/*", sound: "audio/*,video/*", mask: "image/*,video/*", context: ".safetensors", latents: ".safetensors" };
const given = new Map(); // field -> {file, url, name} or {ids} of files that the server has
let changed = () => {};

const field = (name) => $(`#order [data-field="${name}"]`);

export const onSource = (call) => { changed = call; };
export const sourceOf = (name) => given.get(name);

export function setSource(name, source) {
  if (source) given.set(name, source.file ? { ...source, name: source.file.name, url: URL.createObjectURL(source.file) } : source);
  else given.delete(name);
  showSource(name);
  changed(true);
}

// The zone for a file. front: what the task is about is shown large, with its part.
export function zone(name, kind, front) {
  const input = make("input", { type: "file", accept: ACCEPT[kind] ?? "video/*", dataset: { file: name } });
  input.addEventListener("change", () => { if (input.files[0]) setSource(name, { file: input.files[0] }); input.value = ""; });
  const words = `${inWords(name)}: drop a ${kind === "mask" ? "picture" : kind} here, or choose one`;
  return make("div", { className: front ? "zone front" : "zone", dataset: { zone: name, kind } },
    make("label", {}, make("span", { textContent: words }), input), make("div", { className: "shown" }));
}

export function showSource(name) {
  const body = $(`[data-zone="${name}"]`);
  if (!body) return;
  const { kind } = body.dataset;
  const source = given.get(name);
  body.classList.toggle("full", Boolean(source));
  const shown = body.querySelector(".shown");
  shown.replaceChildren();
  if (!source) return;
  const remove = make("button", { type: "button", textContent: "Remove", ariaLabel: `Remove ${source.name ?? kind}`, onclick: () => setSource(name, null) });
  const about = make("p", { className: "hint", textContent: source.name ?? `the ${kind} of that video` });
  if (source.url && body.classList.contains("front")) shown.append(...looked(kind, source.url, about));
  shown.append(make("div", { className: "row about" }, about, remove));
}

function looked(kind, url, about) {
  if (kind === "sound") return [make("audio", { src: url, controls: true })];
  if (kind !== "video") return [];
  const player = make("video", { src: url, muted: true, playsInline: true, preload: "auto" });
  player.addEventListener("loadedmetadata", () => {
    about.textContent += `, ${player.videoWidth} × ${player.videoHeight}, ${player.duration.toFixed(2)} s`;
  });
  player.addEventListener("error", () => { player.hidden = true; about.textContent += " (this browser cannot show it; the server may still read it)"; });
  if (field("mask_box")) return rectangle(player);
  if (field("start_time")?.closest("#front")) return handles(player); // else they cut the clip, if they are typed
  player.controls = true;
  return [player];
}

// Seconds of 2.5, 1.5s, 1m30s or 1:30.
const seconds = (text) => text.replace(/[hm]/g, ":").split(":").reduce((sum, part) => 60 * sum + (parseFloat(part) || 0), 0);

const slider = (label) => make("input", { type: "range", min: 0, max: 1, step: 0.01, value: 0, ariaLabel: label });

// Two handles on one line, which follow the fields for start and end, and lead them.
function handles(player) {
  const [start, end] = [slider("start of the part"), slider("end of the part")];
  const fields = [field("start_time"), field("end_time")];
  const line = make("div", { className: "line" }, make("i"), start, end);
  const mark = () => {
    const share = (input) => `${100 * input.value / input.max}%`;
    line.style.setProperty("--from", share(start));
    line.style.setProperty("--to", share(end));
  };
  const lead = (input, at) => {
    if (at === 0 && +start.value >= +end.value) start.value = end.value - 0.04;
    if (at === 1 && +end.value <= +start.value) end.value = +start.value + 0.04;
    fields[at].value = Number(input.value).toFixed(2);
    player.currentTime = input.value;
    mark();
    changed();
  };
  [start, end].forEach((input, at) => input.addEventListener("input", () => lead(input, at)));
  fields.forEach((one, at) => one.addEventListener("input", () => { [start, end][at].value = seconds(one.value); mark(); }));
  player.addEventListener("loadedmetadata", () => {
    start.max = end.max = player.duration.toFixed(2);
    const third = (n) => (n * player.duration / 3).toFixed(2);
    if (!fields[0].value) fields[0].value = third(1);
    if (!fields[1].value) fields[1].value = third(2);
    [start.value, end.value] = fields.map((one) => seconds(one.value));
    mark();
    changed();
  });
  let playing = false;
  const play = make("button", { type: "button", textContent: "Play the part", onclick: () => { player.currentTime = start.value; playing = true; player.play(); } });
  player.addEventListener("timeupdate", () => { if (playing && player.currentTime >= end.value) { playing = false; player.pause(); } });
  return [player, line, play];
}

// A rectangle that is drawn on a frame; the field has its left, top, width and height in the clip's pixels.
function rectangle(player) {
  const box = make("i");
  const frame = make("div", { className: "frame" }, player, box);
  const at = slider("time of the frame");
  const to = field("mask_box");
  at.addEventListener("input", () => { player.currentTime = at.value; });
  const show = () => {
    const [left, top, width, height] = to.value.split(",").map(Number);
    box.hidden = !(width > 0 && height > 0);
    const { videoWidth: wide, videoHeight: high } = player;
    Object.assign(box.style, { left: `${100 * left / wide}%`, top: `${100 * top / high}%`, width: `${100 * width / wide}%`, height: `${100 * height / high}%` });
  };
  to.addEventListener("input", show);
  player.addEventListener("loadedmetadata", () => {
    at.max = player.duration;
    frame.style.width = `min(100%, ${18 * player.videoWidth / player.videoHeight}rem)`;
    show();
  });
  const place = (event) => {
    const { left, top, width, height } = player.getBoundingClientRect();
    const within = (share) => Math.min(Math.max(share, 0), 1);
    return [within((event.clientX - left) / width) * player.videoWidth, within((event.clientY - top) / height) * player.videoHeight];
  };
  let from = null;
  frame.addEventListener("pointerdown", (event) => { from = place(event); frame.setPointerCapture(event.pointerId); event.preventDefault(); });
  frame.addEventListener("pointermove", (event) => {
    if (!from) return;
    const now = place(event);
    const [left, top] = [0, 1].map((i) => Math.round(Math.min(from[i], now[i])));
    const [width, height] = [0, 1].map((i) => Math.round(Math.abs(from[i] - now[i])));
    to.value = `${left},${top},${width},${height}`;
    show();
  });
  frame.addEventListener("pointerup", () => { from = null; changed(); });
  return [make("p", { className: "hint", textContent: "Draw a rectangle around what is to be replaced." }), frame, at];
}

// The kind of a file as the form takes it: image, sound, video, or nothing.
export function kindOf(file) {
  if (["image/png", "image/jpeg", "image/webp", "image/heic"].includes(file.type) || /\.(exr|heic)$/i.test(file.name)) return "image";
  return { audio: "sound", video: "video" }[file.type.split("/")[0]];
}

// What the server has kept is not sent again.
export function keep(resolved) {
  for (const [name, source] of given) source.ids = resolved[name] ?? source.ids;
}

export function putSources(form, names) {
  for (const name of names) {
    const source = given.get(name);
    if (source) form.append(name, source.ids ? JSON.stringify(source.ids) : source.file);
  }
}

export const forgetSources = () => { given.clear(); for (const body of all("[data-zone]")) showSource(body.dataset.zone); };
