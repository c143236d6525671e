// The page of `ltx2rt serve`. The server is the only state: what is shown comes from its lists and its event stream.
// Text of a job is set as text, never as HTML.

import { $, ask, say } from "./dom.js";
import { addFiles, changed, choose, clearForm, fillForm, send } from "./form.js";
import { cancelAll, deleteAll, forget, list, older, ordered, search, segments, show, waiting } from "./list.js";
import { closeSecond, inStep } from "./player.js";

const EXAMPLE = "A red fox trots through fresh snow at dawn, its paws crunching softly, wind in the pines";

async function status() {
  try {
    const now = await ask("GET", "v1/status");
    const up = now.replicas.filter((one) => ["idle", "busy"].includes(one.state)).length;
    const starting = now.replicas.find((one) => one.state === "starting");
    const wait = starting ? `, one starting for ${starting.for_s.toFixed(0)} s` : "";
    if (waiting()) list(); // their places and times
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
  let limits;
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
  fillForm(limits, ordered);
  listen();
  setInterval(status, 5000);
}

addEventListener("login", showLogin);
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
$("#order").addEventListener("input", changed);
$("#order").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); $("#order").requestSubmit(); }
});
$("#tasks").addEventListener("change", (event) => choose(event.target.value));
$("#pipeline").addEventListener("change", (event) => choose($("[name=task]:checked").value, event.target.value));
$("#clear").addEventListener("click", clearForm);
$("#example").addEventListener("click", () => { $("#prompt").value = EXAMPLE; changed(); $("#prompt").focus(); });
$("#search").addEventListener("input", search);
$("#cancel-all").addEventListener("click", cancelAll);
$("#compared button").addEventListener("click", closeSecond);
for (const event of ["play", "pause", "seeked", "timeupdate"]) $("#result video").addEventListener(event, inStep);
addEventListener("pagehide", deleteAll);
$("#picture").addEventListener("change", (event) => { addFiles(event.target.files, true); event.target.value = ""; });
$("#order").addEventListener("dragover", (event) => event.preventDefault());
$("#order").addEventListener("drop", (event) => { event.preventDefault(); addFiles(event.dataTransfer.files, Boolean(event.target.closest("#pictures"))); });
document.addEventListener("paste", (event) => addFiles(event.clipboardData.files));
$("#older").addEventListener("click", older);
begin();
