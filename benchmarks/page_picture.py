"""docs/serve.png: the page of a server that has made a clip by the tiny trained model, and makes
another one.

    python -m benchmarks.page_picture

Needs playwright and a chromium that plays H.264. The picture holds a digest of the page's files,
so that a test tells one that is out of date.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image, PngImagePlugin

import ltx2rt
from benchmarks.serve import Server

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "serve.png"
MODEL = ROOT / "examples" / "tiny-trained"
CLIP = {"size": "128x128", "num_frames": 25, "pipeline": "two-stage"}
SHAPE = {"width": 1280, "height": 1000}


def digest() -> str:
    """SHA-256 of the page's files."""
    found = hashlib.sha256()
    for path in sorted((Path(ltx2rt.__file__).parent / "serve" / "page").iterdir()):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def draw(server: Server, to: Path) -> None:
    """Write the picture: a part of the first clip is chosen, and the second is in progress."""
    from playwright.sync_api import sync_playwright

    prompt = "a red triangle slides to the right, dark background"
    server.wait(server.ask("POST", "v1/videos", {"prompt": prompt, "seed": 7, **CLIP})["id"])
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as play:
        how = ["--no-sandbox", "--autoplay-policy=no-user-gesture-required"]
        opened = play.chromium.launch(executable_path=browser, args=how)
        page = opened.new_page(viewport=SHAPE)
        page.goto(server.url)
        page.click("#jobs button:has-text('Watch')")
        page.click("#jobs button:has-text('Redo a part')")
        page.locator(".line").wait_for()
        page.fill("#prompt", "a green square slides to the right, dark background")
        long = {"prompt": "a green square grows, dark background", "steps": 400}
        id = server.ask("POST", "v1/videos", {**CLIP, **long})["id"]
        page.locator("#jobs img[src*='preview']").wait_for()
        page.wait_for_timeout(2000)  # milliseconds: until the clip plays and a step is shown
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        page.screenshot(path=str(to))
        opened.close()
    server.ask("POST", f"v1/videos/{id}/cancel")


def main() -> None:
    how = {"width": 128, "height": 128, "num_frames": 25, "others": [], "pipeline": "two-stage"}
    args = argparse.Namespace(model=MODEL, backend="cuda", device="cpu", **how)
    with TemporaryDirectory() as folder:
        server = Server(args, Path(folder) / "data")
        try:
            draw(server, Path(folder) / "page.png")
        finally:
            server.process.terminate()
            server.process.wait()
        info = PngImagePlugin.PngInfo()
        info.add_text("Page", digest())
        with Image.open(Path(folder) / "page.png") as shot:
            shot.convert("RGB").save(PICTURE, optimize=True, pnginfo=info)
    print(PICTURE)


if __name__ == "__main__":
    main()
