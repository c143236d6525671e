// The list of videos: their states, the buttons of each, and what they do.

import { $, ask, make, say, shortened, shortTime } from "./dom.js";
import { again, can, startFrom, useSettings } from "./form.js";
import { awaits, closeClip, compare, expect, follow, follows, showPreview, stopPicture, watch } from "./player.js";

const jobs = new Map(); // id -> {video, row}
const mine = new Set(); // ids that this page has sent: shown when they are done
const deleted = new Map(); // id -> timer: what is deleted unless that is undone
const UNDO_MS = 6000;
let oldest = null;

export function ordered(video) {
  mine.add(video.id);
  expect();
  show(video);
  jobs.get(video.id).row.scrollIntoView({ behavior: "smooth", block: "nearest" });
}

function stateOf(video) {
  const { x, status } = video;
  if (status === "queued") {
    const place = x.queue_position ? `queued, ${x.queue_position} before it` : "queued, next";
    return x.eta_s === null ? place : `${place}, done in about ${shortTime(x.eta_s)}`;
  }
  if (status === "in_progress" && x.cancel_requested_at) return "is being cancelled";
  if (status === "in_progress") {
    const steps = x.steps ? `${x.stage}, ${x.step} of ${x.steps}` : x.stage ?? "begins";
    return `${video.progress} %${x.eta_s ? `, ${shortTime(x.eta_s)} left` : ""} (${steps})`;
  }
  if (status === "completed") {
    const kept = x.kept_until && new Date(1000 * x.kept_until).toLocaleDateString(undefined, { day: "numeric", month: "short" });
    const until = x.pinned ? "; kept" : kept ? `; kept until ${kept}` : "";
    const size = video.size.replace("x", " × ");
    return `${size}, ${x.seconds.toFixed(2)} s, seed ${x.seed}, made in ${shortTime(x.run_s ?? 0)}${until}`;
  }
  return video.error?.code === "cancelled" ? "cancelled" : "failed";
}

export function show(video, atEnd = false) {
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
  if (awaits() && mine.has(video.id) && video.x.preview && video.status === "in_progress") showPreview(video);
  if (known && known.video.status === video.status && row.querySelector(".bars") && video.status === "in_progress") {
    row.querySelector(".state").textContent = stateOf(video);
    return bars(row.querySelector(".bars"), video);
  }
  const focused = row.contains(document.activeElement) ? document.activeElement.textContent : null;
  const words = shortened(video.prompt, 120);
  const actions = make("div", { className: "actions" }, ...buttons(video, words));
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
  if (known && known.video.status !== video.status) moved(video);
}

// What can be done with a video: the usual, and under "More" the rest.
function buttons(video, words) {
  const { x, status } = video;
  const tell = (action) => async () => { try { await action(); } catch (error) { say(error.message); } };
  const button = (text, action) => make("button", { type: "button", textContent: text, onclick: tell(action), ariaLabel: `${text}: ${words.slice(0, 40)}` });
  const post = (what, method = "POST") => async () => show(await ask(method, `v1/videos/${video.id}/${what}`));
  if (status === "queued" || status === "in_progress") {
    const watchable = status === "in_progress" && x.stream;
    return [button("Cancel", post("cancel")), ...(watchable ? [button("Watch so far", () => follow(video))] : [])];
  }
  const usual = [];
  const more = [];
  if (x.urls.video) {
    x.urls.videos.forEach((url, n, { length }) => {
      const which = length > 1 ? ` ${n + 1}` : "";
      usual.push(button(`Watch${which}`, () => watch(video, url)));
      more.push(make("a", { href: url, download: `${video.id}${which.trim() && `-${n}`}.mp4`, textContent: `Download${which}` }));
    });
    for (const task of ["Continue a clip", "Redo a part"].filter(can)) usual.push(button(task.replace(" a clip", ""), () => startFrom(video, task)));
    usual.push(button("Use last frame", () => startFrom(video, "Animate a photo")));
    x.urls.frames.forEach((url) => more.push(make("a", { href: url, download: "", textContent: "Download frames" })));
    more.push(button("Compare", () => compare(video)));
    if (x.pinned) more.push(button("Let it expire", post("pin", "DELETE")));
    else if (x.kept_until) usual.push(button("Keep", post("pin")));
  }
  if (status === "failed") usual.push(button("Try again", post("retry")));
  more.unshift(button("Use these settings", () => useSettings(video)), button("Again, other seed", () => again(video)));
  more.push(button("Delete", () => remove(video, words)));
  return [...usual, make("details", {}, make("summary", { textContent: "More", ariaLabel: `More: ${words.slice(0, 40)}` }), ...more)];
}

// The segments that are made of a clip, with their prompts, each to be watched alone.
export async function segments(video) {
  const made = (await ask("GET", video.x.segments)).data.filter((one) => one.made);
  const body = jobs.get(video.id)?.row.querySelector(".bars");
  if (!body) return;
  body.querySelector("div")?.remove();
  body.append(make("div", {}, ...made.map((one) => make("button", { type: "button",
    textContent: `${one.index}: ${one.prompt.slice(0, 60)}`, onclick: () => watch(video, `${video.x.segments}/${one.index}`) }))));
}

function bars(body, video) {
  if (!body.children.length) {
    body.append(make("progress", { max: 100, ariaLabel: "the whole video" }), make("img", { alt: "what it looks like so far", hidden: true }));
  }
  const [bar, picture] = body.children;
  if (video.x.preview) {
    picture.hidden = false;
    if (!picture.src.endsWith(video.x.preview)) picture.src = video.x.preview;
  }
  bar.value = video.progress;
  return body;
}

function moved(video) {
  if (video.status === "completed") {
    say("A video is completed.");
    if (mine.delete(video.id) && !follows(video)) watch(video);
  } else if (video.status === "failed") {
    if (mine.delete(video.id)) stopPicture();
    say(video.error?.code === "cancelled" ? "A video is cancelled." : `A video failed: ${video.error?.message}`);
  }
  if (video.status === "in_progress" && video.x.stream && mine.has(video.id)) follow(video);
}

const matches = (video) => video.prompt.toLowerCase().includes($("#search").value.trim().toLowerCase());

function counted() {
  $("#none").hidden = jobs.size > 0;
  $("#tools").hidden = !jobs.size;
  $("#cancel-all").hidden = !unfinished().length;
}

const unfinished = () => [...jobs.values()].map((job) => job.video)
  .filter((video) => video.status === "queued" || (video.status === "in_progress" && !video.x.cancel_requested_at));

export async function cancelAll() {
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

export function forget(id) {
  clearTimeout(deleted.get(id));
  deleted.delete(id);
  const job = jobs.get(id);
  if (!job) return;
  const next = job.row.nextElementSibling ?? job.row.previousElementSibling;
  if (job.row.contains(document.activeElement)) next?.querySelector("button")?.focus();
  job.row.remove();
  jobs.delete(id);
  closeClip(id);
  counted();
}

export async function list(after = null) {
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

export const older = () => list(oldest);
export const search = () => { for (const { video, row } of jobs.values()) row.hidden = !matches(video); };
export const waiting = () => [...jobs.values()].some(({ video }) => video.status === "queued");
export const deleteAll = () => { for (const id of deleted.keys()) deleteNow(id, true); };
