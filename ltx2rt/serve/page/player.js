// The place where clips play: one, two in step, one that is still being made, or its pictures.

import { $, make, once, say } from "./dom.js";

let followed = null; // the id of the clip that plays while it is made
let awaiting = false; // pictures of a clip are shown until it is done

export const expect = () => { awaiting = true; };
export const follows = (video) => followed === video.id;
export const awaits = () => awaiting;

// The clip that was asked for last looks like this so far: where it will play.
export function showPreview(video) {
  const picture = $("#result img");
  if (!picture.src.endsWith(video.x.preview)) picture.src = video.x.preview;
  $("#result").hidden = picture.hidden = false;
  $("#result video").pause();
  $("#result video").hidden = true;
  $("#result p").textContent = video.prompt.slice(0, 200);
}

// A second clip beside the first, which is in control of both.
export function compare(video) {
  const second = $("#second");
  second.src = video.x.urls.video;
  second.setAttribute("aria-label", video.prompt.slice(0, 120));
  second.hidden = $("#compared").hidden = false;
  $("#compared span").textContent = `Right: ${video.prompt.slice(0, 200)}`;
  if ($("#result").hidden) watch(video);
  inStep();
}

export function inStep() {
  const [first, second] = document.querySelectorAll("#result video");
  if (second.hidden) return;
  if (Math.abs(second.currentTime - first.currentTime) > 0.05) second.currentTime = first.currentTime;
  if (first.paused) second.pause(); else second.play().catch(() => {});
}

export function closeSecond() {
  $("#second").hidden = $("#compared").hidden = true;
  $("#second").removeAttribute("src");
  $("#second").load();
}

export function watch(video, url = video.x.urls.video) {
  awaiting = false;
  $("#result").hidden = $("#result video").hidden = false;
  $("#result img").hidden = true;
  const player = $("#result video");
  player.src = url;
  player.setAttribute("aria-label", video.prompt.slice(0, 120));
  $("#result p").textContent = video.prompt.slice(0, 200);
}

// A clip in segments plays while it is made: the fragments of its stream go to a MediaSource as they come.
export async function follow(video) {
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

export function stopPicture() {
  if (!$("#result img").hidden) $("#result").hidden = true;
}

export function closeClip(id) {
  const player = $("#result video");
  if (player.src.includes(id)) {
    player.removeAttribute("src");
    player.load();
    $("#result").hidden = true;
  }
  if ($("#second").src.includes(id)) closeSecond();
}

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
