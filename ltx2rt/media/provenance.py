"""Marks in a file that say that a model made it: XMP in IPTC's words and, signed, a C2PA manifest.

Decides the words and how each format holds them. Prompt and settings are the comment's business.

Sources: IPTC Photo Metadata Standard 2025.1 (digital source types, AI properties), XMP
specification part 3 (boxes and chunks), C2PA 2.2 (actions, ingredients).
"""

from __future__ import annotations

import io
import json
import mimetypes
import os
import struct
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from xml.sax.saxutils import quoteattr

from ltx2rt.errors import InputError, concerning
from ltx2rt.text_files import read_bytes
from ltx2rt.version import VERSION

MOST_PEM_BYTES = 2**20

SOURCE_TYPES = "http://cv.iptc.org/newscodes/digitalsourcetype/"
MADE, PARTLY_MADE = "trainedAlgorithmicMedia", "compositeWithTrainedAlgorithmicMedia"
NAMESPACES = {
    "Iptc4xmpExt": "http://iptc.org/std/Iptc4xmpExt/2008-02-29/",
    "xmp": "http://ns.adobe.com/xap/1.0/",
    "xmpMM": "http://ns.adobe.com/xap/1.0/mm/",
}
XMP_BOX = bytes.fromhex("be7acfcb97a942e89c71999491e3afac")  # the UUID of XMP in MP4 and MOV
XMP_BYTES = 2**14  # more than a packet of ours has
GIF_XMP = b"!\xff\x0bXMP DataXMP"  # an application's block
GIF_XMP_END = bytes([1, *range(255, -1, -1), 0])  # wherever a reader of blocks is, it comes out
XMP_TEXT = "XML:com.adobe.xmp"  # keyword of XMP in a PNG
SIGNED_TYPES = {
    ".mp4": "video/mp4",
    ".mov": "video/quicktime",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".wav": "audio/wav",
}  # in which c2pa-python writes a manifest


def copy_mark(source: Path, to: Path) -> None:
    """Append the XMP at the end of an MP4 or MOV, if it has one, to another."""
    with source.open("rb") as file:
        file.seek(max(0, source.stat().st_size - XMP_BYTES))
        _, mark, packet = file.read().rpartition(XMP_BOX)
    if mark:
        _append(to, mark + packet)


def _append(file: Path, packet: bytes) -> None:
    with file.open("ab") as to:
        to.write(struct.pack(">I4s", 8 + len(packet), b"uuid") + packet)


@dataclass(frozen=True)
class Signature:
    """A certificate chain with its private key, both PEM, and C2PA's name of their algorithm.
    timestamp: URL of an authority that dates each signature (RFC 3161); None: none is asked."""

    certificate: bytes
    key: bytes
    algorithm: str
    timestamp: str | None = None


@dataclass(frozen=True)
class Origin:
    """Record of the making of a clip.

    model, model_version: name and file. identity: unique to the clip. time: in ISO 8601. kept:
    given files of which the clip keeps parts. shown: files that the model was shown.
    """

    model: str
    model_version: str
    identity: str
    time: str
    kept: tuple[Path, ...] = ()
    shown: tuple[Path, ...] = ()
    signature: Signature | None = None

    @property
    def source_type(self) -> str:
        return SOURCE_TYPES + (PARTLY_MADE if self.kept else MADE)

    def xmp(self) -> str:
        """An XMP packet."""
        said = {
            "Iptc4xmpExt:DigitalSourceType": self.source_type,
            "Iptc4xmpExt:AISystemUsed": self.model,
            "Iptc4xmpExt:AISystemVersionUsed": self.model_version,
            "xmp:CreatorTool": f"ltx2rt {VERSION}",
            "xmp:CreateDate": self.time,
            "xmpMM:DocumentID": f"xmp.did:{self.identity}",
        }
        names = "".join(f" xmlns:{name}={quoteattr(uri)}" for name, uri in NAMESPACES.items())
        values = "".join(f"\n  {name}={quoteattr(value)}" for name, value in said.items())
        return (
            '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>\n'
            '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF'
            ' xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
            f'<rdf:Description rdf:about=""{names}{values}/></rdf:RDF></x:xmpmeta>\n'
            '<?xpacket end="r"?>'
        )

    def mark(self, file: Path, suffix: str) -> None:
        """Add the XMP to a finished MP4, MOV or GIF, and sign a file of any form that can be signed.
        suffix: of the file's final name."""
        if suffix in (".mp4", ".mov"):
            _append(file, XMP_BOX + self.xmp().encode())
        elif suffix == ".gif":
            data = file.read_bytes()
            start = 13 + (3 << (data[10] % 8 + 1) if data[10] & 128 else 0)  # header and colours
            packet = GIF_XMP + self.xmp().encode() + GIF_XMP_END
            file.write_bytes(data[:start] + packet + data[start:])
        if self.signature is None:
            return
        signed = file.with_name(f"{file.name}.signed")
        try:
            with file.open("rb") as source, signed.open("w+b") as to:
                self._sign(SIGNED_TYPES[suffix], source, to)
            os.replace(signed, file)
        finally:
            signed.unlink(missing_ok=True)

    def _sign(self, kind: str, source: Any, to: Any) -> None:
        import c2pa

        assert self.signature is not None, "a file is signed with a signature"
        made = {
            "action": "c2pa.edited" if self.kept else "c2pa.created",
            "digitalSourceType": self.source_type,
            "softwareAgent": {"name": self.model, "version": self.model_version},
            "when": self.time,
        }
        opened = {"action": "c2pa.opened", "parameters": {"ingredientIds": ["kept0"]}}
        actions = {"actions": [opened, made] if self.kept else [made]}
        manifest = {
            "claim_generator_info": [{"name": "ltx2rt", "version": VERSION}],
            "format": kind,
            "instance_id": f"xmp.iid:{self.identity}",
            "assertions": [{"label": "c2pa.actions.v2", "data": actions}],
        }
        own, c2pa_info = self.signature, cast(Any, c2pa.C2paSignerInfo)
        authority = own.timestamp.encode() if own.timestamp else None
        info = c2pa_info(own.algorithm.encode(), own.certificate, own.key, authority)
        with (
            c2pa.Signer.from_info(info) as by,
            c2pa.Builder(json.dumps(manifest)) as builder,
        ):
            for number, path in enumerate((*self.kept, *self.shown)):
                # a manifest has one parent, which its first action opens
                role = "componentOf" if number < len(self.kept) else "inputTo"
                role = "parentOf" if number == 0 and self.kept else role
                _add_ingredient(builder, path, role, f"kept{number}")
            builder.sign(by, kind, source, to)


def now() -> str:
    """UTC in seconds; SOURCE_DATE_EPOCH, if it is set, makes files of equal requests equal."""
    fixed = os.environ.get("SOURCE_DATE_EPOCH", "")
    moment = datetime.fromtimestamp(int(fixed), UTC) if fixed.isdigit() else datetime.now(UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _add_ingredient(builder: Any, path: Path, role: str, label: str) -> None:
    """Add a given file with its manifest, if it has one. If c2pa cannot read the format, record the
    file's name and hash."""
    import c2pa

    about = json.dumps({"title": path.name, "relationship": role, "label": label})
    kind, unknown = mimetypes.guess_type(path.name)[0], "application/octet-stream"
    with path.open("rb") as file:
        try:
            builder.add_ingredient(about, kind or unknown, file)
        except c2pa.C2paError:
            file.seek(0)
            builder.add_ingredient(about, unknown, file)


def read_signature(certificate: Path, key: Path) -> Signature:
    """The signature of `--sign`. Raises InputError unless readers of C2PA would accept it."""
    try:
        import c2pa  # noqa: F401
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ModuleNotFoundError:
        raise InputError("--sign needs c2pa-python; in the clone: pip install '.[c2pa]'") from None
    with concerning("--sign"):
        texts = [read_bytes(path, MOST_PEM_BYTES) for path in (certificate, key)]
    try:
        chain = x509.load_pem_x509_certificates(texts[0])
    except ValueError:
        raise InputError(f"--sign: {certificate} has no certificate in PEM") from None
    try:
        private: Any = load_pem_private_key(texts[1], None)
    except TypeError:
        raise InputError(f"--sign: {key} is encrypted; give a key without a passphrase") from None
    except ValueError:
        raise InputError(f"--sign: {key} has no private key in PEM") from None
    if private.public_key() != chain[0].public_key():
        raise InputError(f"--sign: {key} is not the key of {certificate}")
    begin, end = chain[0].not_valid_before_utc, chain[0].not_valid_after_utc
    if not begin <= datetime.now(UTC) <= end:
        raise InputError(f"--sign: {certificate} is valid from {begin:%Y-%m-%d} to {end:%Y-%m-%d}")
    signature = Signature(texts[0], texts[1], _algorithm(private, key))
    try_signing(signature, f"--sign: {certificate}")
    return signature


def try_signing(signature: Signature, what: str) -> None:
    """Sign a picture of one pixel. Raises InputError, which begins with `what`, unless readers of
    C2PA would accept it."""
    import c2pa
    from PIL import Image

    pixel, to = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (1, 1)).save(pixel, "PNG")
    pixel.seek(0)
    try:
        Origin("a model", "", "check", now(), signature=signature)._sign("image/png", pixel, to)
        read = json.loads(c2pa.Reader("image/png", to).json())
    except c2pa.C2paError as error:
        raise InputError(f"{what} cannot sign: {error}") from None
    for status in read.get("validation_status", ()):
        if not status["code"].endswith(".untrusted"):  # readers decide about trust
            raise InputError(f"{what} would be rejected: {status['explanation']}")


def _algorithm(private: Any, key: Path) -> str:
    """C2PA's name of a key's algorithm (C2PA 2.2, section 13.2.1)."""
    curve = getattr(getattr(private, "curve", None), "name", "")
    names = {"ed25519": "ed25519", "rsa": "ps256"}
    names |= {"secp256r1": "es256", "secp384r1": "es384", "secp521r1": "es512"}
    for kind, name in names.items():
        if kind == curve or kind in type(private).__name__.lower():
            return name
    raise InputError(
        f"--sign: {key} is of a kind that C2PA does not use; expected Ed25519, RSA or ECDSA on "
        "P-256, P-384, P-521"
    )
