"""What is refused of the files that clients send, by the process that decodes them."""

import asyncio
import contextlib
import io
import struct
import sys
import wave
import zlib
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image, ImageCms

from ltx2rt.flags import flagged
from ltx2rt.media.hdr import exr_bytes
from ltx2rt.serve import upload
from ltx2rt.serve.options import ServeOptions
from ltx2rt.serve.refusal import Refusal
from ltx2rt.serve.upload import CONTEXT, EXR, IMAGE, MAX_PX, SOUND, VIDEO, check_upload, kind_of
from tests.serve.serving import context, png


def encoded(image, kind, **more):
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def png_of(side):
    """A PNG file whose header says that it is so large, without its pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return png()[:12] + head + struct.pack(">I", zlib.crc32(head)) + png()[33:]


@pytest.mark.parametrize("change, words", [
    (lambda data: data, ""),
    (lambda data: data[:-9], "context: truncated, damaged or not a safetensors file"),
    (lambda data: data[:-4] + struct.pack("<f", np.nan), "audio_context holds NaN or infinite"),
    (lambda data: png(), "not a safetensors file but a PNG image"),
])  # fmt: skip
def test_contexts_are_read_whole(tmp_path, change, words):
    data = change(context(tmp_path / "x.safetensors"))
    with pytest.raises(Refusal, match=words) if words else contextlib.nullcontext():
        asyncio.run(check_upload(data, "context", CONTEXT))


NOISE = Image.effect_noise((300, 200), 50).convert("RGB")
NO_FILE = "it is no readable image; save it as PNG, JPEG or EXR"


@pytest.mark.parametrize("data, words", [
    (b"\x89PNG\r\n\x1a\n" + bytes(50), NO_FILE),
    (b"RIFF....WAVE", NO_FILE),
    (encoded(NOISE, "WEBP")[:9000], NO_FILE),
    (encoded(NOISE, "PNG")[:9000], "it is no readable image (image file is truncated"),
    (encoded(NOISE, "PNG", icc_profile=b"none"), "it has an ICC profile that cannot be applied"),
    (encoded(Image.new("L", (20000, 9)), "PNG"), "it has 20000x9 pixels, more than 16384 on a"),
    (png_of(8000), f"8000x8000 pixels, expected at most {MAX_PX}"),
    (png_of(50_000), f"over {2 * MAX_PX} pixels, expected at most"),
])  # fmt: skip
def test_what_no_worker_could_read_is_refused(data, words):
    with pytest.raises(Refusal) as refused:
        asyncio.run(check_upload(data, "images", IMAGE))
    assert (refused.value.status, refused.value.code) == (400, "bad_image")
    assert str(refused.value).startswith(f"images: {words}") and "tmp" not in str(refused.value)


def test_a_picture_is_a_video_of_one_frame():
    """As a sheet that a clip refers to; a damaged one is refused."""
    asyncio.run(check_upload(encoded(NOISE, "PNG"), "video_conditioning", VIDEO))
    with pytest.raises(Refusal, match="video_conditioning: it is no readable image"):
        asyncio.run(check_upload(encoded(NOISE, "PNG")[:9000], "video_conditioning", VIDEO))


def test_a_file_is_blamed_for_processor_time_and_the_machine_for_the_clock(monkeypatch):
    endless = """
from ltx2rt.serve import upload
upload.TIME_S["image"] = 1
def read_image(path):
    while True: pass
upload.read_image = read_image
upload.main()
"""
    monkeypatch.setattr(upload, "READER", (sys.executable, "-c", endless))
    data = encoded(NOISE, "PNG")
    with pytest.raises(Refusal, match="images: it takes too long to read") as refused:
        asyncio.run(check_upload(data, "images", IMAGE))
    assert (refused.value.status, refused.value.code) == (400, "bad_image")
    monkeypatch.setitem(upload.TIME_S, IMAGE, 0.02)
    with pytest.raises(Refusal, match="images: this machine is too busy to read it") as refused:
        asyncio.run(check_upload(data, "images", IMAGE))
    assert (refused.value.status, refused.value.code) == (503, "busy")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_the_largest_image_fits_the_memory_of_its_process(kind):
    """With a profile to convert and a rotation; WebP takes the most, 0.87 of 1 GiB."""
    image = Image.new("RGB", (8000, MAX_PX // 8000), (200, 30, 40))
    exif = image.getexif()
    exif[0x0112] = 6
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    more = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(image, kind, icc_profile=profile, exif=exif, **more)
    asyncio.run(check_upload(data, "images", IMAGE))


def box(last):
    return np.array([0, 0, last, last], "<i4").tobytes()


LIGHT = exr_bytes(np.ones((32, 32, 3), np.float32), "ACESCG")
NAN = exr_bytes(np.full((32, 32, 3), np.nan, np.float32), "ACESCG")


@pytest.mark.parametrize("data, words", [
    (LIGHT[:4], "it is no readable EXR image"),
    (LIGHT[:4] + bytes(200), "it is no readable EXR image"),
    (LIGHT[:300], "it is no readable EXR image"),
    (LIGHT.replace(box(31), box(9000)), "it "),
    (LIGHT.replace(box(31), box(2**31 - 1)), "it "),
    (NAN, "it holds NaN or infinite values"),
])  # fmt: skip
def test_what_is_no_light_is_refused(data, words):
    """An image of high dynamic range is told by its first bytes; a reader that ends is a refusal."""
    assert kind_of(data, IMAGE) == EXR and kind_of(data, VIDEO) == VIDEO
    with pytest.raises(Refusal) as refused:
        asyncio.run(check_upload(data, "images", EXR))
    assert (refused.value.status, refused.value.code) == (400, "bad_exr")
    assert str(refused.value).startswith(f"images: {words}") and "/dev/fd" not in str(refused.value)


def test_light_is_taken():
    asyncio.run(check_upload(LIGHT, "images", EXR))


def wav_of(seconds):
    """As many bytes as fit: 8 bits at 1000 Hz."""
    with wave.open(file := io.BytesIO(), "wb") as made:
        made.setnchannels(1), made.setsampwidth(1), made.setframerate(1000)
        made.writeframes(bytes(128 for _ in range(1000 * seconds)))
    return file.getvalue()


def test_a_song_may_be_longer_than_the_part_that_a_job_takes():
    asyncio.run(check_upload(wav_of(70), "audio_path", SOUND))
    with pytest.raises(Refusal, match="audio_path: longer than 3600 s"):
        asyncio.run(check_upload(wav_of(3700), "audio_path", SOUND))


def as_container(name, codec, sound, **how):
    """A short clip, or only its sound, in a container of this ending."""
    file = io.BytesIO()
    with av.open(file, "w", format=how.get("format", name)) as made:
        streams = []
        if codec:
            video = made.add_stream(codec, rate=25)
            video.width, video.height, video.pix_fmt = 64, 64, how.get("pix", "yuv420p")
            streams.append(video)
        if sound:
            audio = made.add_stream(sound, rate=48000, layout="stereo")
            audio.bit_rate = 128_000
            streams.append(audio)
        if codec:
            for i in range(5):
                frame = av.VideoFrame.from_ndarray(
                    np.full((64, 64, 3), 40 * i, np.uint8), format="rgb24"
                )
                frame = frame.reformat(format=video.pix_fmt)
                frame.pts, frame.time_base = i, Fraction(1, 25)
                made.mux(video.encode(frame))
        if sound:
            for at in range(0, 9600, 960):
                frame = av.AudioFrame.from_ndarray(
                    np.zeros((2, 960), np.float32), format="fltp", layout="stereo"
                )
                frame.sample_rate, frame.pts, frame.time_base = 48000, at, Fraction(1, 48000)
                made.mux(audio.encode(frame))
        for stream in streams:
            made.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize("kind, name, codec, sound, how", [
    (VIDEO, "avi", "mpeg4", "libmp3lame", {}), (VIDEO, "mpegts", "mpeg2video", "mp2", {}),
    (VIDEO, "vob", "mpeg2video", "mp2", {}), (VIDEO, "flv", "libx264", "", {}),
    (VIDEO, "asf", "wmv2", "wmav2", {}), (VIDEO, "mov", "prores_ks", "pcm_s24le", {"pix": "yuv422p10le"}),
    (VIDEO, "yuv4mpegpipe", "wrapped_avframe", "", {}), (VIDEO, "apng", "apng", "", {"pix": "rgb24"}),
    (SOUND, "aiff", "", "pcm_s16be", {}), (SOUND, "caf", "", "pcm_s24le", {}), (SOUND, "adts", "", "aac", {}),
    (SOUND, "w64", "", "pcm_s24le", {}), (SOUND, "au", "", "pcm_s16be", {}), (SOUND, "ac3", "", "ac3", {}),
    (SOUND, "eac3", "", "eac3", {}), (SOUND, "mp2", "", "mp2", {}), (SOUND, "wv", "", "wavpack", {}),
])  # fmt: skip
def test_the_server_takes_what_the_command_line_reads(kind, name, codec, sound, how):
    asyncio.run(check_upload(as_container(name, codec, sound, **how), "a_file", kind))


@pytest.mark.parametrize("kind, data, words", [
    (VIDEO, b"PK\x03\x04" + bytes(400), "it is no readable video (Invalid data"),
    (SOUND, b"PK\x03\x04" + bytes(400), "it is no readable sound (Invalid data"),
    (SOUND, as_container("mp4", "libx264", ""), "holds no sound; send another file"),
    (IMAGE, b"\0\0\x01\0" + bytes(40), "it is no readable image; save it as PNG, JPEG or EXR"),
])  # fmt: skip
def test_a_refusal_says_what_to_send(kind, data, words):
    with pytest.raises(Refusal) as refused:
        asyncio.run(check_upload(data, "a_file", kind))
    assert str(refused.value).startswith(f"a_file: {words}"), refused.value


def test_images_are_read_by_the_reader_of_the_command_line():
    """An AVIF of several pictures, and kinds without a name on the page."""
    frames = [NOISE, NOISE.rotate(180)]
    moving = encoded(NOISE, "AVIF", save_all=True, append_images=frames)
    for data in (moving, encoded(NOISE, "JPEG2000"), encoded(NOISE, "PPM")):
        asyncio.run(check_upload(data, "images", IMAGE))


def test_one_bad_packet_of_sound_does_not_refuse_a_clip():
    """It is silence, with a line, as on the command line."""
    data = as_container("mp4", "libx264", "aac")
    with av.open(io.BytesIO(data)) as found:
        packets = [p for p in found.demux(audio=0) if p.size]
        first = packets[len(packets) // 2].pos
    damaged = data[:first] + b"\xff" * 40 + data[first + 40 :]
    asyncio.run(check_upload(damaged, "a_file", VIDEO))
    asyncio.run(check_upload(damaged, "a_file", SOUND))


def test_a_request_has_room_for_the_largest_file_in_json():
    """Base64 takes four bytes for three; the other fields are small."""
    usual = flagged(ServeOptions)["max_upload"].default
    assert usual > max(upload.MAX_BYTES.values()) * 4 / 3 + 2**20
