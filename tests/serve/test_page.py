"""The page in a browser that plays H.264 and AAC: Debian's chromium, driven by playwright. Skipped
where neither is, but in CI, where they fail."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.serve.serving import children, moving, png, sound, under_a_path

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(
    BROWSER is None and not os.environ.get("CI"),
    reason="there is no chromium here that plays H.264 and AAC",
)


@pytest.fixture(scope="module")
def browser():
    assert BROWSER, "CI has no chromium: `.ci/run` installs Debian's where it runs as root"
    with playwright.sync_playwright() as play:
        found = play.chromium.launch(
            executable_path=BROWSER,
            args=["--no-sandbox", "--autoplay-policy=no-user-gesture-required"],
        )
        yield found
        found.close()


@pytest.fixture
def page(browser):
    """One whose errors fail the test."""
    opened, errors = browser.new_page(viewport={"width": 1100, "height": 900}), []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    policy = "Content Security"
    opened.on("console", lambda said: policy in said.text and errors.append(said.text))
    opened.set_default_timeout(90_000)
    yield opened
    opened.close()
    assert not errors


def until(page, condition):
    """As `wait_for_function`, which needs an `eval` that the page's policy forbids."""
    end = time.monotonic() + 90
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        time.sleep(0.05)


def choose(page, task):
    page.click(f"#tasks >> text={task}")


def fill(page, prompt, seconds="0.375", **fields):
    choose(page, "Text to video")
    page.fill("#prompt", prompt)
    page.select_option("#pipeline", "one-stage")
    page.select_option("#size", "other")
    page.fill("#width", "64")
    page.fill("#height", "64")
    page.fill("#seconds", seconds)
    set_fields(page, **fields)


def set_fields(page, **fields):
    """Values of fields, after their groups are opened."""
    for name, value in fields.items():
        field = page.locator(f"[data-field={name}], #{name}")
        if not field.is_visible():
            field.locator("xpath=ancestor::details").locator("summary").click()
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)


def send(page, prompt):
    """The row of a new job, once its clip is made."""
    page.fill("#prompt", prompt)
    page.click("#send")
    row = page.locator("#jobs li", has_text=prompt.partition(": ")[2])
    row.locator("text=Watch").first.wait_for()
    return row


def latest(server):
    """Settings of the latest job."""
    return server.http.get("/v1/videos?limit=1").json()["data"][0]["x"]["settings"]


def act(row, what):
    """Press a button of a video, also one under "More"."""
    if not row.locator(f"button:has-text('{what}')").is_visible():
        row.locator("summary", has_text="More").click()
    row.locator(f"button:has-text('{what}')").click()


def test_a_video_from_the_prompt_to_its_sound(start, page):
    """With the tiny checkpoint: bars move, the clip plays, its settings make another one."""
    server = start("--warm", "64x64x9:one-stage", replicas="real")
    page.goto(server.url)
    fill(page, "a red fox <img src=x onerror=alert(1)>", seed="7", steps="3")
    until(page, "/starts at once.*9 frames/.test(document.querySelector('#time').textContent)")
    page.click("#send")
    page.wait_for_selector("#jobs progress")
    page.wait_for_selector("text=Watch", timeout=90_000)
    until(page, "document.querySelector('#result video').currentTime > 0")
    seen = page.evaluate("""() => { const v = document.querySelector('#result video');
        return [v.videoWidth, v.duration, v.webkitAudioDecodedByteCount > 0, v.error]; }""")
    assert seen[0] == 64 and seen[1] == pytest.approx(0.375, abs=0.05) and seen[2:] == [True, None]
    assert "onerror" in page.inner_text("#jobs .text") and page.locator("#jobs img").count() == 1
    page.fill("[data-field=seed]", "")
    row = page.locator("#jobs li")
    act(row, "Use these settings")
    assert page.input_value("[data-field=seed]") == "7"
    assert page.input_value("[data-field=steps]") == "3"
    assert page.input_value("#seconds") == "0.375"
    act(row, "Again, other seed")
    until(page, "document.querySelectorAll('#jobs li').length === 2")
    act(row.last, "Delete")
    until(page, "document.querySelectorAll('#jobs li').length === 1")


def test_the_lines_of_the_documentation_make_a_clip(start, page):
    server = start()
    page.goto(server.url)
    text = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    lines = text.partition("```js\n")[2].partition("```")[0]
    lines = lines.replace("http://127.0.0.1:8000", server.url).replace(
        "the fox turns", "1:0: the fox turns"
    )
    page.evaluate(
        "pixels => { window.file = new File([new Uint8Array(pixels)], 'fox.png'); }", [*png()]
    )
    page.evaluate("document.body.prepend(document.createElement('video'))")
    made = page.evaluate(f"(async () => {{ {lines}; return video; }})()")
    assert made["status"] == "completed", made["error"]
    assert server.http.get(page.get_attribute("video >> nth=0", "src")).status_code == 200
    assert latest(server)["images"][0]["frame"] == 0


@pytest.mark.long
def test_a_clip_in_segments_plays_while_it_is_made(start, page):
    server = start(replicas="real")
    page.goto(server.url)
    fill(page, "a red fox", "4.38", seed="7", steps="3", segment_frames="25", overlap="9")
    page.click("#send")
    until(page, "document.querySelector('#jobs progress')")
    (job,) = server.http.get("/v1/videos").json()["data"]
    server.until_segments(job["id"], 5)  # the encoder looks about 40 frames ahead
    workers = children(server.process.pid)
    for pid in workers:  # the last one waits, however slow the browser is
        os.kill(pid, signal.SIGSTOP)
    try:
        until(page, "document.querySelector('#result video').currentTime > 0.2")
        assert server.get(job["id"])["status"] == "in_progress"
        assert page.evaluate("document.querySelector('#result video').src.startsWith('blob:')")
        page.locator("#jobs .bars button", has_text="1: a red fox").first.wait_for()
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
    server.until(job["id"], timeout_s=200)
    length = (25 + 5 * 16) / 24
    until(page, f"Math.abs(document.querySelector('#result video').duration - {length}) < 0.05")
    all_of_it = f"webkitDecodedFrameCount >= {0.9 * length * 24}"  # then it begins anew
    until(page, f"document.querySelector('#result video').{all_of_it}")
    seen = page.evaluate("""() => { const v = document.querySelector('#result video');
        return [v.videoWidth, v.webkitAudioDecodedByteCount > 0, v.error]; }""")
    assert seen == [64, True, None]
    page.click("#jobs button:text-is('Watch')")  # the file itself, which can be sought in
    until(page, "document.querySelector('#result video').src.includes('/content')")


@pytest.mark.long
def test_sounds_and_videos_are_sent_and_several_videos_come_back(server, page, tmp_path):
    """Uploads of three pipelines, `n`, pictures of the steps; "use these settings" sends the same
    file again."""
    (tmp_path / "song.wav").write_bytes(sound())
    moving(tmp_path)
    page.goto(server.url)
    fill(page, "80:0.03: sung")
    choose(page, "Sound to video")
    page.set_input_files("[data-file=audio_path]", tmp_path / "song.wav")
    set_fields(page, n="2")
    page.click("#send")
    row = page.locator("#jobs li", has_text="sung")
    row.locator("img[alt='what it looks like so far']").wait_for(state="attached")
    shown = "document.querySelector('#jobs .bars img')?.getAttribute('src')"
    until(page, f"{shown}?.includes('variant=preview')")
    row.locator("text=Watch 2").click()
    assert "video=1" in page.get_attribute("#result video", "src")
    assert (first := latest(server))["n"] == 2
    choose(page, "Text to video")
    act(row, "Use these settings")
    assert page.is_checked("[value='Sound to video']")
    assert page.input_value("[data-field=n]") == "2"
    assert "the sound of that video" in page.inner_text("#front")
    send(page, "1:0.01: again")
    assert latest(server)["audio_path"] == first["audio_path"]
    choose(page, "Redo a part")
    assert page.is_hidden("#seconds")
    page.set_input_files("[data-file=video_path]", tmp_path / "moving.mp4")
    set_fields(page, start_time="0.3", end_time="0.6", n="", seed="", guided="true")
    send(page, "1:0.01: retaken")
    choose(page, "Follow a clip")
    page.set_input_files("[data-file=video_conditioning]", tmp_path / "moving.mp4")
    page.click("#send")
    assert "Choose the LoRA" in page.inner_text("#problem")
    page.click("#loras summary")
    page.check("[data-use=style]")
    set_fields(page, width="128", height="128")
    send(page, "1:0.01: followed")
    assert len(latest(server)["video_conditioning"]) == 1
    assert latest(server)["loras"][0]["name"] == "style"
    page.click("[data-zone=video_conditioning] button")
    page.set_input_files("[data-file=video_conditioning]", tmp_path / "song.wav")
    until(page, "document.querySelector('#problem').textContent.includes('holds no video')")


@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.long), 390])
def test_a_task_has_in_front_what_it_needs(server, page, width):
    """And no other field: those wait in closed groups. Nothing is wider than the window."""
    page.set_viewport_size({"width": width, "height": 844})
    page.goto(server.url)
    choose(page, "Text to video")
    assert "best (hq)" in page.inner_text("#pipeline")
    found = server.http.get("/v1/limits").json()["pipelines"].values()
    assert page.locator("#tasks input").count() == len({one["task"] for one in found}) + 1
    for about in found:
        choose(page, about["task"])
        files = page.eval_on_selector_all(
            "#front [data-file]", "files => files.map(f => f.dataset.file)"
        )
        own = next(one for one in found if one["task"] == about["task"])
        assert files == [name for name in own["files"] if name in own["front"]]
        shown = "fields => fields.filter(f => f.checkVisibility()).map(f => f.dataset.field)"
        visible = page.eval_on_selector_all("[data-field]", shown)
        assert sorted([*visible, *files]) == sorted(own["front"])
        assert page.is_visible("#seconds") == ("seconds" in own["fields"])
        grouped = page.locator("#groups [data-field]").count()
        assert grouped > 5 and page.locator("#groups details[open]").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_part_has_two_handles_and_a_region_is_drawn(server, page, tmp_path):
    (tmp_path / "clip.mp4").write_bytes(moving(tmp_path))  # 25 frames of 64x64
    page.goto(server.url)
    fill(page, "1:0: with handles")
    choose(page, "Redo a part")
    page.set_input_files("[data-file=video_path]", tmp_path / "clip.mp4")
    page.locator(".line").wait_for()
    until(page, "document.querySelector('#field-end_time').value === '0.69'")
    assert page.input_value("#field-start_time") == "0.35"
    page.focus("[aria-label='end of the part']")
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    assert page.input_value("#field-end_time") == "0.74"
    page.fill("#field-start_time", "0.5")
    assert page.input_value("[aria-label='start of the part']") == "0.5"
    until(page, "/64 . 64.*1.04 s/.test(document.querySelector('#time').textContent)")
    send(page, "1:0: with handles")
    assert [latest(server)[f"{at}_time"] for at in ("start", "end")] == [0.5, 0.74]
    choose(page, "Replace a region")  # of the same clip
    until(
        page, "document.querySelector('#time').textContent === 'Draw a rectangle on the picture.'"
    )
    frame = page.locator(".shown .frame")
    until(page, "document.querySelector('.shown .frame video').readyState > 1")
    box = frame.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + box["height"] * 0.75)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + box["height"] * 0.5)
    page.mouse.up()
    drawn = [int(number) for number in page.input_value("#field-mask_box").split(",")]
    assert drawn == pytest.approx([16, 32, 32, 16], abs=1)
    send(page, "1:0: a region")
    assert latest(server)["mask_box"] == drawn


def test_the_size_follows_the_picture_or_the_cut_is_shown(server, page, tmp_path):
    (tmp_path / "portrait.png").write_bytes(png(512, 600))
    page.goto(server.url)
    page.fill("#prompt", "1:0: a portrait")
    page.click("#send")
    choose(page, "Animate a photo")
    page.click("#send")
    assert "Choose a photo first" in page.inner_text("#problem")
    page.set_input_files("#picture", tmp_path / "portrait.png")
    until(page, "/1152 . 1344/.test(document.querySelector('#time').textContent)")
    assert page.locator("#size option:checked").inner_text() == "as the picture"
    page.select_option("#pipeline", "draft")
    until(page, "/576 . 704/.test(document.querySelector('#time').textContent)")
    page.select_option("#pipeline", "two-stage")
    page.select_option("#size", "768x512")
    until(page, "/43 % of its height is cut/.test(document.querySelector('#pictures').innerText)")
    until(page, "/768 . 512/.test(document.querySelector('#time').textContent)")
    kept = "getComputedStyle(document.querySelector('#pictures i'))"
    whole = "document.querySelector('#pictures img').height"
    share = page.evaluate(f"parseFloat({kept}.height) / {whole}")
    assert share == pytest.approx(512 / 900, abs=0.01)  # of 768x900, the picture that covers it
    choose(page, "Between photos")
    page.set_input_files("#picture", tmp_path / "portrait.png")
    assert page.input_value("#pictures li:last-child input") == "last"
    until(page, "document.querySelector('#time').textContent")
    assert page.inner_text("#problem") == ""
    (tmp_path / "film.mp4").write_bytes(moving(tmp_path))
    page.set_input_files("#picture", tmp_path / "film.mp4")
    until(page, "document.querySelector('#pictures li video').videoWidth === 64")
    assert page.input_value("#pictures li:last-child input") == "50%"


def test_a_finished_clip_is_where_others_begin(server, page, tmp_path):
    page.goto(server.url)
    made = server.until(server.add("1:0: the first"))
    (server.data / f"out/{made['id']}.1.mp4").write_bytes(moving(tmp_path))
    row = page.locator("#jobs li", has_text="the first")
    row.locator("button", has_text="Continue").click()
    page.locator("#front video").wait_for()
    assert page.is_checked("[value='Continue a clip']")
    assert page.input_value("#prompt") == "1:0: the first"
    send(page, "1:0: continued")
    row.locator("button", has_text="Redo a part").click()
    page.locator(".line").wait_for()
    row.locator("button", has_text="Use last frame").click()
    page.locator("#pictures li img").wait_for()
    until(page, "document.querySelector('#pictures li img').naturalWidth === 64")
    assert page.is_checked("[value='Animate a photo']")
    assert "kept until" in row.inner_text()
    row.locator("button", has_text="Keep").click()
    row.locator("text=/; kept$/m").first.wait_for()
    assert server.get(made["id"])["x"]["pinned"]


def test_the_page_works_under_a_path(server, page, tmp_path):
    """Behind a proxy that has nothing at the root."""
    lost = []
    page.on("response", lambda answer: answer.status == 404 and lost.append(answer.url))
    with under_a_path(server.url) as url:
        page.goto(url)
        fill(page, "")
        row = send(page, "1:0: under a path")
        row.locator("button", has_text="Watch").click()
        assert page.evaluate("document.querySelector('#result video').src").startswith(url)
        row.locator("summary").click()
        address = row.locator("text=Download").evaluate("link => link.href")
        assert address.startswith(url) and page.request.get(address).ok
        assert page.evaluate("document.querySelector('#jobs img').src").startswith(url)
        page.goto("about:blank")
    assert not lost


def test_wrong_settings_are_said_before_anything_is_sent(server, page):
    page.goto(server.url)
    before = len(server.lines("queued"))
    fill(page, "1:0", width="62")
    said = "document.querySelector('#problem').textContent"
    until(page, f"{said}.includes('Size: width 62, expected an even number')")
    fill(page, "1:0", steps="0")
    assert page.inner_text("#problem") == ""
    until(page, f"{said}.includes('Steps: 0, expected 1 to 10000')")
    assert page.get_attribute("[data-field=steps]", "aria-invalid") == "true"
    choose(page, "Redo a part")
    page.click("#send")
    assert "Choose the video first" in page.inner_text("#problem")
    fill(page, "", steps="")
    page.click("#send")
    assert "Say what" in page.inner_text("#problem") and len(server.lines("queued")) == before


def test_jobs_are_cancelled_by_keyboard_and_survive_a_reload(server, page, browser):
    page.goto(server.url)
    fill(page, "900:0.02: from the keyboard")
    page.focus("#send")
    page.keyboard.press("Enter")
    row = page.locator("#jobs li", has_text="from the keyboard")
    row.locator("progress").first.wait_for()
    page.reload()
    row.locator("progress").first.wait_for()
    second = browser.new_page()
    second.goto(server.url)
    cancelled = second.locator("#jobs li", has_text="from the keyboard")
    cancelled.locator("button", has_text="Cancel").focus()
    second.keyboard.press("Enter")
    row.locator("text=cancelled").wait_for()
    second.close()


@pytest.mark.long
def test_a_server_that_comes_back_is_found_again(start, page):
    server = start()
    page.goto(server.url)
    assert "Follow a clip" not in page.inner_text("#tasks")  # no LoRA is there
    fill(page, "100:0.02")
    page.click("#send")
    page.wait_for_selector("#jobs progress")
    port = server.url.rpartition(":")[2]
    server.kill()
    page.wait_for_selector("#banner:not([hidden])")
    start("--port", port)
    page.wait_for_selector("#banner", state="hidden")
    page.wait_for_selector("text=Watch", timeout=60_000)


def test_a_narrow_page_with_many_jobs_and_a_label_for_everything(server, page):
    for n in range(120):
        server.add("1:0", seed=n)
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(server.url)
    begun = time.monotonic()
    until(page, "document.querySelectorAll('#jobs li').length >= 100")
    assert time.monotonic() - begun < 20
    page.click("#older")
    until(page, "document.querySelectorAll('#jobs li').length >= 120")
    ids = page.eval_on_selector_all("#jobs li", "rows => rows.map(row => row.id)")
    assert ids == sorted(ids, reverse=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    unnamed = page.evaluate("""() => [...document.querySelectorAll('button, input, select, textarea, a, progress')]
        .filter(e => e.checkVisibility() && !(e.labels?.length || e.textContent.trim() || e.ariaLabel))
        .map(e => e.outerHTML)""")
    assert not unnamed
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.locator("[aria-live=polite]").count() == 1


CONTRASTS = """() => {
    const light = ([r, g, b]) => [r, g, b].map(x => x / 255)
        .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
        .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const rgb = (color, over) => {
        canvas.fillStyle = over; canvas.fillRect(0, 0, 1, 1);
        canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const css = ([r, g, b]) => `rgb(${r}, ${g}, ${b})`;
    const under = (e) => e ? rgb(getComputedStyle(e).backgroundColor, css(under(e.parentElement)))
        : rgb(getComputedStyle(document.querySelector("#order > .send")).backgroundColor, "#fff");
    const own = (e) => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    return [...document.querySelectorAll("body *")]
        .filter(e => e.checkVisibility() && !e.disabled && (own(e) || e.matches("input, textarea")))
        .map(e => {
            const back = under(e), front = rgb(getComputedStyle(e).color, css(back));
            const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
            return [(a + 0.05) / (b + 0.05), e.outerHTML.slice(0, 80)];
        }).filter(([ratio]) => ratio < 4.5);
}"""


@pytest.mark.long
def test_what_a_person_expects_of_a_form_and_a_list(server, page, images):
    page.goto(server.url)
    if not server.http.get("/v1/videos").json()["data"]:  # other tests share the server
        page.click("#example")
        assert "red fox" in page.input_value("#prompt")
    fill(page, "3:0.01: first to be searched for", seed="7")
    page.reload()  # the draft is kept
    page.wait_for_selector("#order")
    assert page.input_value("#prompt").startswith("3:0.01: first")
    kept = [page.input_value(f"#{name}") for name in ("pipeline", "width", "field-seed")]
    assert kept == ["one-stage", "64", "7"]
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    first = page.locator("#jobs li", has_text="first to be")
    first.locator("button", has_text="Watch").wait_for()
    second = send(page, "3:0.01: second")
    act(second, "Compare")
    first.locator("button", has_text="Watch").click()
    sources = "[...document.querySelectorAll('#result video')].map(v => v.src).filter(Boolean)"
    until(page, f"{sources}.length === 2")
    assert page.locator("#result video:visible").count() == 2
    assert "second" in page.inner_text("#compared span")
    page.click("#compared button")
    assert page.locator("#result video:visible").count() == 1
    page.fill("#search", "SEARCHED")
    assert page.locator("#jobs li:visible").count() == 1 and first.is_visible()
    page.fill("#search", "")
    act(second, "Delete")
    deleted = page.locator("#jobs li", has_text="Deleted:")
    deleted.locator("button", has_text="Undo").click()
    second.locator("button", has_text="Watch").wait_for()
    act(second, "Delete")
    page.reload()  # what is deleted is so when the page is left
    first.wait_for()
    second.wait_for(state="detached")
    for n in range(2):
        fill(page, f"900:0.02: long {n}")
        page.click("#send")
        page.locator("#jobs li", has_text=f"long {n}").wait_for()
    page.click("#cancel-all")
    for n in range(2):
        page.locator("#jobs li", has_text=f"long {n}").locator("text=cancelled").wait_for()
    assert page.is_hidden("#cancel-all")
    given = Path(images[0]).read_bytes()
    for event in ("drop", "paste"):
        page.evaluate(
            """([event, bytes]) => {
                const data = new DataTransfer();
                data.items.add(new File([new Uint8Array(bytes)], "fox.png", { type: "image/png" }));
                const more = event === "drop" ? { dataTransfer: data } : { clipboardData: data };
                const kind = event === "drop" ? DragEvent : ClipboardEvent;
                document.querySelector("#prompt").dispatchEvent(
                    new kind(event, { bubbles: true, cancelable: true, ...more }));
            }""",
            [event, list(given)],
        )
    assert page.locator("#pictures li img").count() == 2
    page.set_viewport_size({"width": 1100, "height": 500})
    assert page.evaluate("document.querySelector('#send').getBoundingClientRect().bottom") <= 500
    set_fields(page, steps="3")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(CONTRASTS) == []
    page.click("#clear")
    assert page.input_value("#prompt") == "" and page.locator("#pictures li").count() == 0


@pytest.mark.long
def test_of_two_files_for_one_place_the_second_is_named(server, page, tmp_path):
    """Dropped together, the second replaced the first without a word."""
    page.goto(server.url)
    moving(tmp_path)
    files = [tmp_path / "moving.mp4", shutil.copy(tmp_path / "moving.mp4", tmp_path / "other.mp4")]
    choose(page, "Redo a part")
    page.set_input_files("#picture", files)
    page.wait_for_selector("#problem:has-text('no place for other.mp4')", timeout=9000)
    assert page.locator("#order", has_text="moving.mp4").count() == 1
    page.click("#clear")
    images = [tmp_path / f"{n}.png" for n in range(9)]
    for path in images:
        path.write_bytes(png())
    page.set_input_files("#picture", images)
    page.wait_for_selector("#problem:has-text('no place for 8.png')", timeout=9000)
    assert page.locator("#pictures li").count() == 8


@pytest.mark.long
def test_a_token_is_asked_for_once(guarded, page):
    page.goto(guarded.url)
    page.fill("#login input", "wrong")
    page.click("#login button")
    page.wait_for_selector("#login .error:not(:empty)")
    page.fill("#login input", "ann-token-0123456789")
    page.keyboard.press("Enter")
    page.wait_for_selector("#order")
    fill(page, "")
    send(page, "1:0: with a token")
    page.reload()
    page.wait_for_selector("text=Watch")
    cookies = json.dumps(page.context.cookies())
    assert '"httpOnly": true' in cookies and re.search(r'"sameSite": "Strict"', cookies)
