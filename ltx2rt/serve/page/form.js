// The form: a task, what it needs, the size and length, and closed groups with every other field.
// Fields and their groups are those that the server lists; its check says what would be made, and in what time.

import { $, all, ask, inWords, make, plain, say, shortened, shortTime } from "./dom.js";
import { forgetSources, keep, kindOf, onSource, putSources, setSource, showSource, sourceOf, zone } from "./source.js";

const pictures = []; // {file, url} or {file_id}, with frame and strength
const SIZES = ["1536x1024", "1024x1536", "1920x1088", "1088x1920", "1280x704", "704x1280", "768x512", "512x768"]; // the usual one first
const PHOTO = "Animate a photo"; // the pipelines of "Text to video", with the first image in front
const TEXT = "Text to video";
const TITLES = { clip: "Clip", conditioning: "Inputs", guidance: "Guidance", sampling: "Sampling", output: "Output" };
const OWN = ["prompt", "seconds", "num_frames", "width", "height", "half_size", "quality"]; // fields with a place of their own in the form
const CHECK_MS = 500;
const UPLOADS = { video: "Continue a clip", sound: "Sound to video", image: PHOTO }; // where a dropped file goes
let limits;
let sent = () => {};
let checking; // the timer of the next check
let asked = 0; // checks so far: an answer to an earlier one is not shown

const MEANS = { draft: "768 × 512 unless chosen", best: "1920 × 1088 unless chosen" }; // presets that are choices of quality
const named = (quality) => quality in MEANS ? limits.presets[quality] : quality; // the pipeline of a choice of quality
const pipeline = () => limits.pipelines[named($("#pipeline").value)];
const task = () => $("[name=task]:checked").value;
const free = () => "num_frames" in pipeline().fields; // size and length are not those of a file
const able = (one) => !limits.pipelines[one].needs_lora || limits.loras.length; // here, with the LoRAs that the server has
const of = (name) => Object.keys(limits.pipelines).filter((one) => limits.pipelines[one].task === (name === PHOTO ? TEXT : name) && able(one));
const quality = (name) => { // the choices of a pipeline: [value, text]
  const presets = Object.keys(limits.presets).filter((one) => limits.presets[one] === name);
  if (presets.length === 1 && presets[0] !== "draft") return [[name, `${presets[0]} (${name})`]];
  const plain = [name, presets.includes("standard") ? `standard (${name})` : name];
  const other = (one) => presets.includes(one) ? [[one, `${one} (${name}, ${MEANS[one]})`]] : [];
  return [...other("draft"), plain, ...other("best")];
};
const needed = () => pipeline().front.find((name) => name in pipeline().files);

export function fillForm(found, whenSent) {
  [limits, sent] = [found, whenSent];
  $("#prompt").maxLength = limits.prompt_characters;
  const tasks = new Set(Object.values(limits.pipelines).map((one) => one.task));
  for (const name of [TEXT, PHOTO, "Sound to video", "Redo a part", "Continue a clip", "Replace a region", "Restyle a clip", ...tasks]) {
    if (!of(name).length || $(`[name=task][value="${name}"]`)) continue;
    const input = make("input", { type: "radio", name: "task", value: name });
    $("#tasks").append(make("label", {}, input, make("span", { textContent: name })));
  }
  const warm = limits.warm.map((shape) => shape.split(":")[0].split("x").slice(0, 2).join("x"));
  for (const size of new Set([...warm, ...SIZES])) $("#size").append(make("option", { value: size, textContent: size.replace("x", " × ") }));
  $("#size").append(make("option", { value: "other", textContent: "another" }));
  for (const name of limits.loras) {
    const strength = make("input", { type: "number", step: "any", value: 1, dataset: { lora: name } });
    const use = make("input", { type: "checkbox", dataset: { use: name } });
    $("#loras").append(make("div", { className: "row" },
      make("label", {}, use, ` ${name}`), make("label", {}, `Strength of ${name} `, strength)));
  }
  $("#loras").hidden = !limits.loras.length;
  onSource((another) => { if (another) $("#time").replaceChildren(); changed(); });
  const draft = readDraft();
  useDefaults();
  if (draft && typeof draft === "object") useDraft(draft);
}

function useDefaults() {
  let name = limits.default_pipeline ?? Object.keys(limits.pipelines)[0];
  if (limits.warm.length) {
    const [size, warm] = limits.warm[0].split(":");
    const [width, height, frames] = size.split("x");
    $("#size").value = `${width}x${height}`;
    $("#seconds").value = (frames / 24).toFixed(2);
    name = warm;
  }
  choose(limits.pipelines[name].task, name);
}

// Show the fields of a task; name: of a pipeline, its first one by default.
let unplaced = ""; // a sentence on files that were left out, until another file or task is chosen

export function choose(wanted, name = of(wanted)[0]) {
  unplaced = "";
  $(`[name=task][value="${wanted}"]`).checked = true;
  $("#pipeline").replaceChildren(...of(wanted).flatMap(quality).map(([value, textContent]) => make("option", { value, textContent })));
  $("#pipeline").value = name;
  $("#quality").hidden = of(wanted).length < 2;
  $("#summary").hidden = !$("#quality").hidden;
  fillFields();
}

function fillFields() {
  const { fields, files, front, images, summary } = pipeline();
  const before = Object.fromEntries(all("#order [data-field]").map((input) => [input.dataset.field, input.value]));
  for (const place of all("#summary, #quality .hint")) place.textContent = `${inWords(summary)}.`;
  const shown = Object.entries(fields).filter(([name]) => !(free() ? OWN : OWN.slice(0, 2)).includes(name));
  const [ahead, behind] = [true, false].map((is) => shown.filter(([name]) => front.includes(name) === is));
  $("#front").replaceChildren(...Object.keys(files).filter((name) => front.includes(name)).map((name) => zone(name, files[name], name === needed())),
    ...ahead.map(([name, about]) => control(name, about)));
  const open = new Set(all("#groups details[open]").map((one) => one.dataset.group));
  $("#groups").replaceChildren(...Object.entries(TITLES).map(([group, title]) => {
    const body = behind.filter(([, about]) => about.group === group).map(([name, about]) => control(name, about));
    if (group === "conditioning") body.unshift(...Object.keys(files).filter((name) => !front.includes(name)).map((name) => zone(name, files[name], false)));
    if (group === "sampling") body.push(control("n", { type: "integer", description: "number of videos; their seeds follow one another" }));
    return make("details", { dataset: { group }, open: open.has(group), hidden: !body.length }, make("summary", { textContent: title }), ...body);
  }));
  for (const input of all("#order [data-field]")) input.value = before[input.dataset.field] ?? "";
  for (const name of Object.keys(files)) showSource(name);
  $("#pictures").hidden = !images || task() === TEXT;
  $("#sizes").hidden = !("seconds" in fields);
  $("#shape").hidden = !free();
  $("#how-long").textContent = free() ? "Seconds" : "Seconds to add";
  $("#seconds").placeholder = files[needed()] === "sound" ? "as the sound" : free() ? "as the clip" : "4";
  if (needed()) $("#seconds").value = ""; // the file decides, unless a length is typed
  else $("#seconds").value ||= 5;
  $("#time").replaceChildren();
  showPictures();
}

function control(name, { enum: choices, type, items, default: usual, description }) {
  const id = `field-${name}`;
  let input;
  if (choices || type === "boolean") {
    const word = (value) => ({ true: "yes", false: "no" })[value] ?? value;
    input = make("select", { id }, make("option", { value: "", textContent: usual === undefined ? "as usual" : `${word(usual)} (as usual)` }));
    for (const value of choices ?? ["true", "false"]) input.append(make("option", { value, textContent: word(value) }));
  } else if (name.endsWith("prompt") || items) { // of several texts a line each
    input = make("textarea", { id, rows: 2 });
  } else {
    input = make("input", { id, placeholder: usual ?? "", inputMode: ["number", "integer"].includes(type) ? "decimal" : "text" });
  }
  input.dataset.field = name;
  const hint = make("p", { id: `${id}-hint`, className: "hint", textContent: plain(description ?? "") });
  input.setAttribute("aria-describedby", hint.id);
  return make("div", { className: "field" }, make("label", { htmlFor: id, textContent: inWords(name) }), input, hint);
}

// --- pictures -------------------------------------------------------------------------------------------------------

function showPictures() {
  const full = pictures.length >= limits.images;
  $("#pictures > label").hidden = full;
  $("#pictures > label span").textContent = pictures.length ? "Another image or clip, at a later frame" : "Drop a photo or a clip here, or choose one";
  $("#from-picture").hidden = !pictures.length;
  if (!pictures.length && !$("#size").value) $("#size").value = SIZES[0];
  $("#pictures ul").replaceChildren(...pictures.map((picture, n) => {
    const input = (key, more) => make("input", { value: picture[key], ...more, oninput: (e) => { picture[key] = e.target.value.trim(); } });
    const seen = () => moves(picture.file) ? make("video", { src: picture.url, muted: true, controls: true, ariaLabel: picture.file.name, onloadedmetadata: cut })
      : make("img", { src: picture.url, alt: picture.file.name, onload: cut });
    const shown = picture.url ? make("div", { className: "frame" }, seen(), make("i"))
      : make("span", { textContent: "the image of that video" });
    const remove = make("button", { type: "button", textContent: "Remove", ariaLabel: `Remove image ${n + 1}`, onclick: () => { pictures.splice(n, 1); showPictures(); } });
    return make("li", {}, shown, make("p", { className: "hint" }), make("div", { className: "row" },
      make("label", {}, "At frame ", input("frame", { title: "a number, last, 2.5s or 50%" })), make("label", {}, "Strength ", input("strength", { inputMode: "decimal" })), remove));
  }));
  changed();
}

const moves = (file) => file.type.startsWith("video/");

function addPicture(file) {
  if (pictures.length >= limits.images) return false;
  if (!pictures.length) $("#size").value = "";
  pictures.push({ file, url: URL.createObjectURL(file), frame: !pictures.length ? 0 : moves(file) ? "50%" : "last", strength: 1 });
  if (!pipeline().images || task() === TEXT) choose(pipeline().images ? PHOTO : UPLOADS.image, pipeline().images ? $("#pipeline").value : undefined);
  else showPictures();
  return true;
}

let made = null; // width and height of the clip, by the latest check

// Darken what of a picture the clip's shape leaves out.
function cut() {
  if (made) all("#pictures li").forEach((row) => {
    const picture = row.querySelector("img, video");
    const [width, height] = [picture?.naturalWidth ?? picture?.videoWidth, picture?.naturalHeight ?? picture?.videoHeight];
    if (!width) return;
    const scale = Math.max(made.width / width, made.height / height);
    const [x, y] = [made.width / width / scale, made.height / height / scale];
    const inset = (share) => `${50 * (1 - share)}%`;
    Object.assign(row.querySelector("i").style, { left: inset(x), right: inset(x), top: inset(y), bottom: inset(y) });
    const lost = Math.round(100 * (1 - Math.min(x, y)));
    row.querySelector(".hint").textContent = `${width} × ${height}` +
      (lost ? `: ${lost} % of its ${x < y ? "width" : "height"} is cut` : "");
  });
}

// guides: files chosen as pictures; a clip among them is one.
export function addFiles(files, guides = false) {
  const filled = new Set(), left = []; // fields that a file of these has gone to, and names of files that go nowhere
  for (const file of files) {
    const kind = guides && moves(file) ? "image" : kindOf(file);
    const fits = ([one, takes]) => pipeline().front.includes(one) && !filled.has(one) && (takes === kind || (takes === "mask" && kind === "image"));
    const name = Object.entries(pipeline().files).find(fits)?.[0];
    const task = !name && kind !== "image" && !filled.size && of(UPLOADS[kind]).length;
    if (task) choose(UPLOADS[kind]);
    const to = task ? needed() : name;
    if (to) filled.add(to) && setSource(to, { file });
    else if (kind !== "image" || !addPicture(file)) left.push(file.name);
  }
  unplaced = left.length ? `There is no place for ${left.join(", ")}; choose another task, or another file.` : "";
  changed();
}

// --- draft ----------------------------------------------------------------------------------------------------------

// What is typed and chosen stays in this browser, so that a reload or a closed tab loses nothing; files do not.
const inputs = () => all("#order :is(input:not([type=file], [type=radio], [type=range]), textarea, select)").filter((input) => input.id);

function keepDraft() {
  const draft = { task: task(), ...Object.fromEntries(inputs().map((input) => [input.id, input.value])) };
  try { localStorage.setItem("draft", JSON.stringify(draft)); } catch { /* a browser that keeps nothing */ }
}

function readDraft() {
  try { return JSON.parse(localStorage.getItem("draft")); } catch { return null; /* as above, or another program's */ }
}

function useDraft(draft) {
  if (of(draft.task).length) choose(draft.task, of(draft.task).includes(named(draft.pipeline)) ? draft.pipeline : undefined);
  for (const input of inputs()) if (input.id in draft && input.id !== "pipeline") input.value = draft[input.id];
  showPictures();
}

export function clearForm() {
  try { localStorage.removeItem("draft"); } catch { /* as above */ }
  $("#order").reset();
  for (const input of all("#order [data-field]")) input.value = "";
  forgetSources();
  pictures.splice(0);
  useDefaults();
  $("#prompt").focus();
}

// --- checks ---------------------------------------------------------------------------------------------------------

// After each change: sentences about the form before it are gone, and the server is asked again.
export function changed() {
  refuse(unplaced);
  $("#count").textContent = `${$("#prompt").value.length} of ${limits.prompt_characters} characters`;
  $("#sides").hidden = !free() || $("#size").value !== "other";
  keepDraft();
  clearTimeout(checking);
  checking = setTimeout(check, CHECK_MS);
}

async function check() {
  const number = ++asked;
  const missing = lacks();
  $("#time").classList.toggle("old", !missing);
  if (missing) return $("#time").replaceChildren(missing[0]);
  try {
    const { resolved, estimate } = await ask("POST", "v1/videos?check=1", body({ prompt: $("#prompt").value.trim() || "a clip" }));
    if (number !== asked) return;
    keep(resolved);
    pictures.forEach((picture, n) => { picture.file_id = resolved.images[n]?.file_id; });
    const [width, height] = resolved.size.split("x").map(Number);
    made = { width, height };
    cut();
    const frames = resolved.num_frames ? `${resolved.num_frames} frames, ` : "";
    const bound = estimate.basis.startsWith("the device") ? "at least " : "about ";
    const ready = limits.warm.includes(`${resolved.size}x${resolved.num_frames}:${resolved.pipeline}`) ? ", starts at once" : "";
    const time = estimate.seconds === null ? "time unknown until one has run" : bound + shortTime(estimate.seconds);
    const wait = estimate.wait_s ? `, starts in about ${shortTime(estimate.wait_s)}` : "";
    $("#time").replaceChildren(make("b", { textContent: time + wait + ready }), `${width} × ${height}, ${frames}${resolved.seconds.toFixed(2)} s`);
    $("#time").title = estimate.basis;
    $("#time").classList.remove("old");
  } catch (error) {
    if (number !== asked) return;
    const input = refuse(error.message, error.field);
    const open = input && !input.value; // not yet filled in: no fault of the person's
    $("#time").replaceChildren(open ? plain(error.message) : "");
    if (open) refuse("");
  }
}

function refuse(text, field) {
  for (const input of all("#order [aria-invalid]")) input.removeAttribute("aria-invalid");
  $("#problem").textContent = plain(text);
  const input = field && ($(`#order [data-field="${CSS.escape(field)}"]`) ?? $(`#${CSS.escape(field)}`));
  input?.setAttribute("aria-invalid", "true");
  input?.closest("details")?.setAttribute("open", "");
  return input;
}

// What is needed before the server can be asked, in words, and where.
function lacks() {
  const name = needed();
  if (name && !sourceOf(name)) return [`Choose the ${pipeline().files[name]} first.`, `[data-file="${name}"]`];
  if (task() === PHOTO && !pictures.length) return ["Choose a photo first.", "#picture"];
  const typed = (field) => $(`#order [data-field="${field}"]`)?.value;
  if (pipeline().front.includes("mask_box") && !sourceOf("mask") && !typed("mask_box") && !typed("pad")) return ["Draw a rectangle on the picture.", '[data-field="mask_box"]'];
  if (pipeline().needs_lora && !$("[data-use]:checked")) return ["Choose the LoRA that this task is made with.", "[data-use]"];
  return null;
}

function body(more = {}) {
  const form = new FormData();
  const put = (name, value) => value !== "" && form.append(name, value);
  const { fields, files, images } = pipeline();
  put("prompt", more.prompt ?? $("#prompt").value);
  put("pipeline", named($("#pipeline").value));
  if (free() && $("#pipeline").value in MEANS) put("quality", $("#pipeline").value);
  const size = $("#size").value;
  if (free() && size) put("size", size === "other" ? `${$("#width").value}x${$("#height").value}` : size);
  if ("seconds" in fields) put("seconds", $("#seconds").value);
  putSources(form, Object.keys(files));
  const chosen = (name) => $(`#order [data-field="${name}"]`)?.value;
  const guided = !("nag" in fields) || chosen("nag") || chosen("guided") === "true";
  for (const input of all("#order [data-field]")) {
    if (guided || input.dataset.field !== "negative_prompt") put(input.dataset.field, input.value); // else it is not read
  }
  const loras = all("[data-use]:checked").map((use) =>
    ({ name: use.dataset.use, strength: Number($(`[data-lora="${CSS.escape(use.dataset.use)}"]`).value) }));
  if (loras.length) put("loras", JSON.stringify(loras));
  if (images && pictures.length && task() !== TEXT) {
    put("images", JSON.stringify(pictures.map(({ file_id, frame, strength }, n) =>
      ({ ...(file_id ? { file_id } : { file: `image${n}` }), frame, strength }))));
    pictures.forEach(({ file, file_id }, n) => !file_id && form.append(`image${n}`, file));
  }
  return form;
}

export async function send(event) {
  event.preventDefault();
  const missing = $("#prompt").value.trim() || sourceOf("context") ? lacks() : ["Say what the clip shows.", "#prompt"];
  if (missing) {
    refuse(missing[0]);
    $(missing[1]).focus();
  } else {
    await order(body());
  }
}

export async function order(content) {
  $("#send").disabled = true;
  try {
    sent(await ask("POST", "v1/videos", content));
    say("The video is queued.");
  } catch (error) {
    refuse(error.message, error.field)?.focus();
  } finally {
    $("#send").disabled = false;
  }
}

// --- from a video that is there -------------------------------------------------------------------------------------

export function useSettings(video) {
  const { pipeline: name, images, loras, ...clip } = video.x.settings;
  forgetSources();
  pictures.splice(0, pictures.length, ...images);
  choose(images.length && limits.pipelines[name].task === TEXT ? PHOTO : limits.pipelines[name].task, name);
  for (const input of all("#order [data-field]")) {
    const value = clip[input.dataset.field] ?? "";
    input.value = pipeline().fields[input.dataset.field]?.items ? [...value].join("\n") : value;
  }
  $("#prompt").value = clip.prompt;
  if (free()) {
    [$("#width").value, $("#height").value] = [clip.width, clip.height];
    const size = `${clip.width}x${clip.height}`;
    $("#size").value = [...$("#size").options].some((one) => one.value === size) ? size : "other";
    $("#seconds").value = video.x.seconds.toFixed(3);
  }
  for (const use of all("[data-use]")) {
    const lora = loras.find((one) => one.name === use.dataset.use);
    use.checked = Boolean(lora);
    if (lora) $(`[data-lora="${CSS.escape(lora.name)}"]`).value = lora.strength;
  }
  for (const file of Object.keys(pipeline().files)) if (clip[file]) setSource(file, { ids: clip[file] });
  changed();
  $("#prompt").focus();
}

export const again = (video) => order(JSON.stringify({ ...video.x.settings, seed: null }));
export const can = (name) => of(name).length > 0;

// A new clip that starts from this one.
export async function startFrom(video, wanted) {
  const blob = await (await fetch(video.x.urls.video)).blob();
  const file = new File([blob], `${shortened(video.prompt, 40)}.mp4`, { type: "video/mp4" });
  $("#prompt").value = video.prompt;
  if (wanted === PHOTO) {
    pictures.splice(0);
    addPicture(await lastFrame(file));
  } else {
    choose(wanted);
    setSource(needed(), { file });
  }
  if ($("#field-seed")) $("#field-seed").value = "";
  changed();
  $("#order").scrollIntoView({ behavior: "smooth" });
  $("#prompt").focus({ preventScroll: true });
}

async function lastFrame(clip) {
  const player = make("video", { src: URL.createObjectURL(clip), muted: true });
  await new Promise((done, failed) => { player.onloadeddata = done; player.onerror = () => failed(new Error("this browser cannot read the clip")); });
  const seeked = new Promise((done) => { player.onseeked = done; });
  player.currentTime = player.duration;
  await seeked;
  const canvas = make("canvas", { width: player.videoWidth, height: player.videoHeight });
  canvas.getContext("2d").drawImage(player, 0, 0);
  const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
  return new File([blob], `last frame of ${clip.name}.png`, { type: "image/png" });
}
