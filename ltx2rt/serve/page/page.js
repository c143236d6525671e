// The page of `ltx2rt serve`. The server is the only state: what is shown comes from its lists and its event stream.
// Text of a job is set as text, never as HTML.

const $ = (selector) => document.querySelector(selector);
const jobs = new Map(); // id -> {video, row}
const mine = new Set(); // ids that this page has sent: shown when they are done
const pictures = []; // {file or file_id, frame, strength}
let files = {}; // of the settings in use: by field, [{file_id}]
const SIZES = ["768x512", "512x768", "1280x704", "704x1280"];
const OWN = ["prompt", "width", "height", "num_frames", "seconds", "fps", "seed"]; // fields with a place of their own in the form
let limits;
let oldest = null;
let followed = null; // the id of the clip that plays while it is made
let awaited = null; // the id of the clip whose pictures are shown until it is done
const deleted = new Map(); // id -> timer: what is deleted unless that is undone
const UNDO_MS = 6000;
const EXAMPLE = "A red fox trots through fresh snow at dawn, its paws crunching softly, wind in the pines";

function make(tag, props = {}, ...children) {
  const element = Object.assign(document.createElement(tag), props);
  element.append(...children);
  return element;
}

async function ask(method, path, body, keepalive = false) {
  const headers = typeof body === "string" ? { "content-type": "application/json" } : {};
  const answer = await fetch(path, { method, body, headers, keepalive });
  const found = await answer.json().catch(() => ({}));
  if (answer.status === 401 && path !== "login") showLogin();
  if (!answer.ok) throw new Error(found.error?.message ?? `the server answered ${answer.status}`);
  return found;
}

// --- the form -------------------------------------------------------------------------------------------------------

const fields = () => limits.pipelines[$("#pipeline").value].fields;
const numFrames = () => Math.max(0, Math.round(($("#seconds").value * $("#fps").value - 1) / limits.frames.step)) * limits.frames.step + 1;
const warmKey = () => `${$("#width").value}x${$("#height").value}x${numFrames()}:${$("#pipeline").value}`;

function fillForm() {
  for (const [name, about] of Object.entries(limits.pipelines)) {
    $("#pipeline").append(make("option", { value: name, textContent: name, title: about.summary }));
  }
  const warm = limits.warm.map((shape) => shape.split(":")[0].split("x"));
  const sizes = new Set([...warm.map(([width, height]) => `${width}x${height}`), ...SIZES]);
  for (const size of sizes) $("#preset").append(make("option", { value: size, textContent: size.replace("x", " × ") }));
  $("#preset").append(make("option", { value: "", textContent: "other" }));
  for (const name of limits.loras) {
    const strength = make("input", { type: "number", step: "any", value: 1 });
    strength.dataset.lora = name;
    const use = make("input", { type: "checkbox" });
    use.dataset.use = name;
    $("#loras").append(make("div", { className: "row" },
      make("label", {}, use, ` ${name}`), make("label", {}, `strength of ${name} `, strength)));
  }
  $("#loras").hidden = !limits.loras.length;
  useDefaults();
  fillMore();
  useDraft();
}

function useDefaults() {
  $("#pipeline").value = limits.default_pipeline ?? Object.keys(limits.pipelines)[0];
  if (limits.warm.length) {
    const [size, pipeline] = limits.warm[0].split(":");
    $("#seconds").value = (size.split("x")[2] / $("#fps").value).toFixed(2);
    $("#pipeline").value = pipeline;
  }
  usePreset();
}

function fillMore() {
  const body = $("#more div");
  const before = Object.fromEntries([...body.querySelectorAll("[data-field]")].map((input) => [input.dataset.field, input.value]));
  body.replaceChildren();
  for (const [name, about] of Object.entries(fields())) {
    if (OWN.includes(name)) continue;
    let input;
    if (about.enum || about.type === "boolean") {
      input = make("select", {}, make("option", { value: "", textContent: "as usual" }));
      for (const value of about.enum ?? ["true", "false"]) input.append(make("option", { value, textContent: value }));
    } else if (name.endsWith("prompt") || about.items) { // of several texts a line each
      input = make("textarea", { rows: 2 });
    } else {
      input = make("input", { placeholder: about.default ?? "" });
    }
    input.dataset.field = name;
    input.value = before[name] ?? "";
    body.append(make("label", {}, `${inWords(name)} `, input));
    if (about.description) body.append(make("p", { className: "hint", textContent: about.description }));
  }
  const several = make("input", { type: "number", min: 1, max: limits.videos.max, placeholder: limits.videos.multiple_of });
  several.dataset.field = "n";
  several.value = before.n ?? "";
  body.append(make("label", {}, "Number of videos ", several));
  body.append(make("p", { className: "hint", textContent: "their seeds follow one another" }));
  $("#files").replaceChildren(...Object.entries(limits.pipelines[$("#pipeline").value].files).map(([name, kind]) => {
    const input = make("input", { type: "file", accept: { sound: "audio/*,video/*", mask: "image/*,video/*" }[kind] ?? "video/*" });
    input.dataset.file = name;
    const kept = files[name] ? make("span", { className: "hint", textContent: `the ${kind} of that video, unless another is chosen` }) : "";
    return make("label", {}, `${inWords(name.replace("_path", ""))} `, input, kept);
  }));
  for (const name of ["width", "height", "seconds", "fps"]) $(`#${name}`).disabled = !("num_frames" in fields());
  check();
}

const inWords = (name) => (name[0].toUpperCase() + name.slice(1)).replaceAll("_", " ");

// What is typed and chosen stays in this browser, so that a reload or a closed tab loses nothing; files do not.
const inputs = () => [...document.querySelectorAll("#order :is(input:not([type=file]), textarea, select)")]
  .filter((input) => input.id || input.dataset.field);
const nameOf = (input) => input.id || `field ${input.dataset.field}`;

function keepDraft() {
  const draft = Object.fromEntries(inputs().map((input) => [nameOf(input), input.value]));
  try { localStorage.setItem("draft", JSON.stringify(draft)); } catch { /* a browser that keeps nothing */ }
}

function useDraft() {
  let draft;
  try { draft = JSON.parse(localStorage.getItem("draft")); } catch { /* as above, or another program's */ }
  if (!draft || typeof draft !== "object") return;
  if (draft.pipeline in limits.pipelines) $("#pipeline").value = draft.pipeline;
  fillMore();
  for (const input of inputs()) if (nameOf(input) in draft && input.id !== "pipeline") input.value = draft[nameOf(input)];
  matchPreset();
  check();
}

function clearForm() {
  try { localStorage.removeItem("draft"); } catch { /* as above */ }
  $("#order").reset();
  for (const input of document.querySelectorAll("#more [data-field]")) input.value = "";
  files = {};
  pictures.splice(0);
  $("#refusal").textContent = "";
  useDefaults();
  showPictures();
  fillMore();
  $("#prompt").focus();
}

function usePreset() {
  const size = $("#preset").value;
  if (size) [$("#width").value, $("#height").value] = size.split("x");
  check();
}

function matchPreset() {
  const size = `${$("#width").value}x${$("#height").value}`;
  $("#preset").value = [...$("#preset").options].some((option) => option.value === size) ? size : "";
}

function problem() {
  if (!$("#prompt").value.trim()) return ["#prompt", "Say what the clip shows."];
  if (!("num_frames" in fields())) return null; // its file decides
  const unit = limits.pipelines[$("#pipeline").value].multiple_of_px;
  for (const side of ["width", "height"]) {
    const value = Number($(`#${side}`).value);
    if (!Number.isInteger(value) || value < unit || value % unit) return [`#${side}`, `The ${side} must be a multiple of ${unit} pixels.`];
  }
  const fps = Number($("#fps").value);
  if (!(fps >= limits.fps.min && fps <= limits.fps.max)) return ["#fps", `Frames a second: ${limits.fps.min} to ${limits.fps.max}.`];
  if (!(Number($("#seconds").value) > 0)) return ["#seconds", "Say how many seconds."];
  if ((numFrames() - 1) / fps > limits.max_seconds) return ["#seconds", `At most ${limits.max_seconds} seconds.`];
  if (!/^\d*$/.test($("#seed").value)) return ["#seed", "The seed is a whole number, or nothing."];
  return null;
}

function check() {
  const used = $("#prompt").value.length;
  $("#count").textContent = `${used} of ${limits.prompt_characters} characters`;
  const last = [...jobs.values()].map((job) => job.video).find((video) => video.x.run_s && same(video));
  const ready = limits.warm.includes(warmKey()) ? ", ready without warming up" : "";
  const took = last ? `; the last one like it took ${last.x.run_s.toFixed(0)} s` : "";
  $("#frames").textContent = `${numFrames()} frames${ready}${took}`;
  const found = problem();
  for (const input of document.querySelectorAll("#order [aria-invalid]")) input.removeAttribute("aria-invalid");
  if (found && found[0] !== "#prompt") $(found[0]).setAttribute("aria-invalid", "true");
  $("#problem").textContent = found && found[0] !== "#prompt" ? found[1] : "";
}

function same(video) {
  const settings = video.x.settings;
  return `${settings.width}x${settings.height}x${settings.num_frames}:${settings.pipeline}` === warmKey();
}

function showPictures() {
  $("#pictures ul").replaceChildren(...pictures.map((picture, n) => {
    const frame = make("input", { type: "number", min: 0, value: picture.frame, oninput: (e) => { picture.frame = Number(e.target.value); } });
    const strength = make("input", { type: "number", step: "any", min: 0, max: 1, value: picture.strength, oninput: (e) => { picture.strength = Number(e.target.value); } });
    const shown = picture.file ? make("img", { src: picture.url, alt: picture.file.name }) : make("span", { textContent: "the image of that video" });
    const remove = make("button", { type: "button", textContent: `Remove image ${n + 1}`, onclick: () => { pictures.splice(n, 1); showPictures(); } });
    return make("li", {}, shown, make("div", { className: "row" }, make("label", {}, "At frame ", frame), make("label", {}, "Strength ", strength)), remove);
  }));
}

function addPicture(file) {
  if (file && pictures.length < limits.images) pictures.push({ file, url: URL.createObjectURL(file), frame: 0, strength: 1 });
  showPictures();
}

function addPictures(given) {
  const known = (file) => ["image/png", "image/jpeg", "image/webp", "image/heic"].includes(file.type) || /\.exr$/i.test(file.name);
  for (const file of given) if (known(file)) addPicture(file);
}

async function send(event) {
  event.preventDefault();
  const found = problem();
  $("#problem").textContent = found ? found[1] : "";
  $("#refusal").textContent = ""; // the server's answer to the request before
  if (found) return $(found[0]).focus();
  const form = new FormData();
  const put = (name, value) => value !== "" && form.append(name, value);
  put("prompt", $("#prompt").value);
  put("pipeline", $("#pipeline").value);
  if ("num_frames" in fields()) {
    put("size", `${$("#width").value}x${$("#height").value}`);
    put("num_frames", numFrames());
    put("fps", $("#fps").value);
  }
  for (const input of document.querySelectorAll("#files input")) {
    if (input.files.length) form.append(input.dataset.file, input.files[0]);
    else if (files[input.dataset.file]) put(input.dataset.file, JSON.stringify(files[input.dataset.file]));
  }
  put("seed", $("#seed").value);
  const chosen = (name) => $(`#more [data-field="${name}"]`)?.value;
  const guided = !("nag" in fields()) || chosen("nag") || chosen("guided") === "true";
  for (const input of document.querySelectorAll("#more [data-field]")) {
    if (guided || input.dataset.field !== "negative_prompt") put(input.dataset.field, input.value); // else it is not read
  }
  const loras = [...document.querySelectorAll("[data-use]:checked")].map((use) =>
    ({ name: use.dataset.use, strength: Number($(`[data-lora="${CSS.escape(use.dataset.use)}"]`).value) }));
  if (loras.length) put("loras", JSON.stringify(loras));
  if (pictures.length) {
    put("images", JSON.stringify(pictures.map(({ file, file_id, frame, strength }, n) =>
      ({ ...(file ? { file: `image${n}` } : { file_id }), frame, strength }))));
    pictures.forEach(({ file }, n) => file && form.append(`image${n}`, file));
  }
  await order(form);
}

async function order(body) {
  $("#send").disabled = true;
  try {
    const video = await ask("POST", "v1/videos", body);
    mine.add(video.id);
    awaited = video.id;
    show(video);
    say("The video is queued.");
  } catch (error) {
    $("#refusal").textContent = error.message;
  } finally {
    $("#send").disabled = false;
  }
}

function useSettings(video) {
  const { pipeline, images, loras, ...clip } = video.x.settings;
  $("#pipeline").value = pipeline;
  files = Object.fromEntries(Object.entries(clip).filter(([name]) => name in limits.pipelines[pipeline].files));
  fillMore();
  for (const name of ["prompt", "width", "height", "seed"]) $(`#${name}`).value = clip[name] ?? "";
  if (clip.fps) {
    const [over, under = 1] = clip.fps.split("/").map(Number);
    $("#fps").value = over / under;
    $("#seconds").value = (clip.num_frames / $("#fps").value).toFixed(3);
  }
  matchPreset();
  for (const input of document.querySelectorAll("#more [data-field]")) {
    const value = clip[input.dataset.field] ?? "";
    input.value = fields()[input.dataset.field]?.items ? [...value].join("\n") : value;
  }
  for (const use of document.querySelectorAll("[data-use]")) {
    const lora = loras.find((one) => one.name === use.dataset.use);
    use.checked = Boolean(lora);
    if (lora) $(`[data-lora="${CSS.escape(lora.name)}"]`).value = lora.strength;
  }
  pictures.splice(0, pictures.length, ...images);
  showPictures();
  check();
  keepDraft();
  $("#prompt").focus();
}

const again = (video) => order(JSON.stringify({ ...video.x.settings, seed: null }));

// --- the list -------------------------------------------------------------------------------------------------------

const say = (text) => { $("#news").textContent = text; };

function stateOf(video) {
  const { x, status } = video;
  if (status === "queued") return x.queue_position ? `queued, ${x.queue_position} before it` : "queued, next";
  if (status === "in_progress" && x.cancel_requested_at) return "is being cancelled";
  if (status === "in_progress") {
    const steps = x.steps ? `${x.stage}, ${x.step} of ${x.steps}` : x.stage ?? "begins";
    return `${steps}${x.eta_s ? `, ${Math.ceil(x.eta_s)} s left` : ""}`;
  }
  if (status === "completed") return `${video.size}, ${video.seconds} s, seed ${x.seed}, made in ${(x.run_s ?? 0).toFixed(1)} s`;
  return video.error?.code === "cancelled" ? "cancelled" : "failed";
}

function show(video, atEnd = false) {
  if (deleted.has(video.id)) return;
  const known = jobs.get(video.id);
  const row = known?.row ?? make("li");
  if (!known) {
    row.id = video.id;
    const after = [...jobs.values()].filter((job) => job.video.id < video.id);
    if (atEnd || !after.length) $("#jobs").append(row);
    else $("#jobs").insertBefore(row, after.reduce((a, b) => (a.video.id > b.video.id ? a : b)).row);
  }
  jobs.set(video.id, { video, row });
  row.hidden = !matches(video);
  counted();
  if (video.id === awaited && video.x.preview && video.status === "in_progress") showPreview(video);
  if (known && known.video.status === video.status && row.querySelector(".bars") && video.status === "in_progress") {
    row.querySelector(".state").textContent = stateOf(video);
    return bars(row.querySelector(".bars"), video);
  }
  const focused = row.contains(document.activeElement) ? document.activeElement.textContent : null;
  const words = video.prompt.length > 120 ? `${video.prompt.slice(0, 120)}…` : video.prompt;
  const button = (text, onclick) => make("button", { type: "button", textContent: text, onclick, ariaLabel: `${text}: ${words.slice(0, 40)}` });
  const actions = make("div", { className: "actions" });
  const tell = (action) => async () => { try { await action(); } catch (error) { say(error.message); } };
  if (video.status === "queued" || video.status === "in_progress") {
    actions.append(button("Cancel", tell(async () => show(await ask("POST", `v1/videos/${video.id}/cancel`)))));
    if (video.status === "in_progress" && video.x.stream) actions.append(button("Watch so far", () => follow(video)));
  } else {
    if (video.x.urls.video) {
      video.x.urls.videos.forEach((url, n, { length }) => {
        const which = length > 1 ? ` ${n + 1}` : "";
        actions.append(button(`Watch${which}`, () => watch(video, url)));
        actions.append(make("a", { href: url, download: `${video.id}${which.trim() && `-${n}`}.mp4`, textContent: `Download${which}` }));
      });
      video.x.urls.frames.forEach((url) => actions.append(make("a", { href: url, download: "", textContent: "Download frames" })));
    }
    if (video.status === "failed") {
      actions.append(button("Try again", tell(async () => show(await ask("POST", `v1/videos/${video.id}/retry`)))));
    }
    actions.append(button("Use these settings", () => useSettings(video)), button("Again, other seed", () => again(video)));
    if (video.x.urls.video) actions.append(button("Compare", () => compare(video)));
    actions.append(button("Delete", () => remove(video, words)));
  }
  row.replaceChildren(
    video.x.urls.thumbnail ? make("img", { src: video.x.urls.thumbnail, alt: "", loading: "lazy" }) : make("span"),
    make("p", { className: "text", textContent: words }),
    make("p", { className: "state hint", textContent: stateOf(video) }),
  );
  if (video.status === "in_progress") row.append(bars(make("div", { className: "bars" }), video));
  if (video.status === "failed" && video.error?.code !== "cancelled") {
    row.append(make("p", { className: "error", textContent: video.error.message }));
    const details = `${video.id}, ${video.error.code}, ${video.x.attempts} attempts`;
    row.append(make("details", {}, make("summary", { textContent: "details" }), details));
  }
  row.append(actions);
  if (focused) [...row.querySelectorAll("button, a")].find((one) => one.textContent === focused)?.focus();
  if (video.status === "in_progress" && video.x.segments) segments(video).catch((error) => say(error.message));
  if (known && known.video.status !== video.status) changed(video);
}

// The segments that are made of a clip, with their prompts, each to be watched alone.
async function segments(video) {
  const made = (await ask("GET", video.x.segments)).data.filter((one) => one.made);
  const body = jobs.get(video.id)?.row.querySelector(".bars");
  if (!body) return;
  body.querySelector("div")?.remove();
  body.append(make("div", {}, ...made.map((one) => make("button", { type: "button",
    textContent: `${one.index}: ${one.prompt.slice(0, 60)}`, onclick: () => watch(video, `${video.x.segments}/${one.index}`) }))));
}

function bars(body, video) {
  if (!body.children.length) {
    body.append(make("progress", { max: 100, ariaLabel: "the whole video" }), make("progress", { ariaLabel: "this stage" }));
    body.append(make("img", { alt: "what it looks like so far", hidden: true }));
  }
  if (video.x.preview) {
    body.children[2].hidden = false;
    if (!body.children[2].src.endsWith(video.x.preview)) body.children[2].src = video.x.preview;
  }
  body.children[0].value = video.progress;
  body.children[1].hidden = !video.x.steps;
  body.children[1].max = video.x.steps || 1;
  body.children[1].value = video.x.step || 0;
  return body;
}

function changed(video) {
  if (video.status === "completed") {
    say("A video is completed.");
    if (mine.delete(video.id) && followed !== video.id) watch(video);
  } else if (video.status === "failed") {
    if (video.id === awaited && !$("#result img").hidden) $("#result").hidden = true;
    say(video.error?.code === "cancelled" ? "A video is cancelled." : `A video failed: ${video.error?.message}`);
  }
  if (video.status === "in_progress" && video.x.stream && mine.has(video.id)) follow(video);
  if (limits) check();
}

// The clip that was asked for last looks like this so far: where it will play.
function showPreview(video) {
  const picture = $("#result img");
  if (!picture.src.endsWith(video.x.preview)) picture.src = video.x.preview;
  $("#result").hidden = picture.hidden = false;
  $("#result video").pause();
  $("#result video").hidden = true;
  $("#result p").textContent = `${video.prompt.slice(0, 200)} (${stateOf(video)})`;
}

// A second clip beside the first, which is in control of both.
function compare(video) {
  const second = $("#second");
  second.src = video.x.urls.video;
  second.setAttribute("aria-label", video.prompt.slice(0, 120));
  second.hidden = $("#compared").hidden = false;
  $("#compared span").textContent = `Right: ${video.prompt.slice(0, 200)} (${stateOf(video)})`;
  if ($("#result").hidden) watch(video);
  inStep();
}

function inStep() {
  const [first, second] = document.querySelectorAll("#result video");
  if (second.hidden) return;
  if (Math.abs(second.currentTime - first.currentTime) > 0.05) second.currentTime = first.currentTime;
  if (first.paused) second.pause(); else second.play().catch(() => {});
}

function closeSecond() {
  $("#second").hidden = $("#compared").hidden = true;
  $("#second").removeAttribute("src");
  $("#second").load();
}

function watch(video, url = video.x.urls.video) {
  awaited = null;
  $("#result").hidden = $("#result video").hidden = false;
  $("#result img").hidden = true;
  const player = $("#result video");
  player.src = url;
  player.setAttribute("aria-label", video.prompt.slice(0, 120));
  $("#result p").textContent = `${video.prompt.slice(0, 200)} (${stateOf(video)})`;
}

// A clip in segments plays while it is made: the fragments of its stream go to a MediaSource as they come.
async function follow(video) {
  if (!window.MediaSource || followed === video.id) return;
  followed = video.id;
  const source = new MediaSource();
  const url = URL.createObjectURL(source);
  watch(video, url);
  try {
    await once(source, "sourceopen");
    const stream = (await fetch(video.x.stream)).body.getReader();
    const mine = () => $("#result video").src === url;
    let held = new Uint8Array();
    let buffer;
    for (let part = await stream.read(); !part.done && mine(); part = await stream.read()) {
      held = new Uint8Array(await new Blob([held, part.value]).arrayBuffer());
      const kinds = codecs(held);
      const type = `video/mp4; codecs="${kinds}"`;
      if (kinds && !MediaSource.isTypeSupported(type)) throw new Error("this browser does not play it while it is made");
      if (!buffer && kinds) buffer = source.addSourceBuffer(type);
      if (!buffer) continue;
      buffer.appendBuffer(held);
      held = new Uint8Array();
      await once(buffer, "updateend");
    }
    if (mine()) source.endOfStream(); else stream.cancel();
  } catch (error) {
    say(`The stream stopped: ${error.message}`);
    followed = null;
  }
}

const once = (target, event) => new Promise((done) => target.addEventListener(event, done, { once: true }));

// What the header of a stream says of its codecs; nothing until it is whole.
function codecs(bytes) {
  const text = new TextDecoder("latin1").decode(bytes.subarray(0, 65536));
  const at = Math.max(text.indexOf("avcC"), text.indexOf("hvcC"));
  if (at < 0 || !text.includes("moof")) return null;
  const hex = (from, to) => [...bytes.subarray(at + from, at + to)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  const level = bytes[at + 16]; // of HEVC, Main 10, as clips in high dynamic range have it
  const kind = text[at] === "h" ? `hvc1.2.4.L${level}.B0` : `avc1.${hex(5, 8)}`;
  return `${kind}${text.includes("mp4a") ? ", mp4a.40.2" : ""}`;
}

const matches = (video) => video.prompt.toLowerCase().includes($("#search").value.trim().toLowerCase());

function counted() {
  $("#none").hidden = jobs.size > 0;
  $("#tools").hidden = !jobs.size;
  $("#cancel-all").hidden = !unfinished().length;
}

const unfinished = () => [...jobs.values()].map((job) => job.video)
  .filter((video) => video.status === "queued" || (video.status === "in_progress" && !video.x.cancel_requested_at));

async function cancelAll() {
  const videos = unfinished();
  const answers = await Promise.allSettled(videos.map((video) => ask("POST", `v1/videos/${video.id}/cancel`)));
  for (const { value } of answers) if (value) show(value);
  const missed = answers.find((answer) => answer.reason);
  say(missed ? missed.reason.message : `${videos.length} videos are cancelled.`);
}

// A clip is deleted a few seconds after it was asked for, or when the page is left.
function remove(video, words) {
  const { row } = jobs.get(video.id);
  const undo = make("button", { type: "button", textContent: "Undo", onclick: () => {
    clearTimeout(deleted.get(video.id));
    deleted.delete(video.id);
    show(video);
  } });
  row.replaceChildren(make("span"), make("p", { className: "text", textContent: `Deleted: ${words}` }),
    make("div", { className: "actions" }, undo));
  undo.focus();
  deleted.set(video.id, setTimeout(() => deleteNow(video.id), UNDO_MS));
}

async function deleteNow(id, keepalive = false) {
  clearTimeout(deleted.get(id));
  deleted.delete(id);
  try {
    await ask("DELETE", `v1/videos/${id}`, undefined, keepalive);
    forget(id);
  } catch (error) {
    say(error.message);
    list();
  }
}

function forget(id) {
  clearTimeout(deleted.get(id));
  deleted.delete(id);
  const job = jobs.get(id);
  if (!job) return;
  const next = job.row.nextElementSibling ?? job.row.previousElementSibling;
  if (job.row.contains(document.activeElement)) next?.querySelector("button")?.focus();
  job.row.remove();
  jobs.delete(id);
  if ($("#result video").src.includes(id)) { $("#result video").removeAttribute("src"); $("#result video").load(); $("#result").hidden = true; }
  if ($("#second").src.includes(id)) closeSecond();
  counted();
}

async function list(after = null) {
  const page = await ask("GET", `v1/videos?limit=100${after ? `&after=${after}` : ""}`);
  if (!after) { // what the server has forgotten meanwhile
    const there = new Set(page.data.map((video) => video.id));
    for (const id of [...jobs.keys()]) if (!there.has(id) && !(page.has_more && id < page.last_id)) forget(id);
  }
  for (const video of after ? page.data : page.data.toReversed()) show(video, Boolean(after));
  if (after || !oldest) {
    oldest = page.last_id;
    $("#older").hidden = !page.has_more;
  }
}

// --- the server -----------------------------------------------------------------------------------------------------

async function status() {
  try {
    const now = await ask("GET", "v1/status");
    const up = now.replicas.filter((one) => ["idle", "busy"].includes(one.state)).length;
    const starting = now.replicas.find((one) => one.state === "starting");
    const wait = starting ? `, one starting for ${starting.for_s.toFixed(0)} s` : "";
    $("#state").textContent = `${up} of ${now.replicas.length} replicas up${wait}; ${now.jobs.queued} queued; ` +
      `${(now.disk_free_bytes / 1e9).toFixed(0)} GB free${now.paused ? "; paused" : ""}${now.draining ? "; about to stop" : ""}`;
  } catch {
    $("#state").textContent = "no connection";
  }
}

function listen() {
  const stream = new EventSource("v1/events?previews=1");
  stream.onopen = () => { $("#banner").hidden = true; list(); status(); };
  stream.onerror = () => {
    $("#banner").hidden = false;
    if (stream.readyState === EventSource.CLOSED) setTimeout(listen, 2000);
  };
  for (const kind of ["queued", "started", "stage", "step", "segment", "preview", "cancelling", "completed", "failed"]) {
    stream.addEventListener(kind, (event) => show(JSON.parse(event.data)));
  }
  stream.addEventListener("segment", (event) => segments(JSON.parse(event.data)).catch((error) => say(error.message)));
  stream.addEventListener("deleted", (event) => forget(JSON.parse(event.data).id));
}

function showLogin() {
  $("main").hidden = true;
  $("#login").hidden = false;
}

async function begin() {
  try {
    limits = await ask("GET", "v1/limits");
  } catch (error) {
    if ($("#login").hidden) { $("#banner").hidden = false; setTimeout(begin, 2000); }
    return;
  }
  $("#banner").hidden = true;
  $("#login").hidden = true;
  $("main").hidden = false;
  $("#model").textContent = limits.model;
  $("#prompt").maxLength = limits.prompt_characters;
  fillForm();
  listen();
  setInterval(status, 5000);
}

$("#login").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    await ask("POST", "login", JSON.stringify({ token: $("#login input").value }));
    await begin();
  } catch (error) {
    $("#login .error").textContent = error.message;
  }
});
$("#order").addEventListener("submit", send);
$("#order").addEventListener("input", () => { check(); keepDraft(); });
$("#order").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); $("#order").requestSubmit(); }
});
$("#pipeline").addEventListener("change", () => { fillMore(); keepDraft(); });
$("#clear").addEventListener("click", clearForm);
$("#example").addEventListener("click", () => { $("#prompt").value = EXAMPLE; check(); keepDraft(); $("#prompt").focus(); });
$("#search").addEventListener("input", () => { for (const { video, row } of jobs.values()) row.hidden = !matches(video); });
$("#cancel-all").addEventListener("click", cancelAll);
$("#compared button").addEventListener("click", closeSecond);
for (const event of ["play", "pause", "seeked", "timeupdate"]) $("#result video").addEventListener(event, inStep);
addEventListener("pagehide", () => { for (const id of deleted.keys()) deleteNow(id, true); });
$("#preset").addEventListener("change", usePreset);
for (const side of ["width", "height"]) $(`#${side}`).addEventListener("input", matchPreset);
$("#die").addEventListener("click", () => { $("#seed").value = crypto.getRandomValues(new Uint32Array(1))[0]; check(); keepDraft(); });
$("#picture").addEventListener("change", (event) => { addPicture(event.target.files[0]); event.target.value = ""; });
$("#order").addEventListener("dragover", (event) => event.preventDefault());
$("#order").addEventListener("drop", (event) => { event.preventDefault(); addPictures(event.dataTransfer.files); });
document.addEventListener("paste", (event) => addPictures(event.clipboardData.files));
$("#older").addEventListener("click", () => list(oldest));
begin();
