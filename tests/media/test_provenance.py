"""Files say that a model made them, in words that other programs read."""

import datetime
import io
import json
import shutil
import struct
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import av
import numpy as np
import pytest
from PIL import Image

from ltx2rt.media.hdr import HighRange, attributes
from ltx2rt.media.mp4 import MP4, FollowedClip
from ltx2rt.media.output import check_signed, is_still, write_clip
from ltx2rt.media.provenance import SIGNED_TYPES, Origin, copy_mark, now, read_signature
from ltx2rt.run.files import Files
from tests.conftest import refused

IPTC = "http://iptc.org/std/Iptc4xmpExt/2008-02-29/"
SOURCES = "http://cv.iptc.org/newscodes/digitalsourcetype/"
ORIGIN = Origin('LTX-2.3 "dev"', "dev.safetensors", "0f3c", "2026-01-02T03:04:05Z")
RNG = np.random.default_rng(3)
FRAMES = RNG.integers(0, 256, (9, 64, 64, 3), np.uint8)
SOUND = RNG.uniform(-0.5, 0.5, (2, 48000 * 9 // 24)).astype(np.float32)
CLIP = {"num_frames": 9, "fps": Fraction(24), "waveform": SOUND, "sample_rate": 48000}
SIGNED = "a.mp4 a.mov a.wav a%02d.png a.jpg a.webp a.gif".split()


def packet_of(file: Path) -> str:
    """The XMP where its specification (part 3) puts it in each format, or as a tag."""
    data = file.read_bytes()
    if file.suffix == ".png":
        with Image.open(file) as image:
            return image.info["XML:com.adobe.xmp"]
    if file.suffix in (".jpg", ".webp"):
        with Image.open(file) as image:
            return image.info["xmp"].decode()
    if file.suffix == ".gif":
        return data.partition(b"!\xff\x0bXMP DataXMP")[2].partition(b"\x01\xff\xfe")[0].decode()
    if file.suffix == ".exr":
        (xmp,) = (value for name, value, _ in attributes(data) if name == "xmp")
        return xmp.decode()
    if file.suffix == ".webm":
        with av.open(str(file)) as container:
            return container.metadata["XMP"]
    if file.suffix == ".wav":
        at, chunks = 12, {}
        while at < len(data):
            name, size = struct.unpack_from("<4sI", data, at)
            chunks[name] = data[at + 8 : at + 8 + size]
            at += 8 + size + size % 2
        return chunks[b"_PMX"].decode()
    at, uuid = 0, bytes.fromhex("be7acfcb97a942e89c71999491e3afac")
    while at < len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"uuid" and data[at + 8 : at + 24] == uuid:
            return data[at + 24 : at + size].decode()
        at += size
    raise AssertionError("no box with XMP")


def properties(file: Path) -> dict[str, str]:
    root = ElementTree.fromstring(packet_of(file).encode())
    return dict(next(root.iter("{http://www.w3.org/1999/02/22-rdf-syntax-ns#}Description")).attrib)


@pytest.mark.parametrize("name", [
    "a.mp4", "a.mov", "a.webm", "a%02d.png", "a.wav", "hdr%02d.exr", "hdr.mp4", "a.jpg", "a.webp",
    "hdr.exr", "a.gif",
])  # fmt: skip
def test_every_form_says_that_a_model_made_it(name, tmp_path):
    hdr = HighRange("SRGB_LINEAR") if name.startswith("hdr") else None
    chunks = [RNG.uniform(-1, 1, (3, 9, 64, 64)).astype(np.float32)] if hdr else [FRAMES]
    if is_still(Path(name)):
        chunks = [chunks[0][:, :1] if hdr else FRAMES[:1]]
    files = write_clip(tmp_path / name, chunks, **CLIP, origin=ORIGIN, hdr=hdr)
    for file in files:
        found = properties(file)
        assert found[f"{{{IPTC}}}DigitalSourceType"] == SOURCES + "trainedAlgorithmicMedia"
        assert found[f"{{{IPTC}}}AISystemUsed"] == 'LTX-2.3 "dev"'
        assert found["{http://ns.adobe.com/xap/1.0/}CreateDate"] == "2026-01-02T03:04:05Z"
        if file.suffix in (".mp4", ".mov", ".webm"):
            with av.open(str(file)) as container:
                assert sum(1 for _ in container.decode(video=0)) == 9


def test_a_clip_that_keeps_parts_of_another_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1767323045")
    assert now() == "2026-01-02T03:04:05Z"
    origin = Origin("LTX-2.3", "", "1", now(), kept=(tmp_path / "given.mp4",))
    write_clip(tmp_path / "a.wav", [], **CLIP, origin=origin)
    kind = properties(tmp_path / "a.wav")[f"{{{IPTC}}}DigitalSourceType"]
    assert kind == SOURCES + "compositeWithTrainedAlgorithmicMedia"


def test_a_clip_that_was_streamed_meanwhile_is_marked(tmp_path):
    how = {"fps": Fraction(24), "sample_rate": None, "comment": None, "origin": ORIGIN}
    clip = FollowedClip(tmp_path / "a.mp4", tmp_path / "s.mp4", MP4, **how)
    clip.add(FRAMES, None)
    clip.close()
    write_clip(tmp_path / "part.mp4", [FRAMES], **CLIP)
    copy_mark(tmp_path / "a.mp4", tmp_path / "part.mp4")  # as a segment that a server hands out
    for name in ("a.mp4", "part.mp4"):
        assert properties(tmp_path / name)[f"{{{IPTC}}}AISystemVersionUsed"] == "dev.safetensors"
    bare = tmp_path / "bare.mp4"
    write_clip(bare, [FRAMES], **CLIP)
    size = bare.stat().st_size
    copy_mark(bare, tmp_path / "a.mp4")
    copy_mark(bare, bare)
    assert bare.stat().st_size == size


def certificate(folder: Path, days: int = 365, usage: str = "EMAIL_PROTECTION", rsa: bool = False):
    """A chain of two certificates and a key, as PEM files."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric import rsa as rsa_keys
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.UTC)
    root = ec.generate_private_key(ec.SECP256R1())
    key = rsa_keys.generate_private_key(65537, 2048) if rsa else ec.generate_private_key(root.curve)

    def named(text):
        kinds = ((NameOID.ORGANIZATION_NAME, "tests"), (NameOID.COMMON_NAME, text))
        return x509.Name([x509.NameAttribute(kind, value) for kind, value in kinds])

    def signed(subject, public, is_root, end):
        flags = (True, False, False, False, False, is_root, is_root, False, False)
        parent = x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key())
        builder = (
            x509.CertificateBuilder(named("root"), named(subject), public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=30))
            .not_valid_after(now + datetime.timedelta(days=end))
            .add_extension(x509.BasicConstraints(is_root, None), critical=True)
            .add_extension(x509.KeyUsage(*flags), critical=True)
            .add_extension(parent, critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        )
        if not is_root:
            purpose = x509.ExtendedKeyUsage([getattr(ExtendedKeyUsageOID, usage)])
            builder = builder.add_extension(purpose, critical=usage == "TIME_STAMPING")
        return builder.sign(root, hashes.SHA256())

    leaf = signed("leaf", key.public_key(), False, days)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    paths = folder / "cert.pem", folder / "key.pem"
    chain = leaf, signed("root", root.public_key(), True, 999)
    paths[0].write_bytes(b"".join(one.public_bytes(pem) for one in chain))
    paths[1].write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return paths


def manifest(file: Path, data: bytes | None = None):
    """The state of a file and its newest manifest, by c2pa-python's reader."""
    import c2pa

    stream = io.BytesIO(file.read_bytes() if data is None else data)
    read = json.loads(c2pa.Reader(SIGNED_TYPES[file.suffix], stream).json())
    return read["validation_state"], read["manifests"][read["active_manifest"]]


def actions_of(found):
    labelled = {one["label"]: one["data"] for one in found["assertions"]}
    return labelled["c2pa.actions.v2"]["actions"]


@pytest.mark.parametrize("name", SIGNED)
def test_signed_files_are_valid_until_a_byte_changes(name, tmp_path):
    pytest.importorskip("c2pa")
    given = tmp_path / "given.mp4"
    write_clip(given, [FRAMES], **CLIP)
    (tmp_path / "shown.mkv").write_bytes(b"no format that c2pa reads")
    signature = read_signature(*certificate(tmp_path, rsa=name in ("a.mov", "a.webp")))
    files = (given,), (tmp_path / "shown.mkv",)
    origin = Origin("LTX-2.3", "dev", "7", now(), *files, signature)
    chunks = [] if name.endswith(".wav") else [FRAMES[:1] if is_still(Path(name)) else FRAMES]
    for file in write_clip(tmp_path / name, chunks, **CLIP, origin=origin):
        state, found = manifest(file)
        assert state == "Valid"
        assert found["claim_generator_info"][0]["name"] == "ltx2rt"
        roles = {one["title"]: one["relationship"] for one in found["ingredients"]}
        assert roles == {"given.mp4": "parentOf", "shown.mkv": "inputTo"}
        actions = actions_of(found)
        assert [action["action"] for action in actions] == ["c2pa.opened", "c2pa.edited"]
        assert actions[1]["digitalSourceType"].endswith("compositeWithTrainedAlgorithmicMedia")
        assert properties(file)  # XMP is still there
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        try:
            assert manifest(file, bytes(data))[0] == "Invalid"
        except Exception as error:  # the byte belonged to the manifest itself
            assert type(error).__name__.startswith("_C2pa")


def test_a_clip_without_given_parts_is_created(tmp_path):
    pytest.importorskip("c2pa")
    origin = Origin("m", "", "7", now(), signature=read_signature(*certificate(tmp_path)))
    write_clip(tmp_path / "a.wav", [], **CLIP, origin=origin)
    actions = actions_of(manifest(tmp_path / "a.wav")[1])
    assert [action["action"] for action in actions] == ["c2pa.created"]
    assert actions[0]["digitalSourceType"] == SOURCES + "trainedAlgorithmicMedia"


def test_a_certificate_that_cannot_sign_is_refused(tmp_path):
    pytest.importorskip("c2pa")
    folders = [tmp_path / name for name in ("good", "other", "expired", "server")]
    for folder in folders:
        folder.mkdir()
    (cert, key), (_, other) = certificate(folders[0]), certificate(folders[1])
    cases = {
        "is not the key of": (cert, other),
        "has no certificate in PEM": (key, key),
        "has no private key in PEM": (cert, cert),
        "cannot be read": (cert, tmp_path / "none.pem"),
        "/dev/zero: not a regular file": (cert, Path("/dev/zero")),
        "is valid from": certificate(folders[2], days=-1),
        r"rejected|cannot sign": certificate(folders[3], usage="SERVER_AUTH"),
    }
    for words, files in cases.items():
        with refused(words):
            read_signature(*files)
    with refused(r"a\.webm cannot hold a C2PA manifest"):
        check_signed(Path("a.webm"))


@pytest.mark.long
def test_a_batch_marks_and_signs_its_clips(command, tmp_path):
    """One job of the tiny model, its settings left out, and what contradicts itself refused."""
    pytest.importorskip("c2pa")
    jobs, out, names = tmp_path / "jobs.jsonl", tmp_path / "out", certificate(tmp_path)
    clip = {"prompt": "a red circle", "width": 64, "height": 64, "num_frames": 9, "steps": 1}
    jobs.write_text(json.dumps({"id": "a", **clip}))
    out.mkdir()
    words = ["batch", jobs, "--output-dir", out, "--backend", "cuda", "--device", "cpu"]
    words += ["--model", Path(__file__).parents[2] / "examples/tiny-trained", "--sign", *names]
    status, _, said = command(*words, "--no-provenance")
    assert status == 2 and "--sign contradicts --no-provenance" in said
    elsewhere = ("--server", "http://127.0.0.1:9", "--sign", *names)
    status, _, said = command("batch", jobs, "--output-dir", out, *elsewhere)
    assert status == 2 and "--sign: with --server, the server's flags mark the files" in said
    status, _, said = command(*words, "--no-metadata")
    assert status == 0, said
    state, found = manifest(out / "a.mp4")
    assert state == "Valid" and [one["action"] for one in actions_of(found)] == ["c2pa.created"]
    assert properties(out / "a.mp4") and b"a red circle" not in (out / "a.mp4").read_bytes()


@pytest.fixture
def authority(tmp_path):
    """The URL of a time-stamp authority, played by openssl."""
    folder = tmp_path / "authority"
    folder.mkdir()
    (folder / "ts.cnf").write_text(
        "[tsa]\ndefault_tsa = t\n[t]\nserial = serial\ncrypto_device = builtin\nsigner_cert = cert.pem\n"
        "signer_key = key.pem\nsigner_digest = sha256\ndefault_policy = 1.2.3.4\ndigests = sha256, sha384\n"
        "accuracy = secs:1\nordering = yes\n"
    )  # fmt: skip
    certificate(folder, usage="TIME_STAMPING")
    asked = []

    class Stamp(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(self.path)
            (folder / "q").write_bytes(self.rfile.read(int(self.headers["content-length"])))
            openssl(folder, *"ts -reply -config ts.cnf -queryfile q -out r -chain cert.pem".split())
            data = (folder / "r").read_bytes()
            self.send_response(200)
            self.send_header("content-type", "application/timestamp-reply")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *about):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Stamp) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/stamp", asked
        server.shutdown()


def openssl(folder, *words):
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to date signatures")
def test_an_authority_dates_signatures_only_where_it_is_named(authority, tmp_path):
    pytest.importorskip("c2pa")
    url, asked = authority
    signature = read_signature(*certificate(tmp_path))
    assert not asked
    files = Files(outputs=(tmp_path / "a.png",), sign=signature, timestamp=url)
    files.check_marks(files.outputs)
    assert len(asked) == 1  # before the run
    origin = replace(ORIGIN, signature=files.signature)
    write_clip(tmp_path / "a.png", [FRAMES[:1]], **CLIP, origin=origin)
    state, found = manifest(tmp_path / "a.png")
    assert state == "Valid" and found["signature_info"]["time"] and len(asked) == 2
    for marks, says in (
        (Files(sign=signature, timestamp="ftp://x"), "expected http://HOST/PATH"),
        (Files(timestamp=url), "--timestamp dates a signature"),
        (Files(sign=signature, timestamp="http://127.0.0.1:9/x"), "127.0.0.1:9/x, --sign cannot sign"),
    ):  # fmt: skip
        with refused(says):
            marks.check_marks()


@pytest.mark.parametrize("name", ["a.mp4", "a.mov"])
def test_a_clip_and_its_tracks_have_a_time(name, tmp_path):
    write_clip(tmp_path / name, [FRAMES], **CLIP, origin=ORIGIN)
    with av.open(str(tmp_path / name)) as file:
        for tags in (file.metadata, *(stream.metadata for stream in file.streams)):
            assert tags["creation_time"].startswith(ORIGIN.time.removesuffix("Z"))
